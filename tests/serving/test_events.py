"""What a request costs on the model, in SimPy events: the same on every machine, unlike seconds."""

from dataclasses import replace

import pytest

from pdsim.kv.policy import Policy
from pdsim.models.llm import Side
from pdsim.serving.settings import SchedulerLimits, Workload
from tests.support.configs import ENGINE
from tests.support.serving import GQA, POOL, configured, serve

CHUNK = 256  # tokens
LONGER_THAN_THE_RUN = 1e9  # seconds: neither pings nor time limits are among the events


def events(count: int, tp: int, chunks: int, decode_tp: int = 0, **policy: str) -> int:
    """Return the events of serving *count* requests of *chunks* prefill iterations, one after the other."""
    given = chunks * CHUNK - 1
    lengths = {"input_mean": given, "input_cv": 0, "output_mean": 10, "output_cv": 0}
    config = configured(
        Side(tp=tp),
        Side(tp=decode_tp or tp),
        GQA,
        options={"deadline": LONGER_THAN_THE_RUN},
        backend=replace(ENGINE, timeout=LONGER_THAN_THE_RUN),
        kv=replace(POOL, pool=1 << 21),
        policy=Policy(queues=4, **policy),
        workload=Workload(arrivals="poisson", count=count, rate=0.01, **lengths),
        scheduler=SchedulerLimits(chunk=CHUNK, decode_batch=8),
    )
    outcome = serve(config).outcome
    assert outcome is not None
    return outcome.events


# without chunks: an arrival, two submissions, a destination, two steps and more of the schedulers, three reports;
# on each rank more a report of either side; metadata and each chunk, on each rank: its end; a chunk: the forward;
# of four equal ranks and more, two are simulated
@pytest.mark.parametrize(
    ("tp", "chunks", "count"), [(1, 1, 14), (1, 2, 16), (1, 4, 20), (2, 1, 20), (2, 2, 25), (4, 2, 25), (4, 4, 35)]
)
def test_a_request_costs_so_many_events_and_no_more(tp, chunks, count):
    assert (events(30, tp, chunks) - events(10, tp, chunks)) / 20 == count


# the planes of a chunk, one after the other, are one object at each writer: two events, where it begins and ends
@pytest.mark.parametrize(("tp", "decode_tp", "expected"), [(4, 2, 47), (2, 4, 49)])
def test_slices_plane_by_plane_cost_so_many_events_and_no_more(tp, decode_tp, expected):
    assert (
        events(30, tp, 2, decode_tp, slices="plane") - events(10, tp, 2, decode_tp, slices="plane")
    ) / 20 == expected
