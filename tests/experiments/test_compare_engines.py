"""`experiment=compare_engines`: every row is what `serve` says of it, and what cannot be is skipped."""

from dataclasses import asdict, replace
from typing import Any

import pytest

from experiments.compare_engines import CompareEnginesOptions, TransferEngine, run
from experiments.serve import ServeOptions
from pdsim.core.errors import ConfigError
from pdsim.core.progress import silent
from pdsim.kv.policy import Policy
from pdsim.models.llm import Side
from pdsim.results.record import Result
from pdsim.serving.settings import Kv, ServingEngine
from pdsim.sim.model import Model
from tests.support.configs import ENGINE
from tests.support.serving import GQA, ONE, configured, serve

ROOMY = Kv(page_size=16, pool=1 << 24, staging_ring=1 << 22)
STAGED = Policy(queues=2, staging=True)
PULL = ServingEngine(name="pull", handoff="pull", recompute=1, memory="grow")


def transfer(policy: Policy, **changes: Any) -> TransferEngine:
    return TransferEngine(**{**{k: getattr(ENGINE, k) for k in asdict(ENGINE)}, **changes}, policy=policy)


SLOW = replace(ENGINE.intra, call=5e-3)
BACKENDS = {"fast": transfer(STAGED), "slow": transfer(Policy(), intra=SLOW)}
CHOICES = {"backends": BACKENDS, "engines": {"push": ServingEngine(), "pull": PULL}}


def compared(decode: int = 2, **options: Any) -> tuple[Result, list[list[Any]]]:
    experiment = CompareEnginesOptions(**{**CHOICES, **options})
    config = configured(ONE, Side(tp=decode), GQA, kv=ROOMY, experiment=experiment)
    result = run(config, Model(config.hw, config.backend), silent)
    return result, result.tables[0].rows


def test_each_row_is_what_serving_says():
    result, rows = compared()
    metrics = result.values
    assert [row[4] for row in rows] == sorted(row[4] for row in rows)
    assert (metrics["combinations"], metrics["combinations_skipped"]) == (7, 3)
    assert (metrics["ttft_p50_best_s"], metrics["ttft_p50_worst_s"]) == (rows[0][4], rows[-1][4])
    found = {tuple(row[:4]): row[4:] for row in rows}
    assert sorted(found) == [
        ("fast", "pull", "as it is", "policy"),
        ("fast", "push", "as it is", "policy"),
        ("fast", "push", "staged", "policy"),
        ("none: colocated", "pull", "as it is", "-"),
        ("none: colocated", "push", "as it is", "-"),
        ("slow", "pull", "as it is", "policy"),
        ("slow", "push", "as it is", "policy"),
    ]
    plain = configured(ONE, Side(tp=2), GQA, kv=ROOMY)
    for key, config in {
        ("fast", "push", "staged"): replace(plain, policy=STAGED, kv=replace(plain.kv, staging=True)),
        ("slow", "pull", "as it is"): replace(plain, backend=replace(ENGINE, intra=SLOW), engine=PULL),
        ("none: colocated", "push", "as it is"): replace(plain, experiment=ServeOptions(deployment="colocated")),
    }.items():
        alone = serve(config).values
        expected = [alone[name] for name in ("ttft_p50_s", "ttft_p90_s", "tpot_p50_s", "transfer_p50_s", "goodput")]
        assert next(row for names, row in found.items() if names[:3] == key)[:5] == expected


def test_what_cannot_be_compared_is_skipped_with_the_reason():
    result, rows = compared(decode=1, colocated=False)
    assert {row[2] for row in rows} == {"as it is"}
    reasons = {tuple(row[:2]): row[4] for row in result.tables[1].rows}
    assert "set another parallel.decode.tp" in reasons["fast", "push"]
    assert "pulled KV has no staging" in reasons["fast", "pull"]
    with pytest.raises(ConfigError, match=r"no combination of experiment\.backends and engines can be run"):
        compared(decode=1, colocated=False, staging=(True,))
