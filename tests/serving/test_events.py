"""What a request costs on the model, in SimPy events: the same on every machine, unlike seconds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdsim.kv.policy import Policy
from pdsim.serving.settings import Scheduler, Side, Workload
from tests.experiments.test_serve import GQA, POOL, configured, serve
from tests.results.conftest import ENGINE

CHUNK = 256  # tokens
LONGER_THAN_THE_RUN = 1e9  # seconds: neither pings nor time limits are among the events


def events(count: int, tp: int, chunks: int) -> int:
    """Return the events of serving *count* requests of *chunks* prefill iterations, one after the other."""
    given = chunks * CHUNK - 1
    lengths = {"input_mean": given, "input_cv": 0, "output_mean": 10, "output_cv": 0}
    config = configured(
        Side(tp=tp),
        Side(tp=tp),
        GQA,
        options={"deadline": LONGER_THAN_THE_RUN},
        backend=replace(ENGINE, timeout=LONGER_THAN_THE_RUN),
        kv=replace(POOL, pool=1 << 21),
        policy=Policy(queues=4),
        workload=Workload(arrivals="poisson", count=count, rate=0.01, **lengths),
        scheduler=Scheduler(chunk=CHUNK, decode_batch=8),
    )
    outcome = serve(config).outcome
    assert outcome is not None
    return outcome.events


# without chunks: an arrival, two submissions, a destination, two steps and more of the schedulers, three reports;
# on each rank more a report of either side; a chunk: forward and, on each rank, the end of posting and that of the flow
@pytest.mark.parametrize(
    ("tp", "chunks", "expected"), [(1, 1, 15), (1, 2, 18), (1, 4, 24), (4, 1, 30), (4, 2, 43), (4, 4, 69)]
)
def test_a_request_costs_so_many_events_and_no_more(tp: int, chunks: int, expected: int):
    assert (events(30, tp, chunks) - events(10, tp, chunks)) / 20 == expected
