"""`experiment=allgather` on the model: exact bandwidths, verified contents, pools that are reserved or grow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.allgather import AllgatherOptions, check, run
from pdsim.config import Config
from pdsim.core.errors import ConfigError
from pdsim.core.progress import silent
from pdsim.results.record import Result
from pdsim.sim.model import Model
from tests.support.configs import ENGINE, MACHINE, make_config
from tests.support.engines import COLLECTIVE

EIGHT = replace(MACHINE, gpus=8)
SMALL = {"ranks": (2, 4), "size": (4096, 65536), "batches": ((9, 9), (3, 50)), "row": 16, "repeat": 3, "warmup": 1}
LIBRARY = replace(COLLECTIVE, pool=1 << 20)


def configured(memory: str = "timing", **options: Any) -> Config:
    experiment = AllgatherOptions(**SMALL | options)
    return make_config(Path("unused"), hw=EIGHT, memory=memory, collective=LIBRARY, experiment=experiment)


def measure(memory: str = "timing", **options: Any) -> Result:
    config = configured(memory, **options)
    model = Model(EIGHT, ENGINE, memory=memory, collective=config.collective)
    return run(config, model, silent)


def rows(result: Result) -> list[dict[str, Any]]:
    table = result.tables[0]
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def test_a_row_has_the_median_and_both_bandwidths():
    (row,) = rows(measure(ranks=(4,), size=(8_000_000,), pools=("default",), batches=(), growth=False, repeat=4))
    # 10 us, three steps of 2 us, and three pieces of 8 MB through 8 GB/s
    assert row["med us"] == pytest.approx(3016, rel=1e-9)
    assert (row["q1"], row["q3"]) == (pytest.approx(3016, rel=1e-9), pytest.approx(3016, rel=1e-9))
    assert row["alg GB/s"] == pytest.approx(32e6 / 3016e-6 / 1e9, rel=1e-9)
    assert row["bus GB/s"] == pytest.approx(24e6 / 3016e-6 / 1e9, rel=1e-9)


def test_every_piece_and_every_token_of_every_point_is_verified():
    found = rows(measure("tracked"))
    assert len(found) == 2 * (4 * 2 + 4)  # ranks, then points reserved on two pools and grown on one
    assert {row["status"] for row in found} == {"ok"}
    for row in found:
        checks = row["ranks"] if row["batch"] == "-" else sum(int(n) for n in row["batch"].split("+"))
        assert row["verified"] == f"{checks * row['ranks']}/{checks * row['ranks']}"


def test_a_reserved_pool_does_not_grow_and_another_does():
    for row in rows(measure()):
        assert (row["growths"] > 0) == (row["growth ms"] > 0)
        if row["pool"] == "symmetric, grown" and row["piece"] == "64 KiB":
            assert row["growths"] == 1
        if row["pool"] == "symmetric":
            assert row["growths"] == 0


def test_more_ranks_than_gpus_and_more_bytes_than_memory_are_refused_by_name():
    (line,) = check(configured(ranks=(9,)))
    assert "experiment.ranks=9" in line
    (line,) = check(configured(size=(1 << 28,)))
    assert "collective.pool" in line
    with pytest.raises(ConfigError, match=r"experiment\.ranks=9"):
        measure(ranks=(9,))


def test_real_ranks_without_the_library_are_refused_before_they_start(monkeypatch):
    monkeypatch.setattr("experiments.allgather.plugins.names", lambda group: ["gloo"])
    lacking = type("Lacking", (), {"missing": classmethod(lambda cls: "needs PyTorch; pip install 'pdsim[torch]'")})
    monkeypatch.setattr("experiments.allgather.plugins.resolve", lambda group, name: lacking)
    config = replace(configured(), collective=replace(LIBRARY, name="gloo", implementation="gloo"))
    assert list(check(config)) == []
    assert list(check(replace(config, target="real"))) == [
        "collective=gloo needs PyTorch; pip install 'pdsim[torch]'"
    ]
