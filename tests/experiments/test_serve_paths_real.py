"""The paths of `experiment=serve` on the real engines: unlike ranks, sliced and staged, every byte compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.serve import ServeOptions, run
from pdsim.compute.forward import Compute
from pdsim.config import Config
from pdsim.core.progress import silent
from pdsim.kv.policy import Policy
from pdsim.models.llm import Llm
from pdsim.models.parallel import Parallel, Side
from pdsim.results.record import Result
from pdsim.serving.settings import Kv, SchedulerLimits
from tests.support.configs import LOOPBACK, make_config
from tests.support.engines import REAL, engine, make_target
from tests.support.serving import GENERATED, GQA, MLA

ENGINES = [pytest.param(name, marks=getattr(pytest.mark, name.split("_")[0])) for name in REAL[:2]]
STAGED = Policy(queues=4, staging=True)
SLICED = Kv(page_size=16, pool=1 << 20)
FEW = replace(GENERATED, count=4, input_mean=90, output_mean=3)


def served(
    name: str, prefill: int, decode: int, kv: Kv = SLICED, policy: Policy = STAGED, model: Llm = GQA
) -> Result:
    config: Config = make_config(
        Path("unused"),
        target="real",
        hw=LOOPBACK,
        backend=engine(name),
        model=model,
        policy=policy,
        parallel=Parallel(prefill=Side(tp=prefill), decode=Side(tp=decode)),
        experiment=ServeOptions(deadline=30.0),
        workload=FEW,
        kv=kv,
        scheduler=SchedulerLimits(chunk=64, decode_batch=4),
        compute=Compute(scale=0.1),
    )
    result = run(config, make_target(name), silent)
    assert result.failures == []
    assert set(result.requests["status"]) == {"ok"}
    return result


MOONCAKE, NIXL = ENGINES
COMBINATIONS = [
    *(
        pytest.param(*case, *engine.values, marks=engine.marks)
        for engine in ENGINES
        for case in ((2, 1, "staged"), (1, 2, "staged"))
    ),
    *(
        pytest.param(*case, *MOONCAKE.values, marks=MOONCAKE.marks)
        for case in ((1, 2, "sliced"), (2, 4, "sliced"), (4, 2, "staged"))
    ),
    *(
        pytest.param(*case, *NIXL.values, marks=NIXL.marks)
        for case in ((2, 1, "sliced"), (4, 2, "sliced"), (2, 4, "staged"))
    ),
]
"""Every pair of sizes both ways; each engine has most of them, for a job starts up to seven processes."""


@pytest.mark.slow
@pytest.mark.parametrize(("prefill", "decode", "path", "name"), COMBINATIONS)
def test_unlike_ranks_hand_over_what_was_sent(prefill: int, decode: int, path: str, name: str):
    kv = replace(SLICED, staging=path == "staged", staging_ring=1 << 18)
    result = served(name, prefill, decode, kv)
    assert set(result.requests["path"]) == {path}
    values = [rank.value for rank in result.outcome.ranks.values() if isinstance(rank.value, dict)]
    assert sum(value.get("staging_held", 0) for value in values) == 0


WRITTEN = Policy(queues=4, metadata="write")
SENT = Policy(queues=8, shard="room", call="plane", notify="message", pool="nvlink")


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        pytest.param(*NIXL.values, WRITTEN, marks=NIXL.marks, id="nixl, written"),
        pytest.param(*MOONCAKE.values, SENT, marks=MOONCAKE.marks, id="mooncake, sent from the host"),
    ],
)
def test_metadata_arrives_both_ways(name: str, policy: Policy):
    assert set(served(name, 1, 1, policy=policy, model=MLA).requests["path"]) == {"grouped"}
