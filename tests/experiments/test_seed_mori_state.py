"""`experiment=seed_mori_state`: what inline posting, state, metadata and unlike ranks do on the model."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from experiments.reports.claims import as_rows
from experiments.reports.mori_state import run
from pdsim.core.progress import silent
from pdsim.results.record import Result
from pdsim.sim.model import Model
from tests.support.composed import composed

SMALL = {"concurrency": (1, 20), "tokens": 1024, "lengths": (512,), "tp": ("2to1",), "repeat": 2}


@cache
def seeded(*words: str, memory: str = "timing") -> Result:
    config = composed("experiment=seed_mori_state", *words)
    config = replace(
        config, memory=memory, experiment=replace(config.experiment, **SMALL, served=composed("model=tiny").model)
    )
    model = Model(config.hw, config.backend, memory=memory)
    return run(config, model, silent)


def effects(result: Result, machine: str = "2x8xmi300x mori") -> dict[tuple[str, str], Any]:
    """Return those that were simulated now, and not what is committed of other machines and of real ones."""
    rows = [row for row in as_rows(result, "Points") if (row["machine"], row["target"]) == (machine, "model")]
    return {(row["claim"], row["at"]): row["effect"] for row in rows}


def test_inline_posting_serves_less_where_posts_take_longer_than_forwards():
    found = effects(seeded())
    assert 0.8 < found["throughput", "20 requests of 1024 tokens"] < 0.95
    assert found["drain", "20 requests of 1024 tokens"] == pytest.approx(1.0, rel=1e-3)


def test_it_drains_faster_where_an_engine_lets_calls_overlap():
    found = effects(seeded("hw=loopback"), "loopback mooncake_tcp")
    assert found["drain", "20 requests of 1024 tokens"] > 1.3


def test_what_is_polled_is_told_later_once_another_forward_runs():
    found = effects(seeded())
    assert found["told", "1 requests of 1024 tokens"] == pytest.approx(1.0, rel=0.02)
    assert found["told", "20 requests of 1024 tokens"] > 1.5


def test_state_and_slices_arrive_intact_and_cost_time():
    config = {"states": {"all": composed("model=tiny-hybrid").model}, "served": composed("model=tiny").model}
    config |= {"concurrency": (1,)}
    base = composed("experiment=seed_mori_state", "hw=loopback")
    own = replace(base.experiment, **SMALL | config)
    tracked = replace(base, memory="tracked", experiment=own)
    result = run(tracked, Model(base.hw, base.backend, memory="tracked"), silent)
    assert result.failures == []
    found = effects(result, "loopback mooncake_tcp").items()
    assert {claim: effect for (claim, _), effect in found if claim in ("state", "slices")} == {
        "state": 1,
        "slices": 1,
    }
    assert min(row["times"] for row in as_rows(result, "What it costs")) > 1.0
