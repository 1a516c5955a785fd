"""`experiment=transfer` on the real engines: the same programs, real bytes, and a rank that is really killed."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.transfer import TransferOptions, run
from pdsim.config import Config
from pdsim.core.progress import silent
from pdsim.transfer.job import Outcome, RankSpec
from tests.experiments.test_transfer import POINTS
from tests.support.configs import LOOPBACK, make_config
from tests.support.engines import MARKED, engine, make_target


def configured(name: str, timeout: float = 30.0, **options: Any) -> Config:
    few = {"blocks": (4,), "size": (4096,), "repeat": 20, "warmup": 2, "ranks": 3}
    experiment = TransferOptions(**few | options)
    backend = replace(engine(name), timeout=timeout)
    return make_config(Path("unused"), target="real", hw=LOOPBACK, backend=backend, experiment=experiment)


@pytest.mark.parametrize(
    ("name", "operation", "layout"),
    [
        pytest.param(*each.values, *case, marks=each.marks)
        for each, case in zip(
            MARKED, [("write", "contiguous"), ("read", "scattered"), ("write", "scattered")], strict=True
        )
    ],
)
def test_every_slot_arrives_as_it_was_sent(name, operation, layout):
    options = {"patterns": ("alltoall",), "concurrency": (2,), "operation": operation, "layout": layout}
    result = run(configured(name, **options), make_target(name), silent)
    assert [(row["verified"], row["status"]) for row in result.rows(POINTS)] == [("12/12", "ok")]
    assert len(result.transfers) == 6 * 20
    assert all(r.submitted <= r.prepared <= r.posted <= r.completed <= r.seen for r in result.transfers)
    assert {record.engine for record in result.transfers} == {rank.engine for rank in result.outcome.ranks.values()}


@pytest.mark.slow
@pytest.mark.parametrize("name", MARKED)
@pytest.mark.parametrize("victim", ["rank0", "rank1"])
def test_a_killed_rank_ends_its_point_as_peer_lost(name, victim):
    real, kills = make_target(name), [{victim: 0.5}]

    class Killing:
        def run(self, ranks: Sequence[RankSpec], kill: Mapping[str, float] | None = None) -> Outcome:
            return real.run(ranks, kills.pop() if kills else {})

    many = {"patterns": ("pair",), "size": (1 << 20,), "repeat": 100_000}
    config = configured(name, timeout=8.0, **many)  # rank1 waits so long for the killed rank0
    result = run(config, Killing(), silent)
    assert [row["status"] for row in result.rows(POINTS)] == ["PeerLost"]
    assert any(failure.startswith(f"{victim}: ") for failure in result.failures)
