"""Forwards of a long prompt in one message, compared with a message for each."""

from dataclasses import replace

import pytest

from experiments.serve import run
from pdsim.core.progress import silent
from pdsim.results.record import Result
from pdsim.sim.faults import CardOutage
from pdsim.sim.model import Model
from pdsim.transfer import TransferRecord
from tests.support.composed import composed

LENGTHS = ["workload=poisson", "workload.output_mean=20", "scheduler.chunk=1024"]
LATE = CardOutage(0, 0, 1e8, 1e9)
"""What may come ends runs of forwards: nobody knows when theirs end."""


def both(*words: str) -> tuple[Result, Result]:
    """Return what comes of a job with runs of forwards, and without."""
    config = composed("hw=8xh20", *LENGTHS, *words)
    model = Model(config.hw, config.backend, seed=config.seed)
    at_once, one_by_one = (run(config, one, silent) for one in (model, replace(model, outages=[LATE])))
    assert not at_once.failures
    return at_once, one_by_one


def moved(record: TransferRecord) -> tuple[tuple[str, str, int], tuple[float, ...]]:
    """Return who moved what, and when."""
    return (record.label, record.source, record.nbytes), (record.submitted, record.posted, record.completed)


# one is on an idle machine; in a burst the host slows down while a run goes on; slices go plane by plane and
# sequences of two prefill instances meet at one decode instance; users leave within a run
@pytest.mark.parametrize(
    "words",
    [
        "workload.input_mean=40000 workload.count=3 workload.rate=0.01",
        "workload.input_mean=20000 workload.count=12 workload.rate=1",
        "model=llama-3.1-8b parallel.prefill.tp=2 workload.input_mean=9000 workload.count=5 workload.rate=1",
        "model=llama-3.1-8b parallel=tp2 parallel.prefill.instances=2 workload.input_mean=20000 workload.count=12",
        "workload.input_mean=40000 workload.count=12 workload.rate=0.1 workload.aborts=1",
    ],
    ids=["alone", "burst", "slices", "crossing", "aborts"],
)
def test_forwards_told_at_once_change_no_times(words):
    at_once, one_by_one = both(*words.split())
    assert at_once.outcome is not None
    assert one_by_one.outcome is not None
    assert at_once.outcome.events < 0.9 * one_by_one.outcome.events
    for name, column in at_once.requests.items():
        same = [value if isinstance(value, str) else pytest.approx(value, abs=1e-7) for value in column]
        assert list(one_by_one.requests[name]) == same, name  # the longer message takes 20 ns
    logs = [sorted(map(moved, one.transfers)) for one in (at_once, one_by_one)]
    assert [who for who, _ in logs[0]] == [who for who, _ in logs[1]]
    assert [at for _, at in logs[0]] == [pytest.approx(at, abs=1e-7) for _, at in logs[1]]


def test_a_long_prompt_costs_hardly_more_events_than_a_short_one():
    short, long = (
        both(f"workload.input_mean={n}", "workload.input_cv=0", "workload.count=1")[0] for n in (8192, 65536)
    )
    assert long.outcome is not None
    assert short.outcome is not None
    assert long.outcome.events < 1.1 * short.outcome.events
