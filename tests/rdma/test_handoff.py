"""A request's KV handed over between unlike ranks over RDMA verbs, every byte compared on arrival."""

from dataclasses import replace

import pytest

from backends.emulation.guest.machine import PATIENCE
from experiments.serve import run
from pdsim.core.progress import silent
from pdsim.kv.policy import Policy
from pdsim.models.llm import Llm, Side
from pdsim.serving.settings import Kv, SchedulerLimits, Workload
from pdsim.testing.cases import guest_target as target
from tests.backends import programs
from tests.experiments.test_serve_paths import STATE
from tests.support.engines import VERBS, engine, spec
from tests.support.serving import on_loopback

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(900)]

MiB = 1 << 20
TOKENS = 2048
HEAVY = Llm(name="heavy", parameters=1e6, active=1e6, layers=7, hidden=128, heads=8, kv_heads=8, head_dim=512)
"""Of its layers two are of full attention, with 32 KiB a token: 64 MiB for `TOKENS`; the others have state."""


@pytest.mark.parametrize("name", VERBS)
def test_keys_values_and_state_arrive_between_unlike_ranks(name, rdma_guest):
    config = on_loopback(
        name,
        Side(tp=2),
        model=replace(HEAVY, hybrid=STATE),
        deadline=60.0 * PATIENCE,
        backend=replace(engine(name), timeout=60.0 * PATIENCE),
        policy=Policy(queues=4, staging=True),
        workload=Workload(arrivals="poisson", count=1, rate=10.0, input_mean=TOKENS, input_cv=0, output_mean=2),
        kv=Kv(page_size=64, pool=192 * MiB, staging=True, staging_ring=64 * MiB, staging_wait=60 * PATIENCE),
        scheduler=SchedulerLimits(chunk=512, decode_batch=2),
    )
    result = run(config, target(rdma_guest, config.backend), silent)
    assert result.failures == []
    assert result.requests["status"] == ["ok"]
    assert result.requests["path"] == ["staged"]
    assert sum(record.nbytes for record in result.transfers) == sum(result.requests["nbytes"]) > 64 * MiB
    assert all("rdma" in record.engine or "rc_verbs" in record.engine for record in result.transfers)


@pytest.mark.parametrize("name", VERBS)
def test_lost_peers_leave_no_posting_thread(name, rdma_guest):
    others = [spec(each, programs.be_written_and_die, by="a") for each in "bcd"]
    job = [spec("a", programs.lose_in_turn, others=[*"bcd"]), *others]
    a = target(rdma_guest, engine(name)).run(job).ranks["a"]
    assert not a.error
    assert [row[2] for row in a.value] == [a.value[0][2]] * 3
