"""Where ranks run and how much memory they get."""

from dataclasses import replace

import pytest

from experiments.serve import ServeOptions, job, prefill_pool
from pdsim.compute.roofline import kv_shape
from pdsim.config.compose import compose
from pdsim.core.errors import ConfigError
from pdsim.hardware.machine import Machine
from pdsim.models.llm import Parallel, Side
from pdsim.serving.deployment import pages_per_rank, places
from pdsim.serving.settings import Kv, SchedulerLimits
from pdsim.transfer.job import Place
from tests.serving.test_compute import MACHINE, MODEL

TWO_NODES = replace(MACHINE, nodes=2)
HOSTS = replace(MACHINE, gpus=0, gpu=None)


def parallel(prefill: int, decode: int) -> Parallel:
    return Parallel(prefill=Side(tp=prefill), decode=Side(tp=decode))


@pytest.mark.parametrize(
    ("machine", "sizes", "prefill", "decode"),
    [
        (MACHINE, (2, 1), [Place(0, 0), Place(0, 1)], [Place(0, 2)]),
        (TWO_NODES, (1, 2), [Place(0, 0)], [Place(1, 0), Place(1, 1)]),
        (TWO_NODES, (4, 12), [Place(0, n) for n in range(4)], [Place(n // 8, n % 8) for n in range(4, 16)]),
        (HOSTS, (1, 2), [Place(0)], [Place(0), Place(0)]),
    ],
)
def test_decode_is_on_the_next_node_if_it_fits_there(machine, sizes, prefill, decode):
    assert places(parallel(*sizes), machine) == (prefill, decode)


def test_prefill_computes_on_gpus_of_another_kind():
    own = compose(["hw=2x8xh200", "model=llama-3.1-70b", "parallel=tp4"])
    mixed = compose(["hw=2x8xh200", "hw.prefill=8xb200", "model=llama-3.1-70b", "parallel=tp4"])
    machine, compute = prefill_pool(mixed)
    assert machine.gpu is not None
    assert (machine.gpu.name, compute.measured_gpu, machine.nic) == ("B200", "B200", mixed.hw.nic)
    assert prefill_pool(own) == (own.hw, own.compute)
    one, other = (job(config, ServeOptions()) for config in (own, mixed))
    pieces = [(0, 2048)]
    assert 0.3 < other.prefill_seconds(pieces) / one.prefill_seconds(pieces) < 0.8
    assert other.decode_time == one.decode_time
    assert {place.node for place in places(mixed.parallel, mixed.hw)[1]} == {1}
    with pytest.raises(ConfigError, match=r"hw.prefill=8xb200 needs nodes of its own .* raise hw.nodes"):
        places(mixed.parallel, replace(mixed.hw, nodes=1))
    with pytest.raises(ConfigError, match="target=model, GPUs and a disaggregated deployment; leave hw"):
        compose(["hw=2x8xh200", "hw.prefill=8xb200", "experiment.deployment=colocated"])


def test_more_ranks_than_gpus_are_refused():
    with pytest.raises(ConfigError, match=r"4 \+ 8 GPUs, hw=round numbers has 8"):
        places(parallel(4, 8), MACHINE)


def count(machine: Machine, kv: Kv, tp: int = 1, ranks: int = 2) -> int:
    half = SchedulerLimits(memory_fraction=0.5)
    return pages_per_rank(Side(tp=tp), MODEL, kv_shape(MODEL), machine, kv, half, ranks)


def test_the_pool_is_what_the_weights_leave_or_what_is_asked_for():
    page = 64 * 2 * 10 * 4 * 100 * 2
    assert count(MACHINE, Kv()) == (5 * 10**10 - 2 * 10**10) // page
    assert count(MACHINE, Kv(pool=3 * page + 1)) == 3
    assert count(HOSTS, Kv(), ranks=4) == 5 * 10**11 // 4 // page  # hosts hold no weights and share their memory


def test_a_pool_that_holds_no_page_is_refused():
    with pytest.raises(ConfigError, match=r"a page of kv.page_size=64 tokens takes .* raise tp, kv.pool"):
        count(MACHINE, Kv(pool=1000))
