"""`experiment=allgather`: exact bandwidths, verified contents, pools that are reserved or grow."""

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
from tests.support.configs import EIGHT, ENGINE, LOOPBACK, make_config
from tests.support.engines import COLLECTIVE, gathering_target

SMALL = {"ranks": (2, 4), "size": (4096, 65536), "batches": ((9, 9), (3, 50)), "row": 16, "repeat": 3, "warmup": 1}
LIBRARY = replace(COLLECTIVE, pool=1 << 20)


def configured(memory: str = "timing", **options: Any) -> Config:
    experiment = AllgatherOptions(**SMALL | options)
    return make_config(Path("unused"), hw=EIGHT, memory=memory, collective=LIBRARY, experiment=experiment)


def measure(memory: str = "timing", **options: Any) -> Result:
    return run(configured(memory, **options), Model(EIGHT, ENGINE, memory=memory, collective=LIBRARY), silent)


def growths(result: Result, pool: str) -> list[int]:
    return [row["growths"] for row in result.rows("All-gathers") if row["pool"] == pool]


def test_a_row_has_the_median_and_both_bandwidths():
    one = {"ranks": (4,), "size": (8_000_000,), "pools": ("default",), "batches": (), "growth": False}
    (row,) = measure(**one, repeat=4).rows("All-gathers")
    # 10 us, three steps of 2 us, and three pieces of 8 MB through 8 GB/s
    times = [row[name] for name in ("q1", "med us", "q3")]
    assert times == pytest.approx([3016] * 3, rel=1e-9)
    assert row["alg GB/s"] == pytest.approx(32e6 / 3016e-6 / 1e9, rel=1e-9)
    assert row["bus GB/s"] == pytest.approx(24e6 / 3016e-6 / 1e9, rel=1e-9)


def test_every_token_is_verified_and_only_a_grown_pool_grows():
    result = measure("tracked")
    found = result.rows("All-gathers")
    assert len(found) == 2 * (4 * 2 + 4)  # ranks, then points reserved on two pools and grown on one
    for row in found:
        checks = row["ranks"] if row["batch"] == "-" else sum(int(n) for n in row["batch"].split("+"))
        assert (row["verified"], row["status"]) == (f"{checks * row['ranks']}/{checks * row['ranks']}", "ok")
        assert (row["growths"] > 0) == (row["growth ms"] > 0)
    assert set(growths(result, "symmetric")) == {0}
    assert growths(result, "symmetric, grown")[:2] == [0, 1]  # of 4 KiB, then of 64


def test_pieces_and_tokens_arrive_through_gloo_as_on_the_model():
    pytest.importorskip("torch", reason="groups of real ranks need PyTorch")
    options = {"ranks": (2,), "size": (4096, 1 << 16), "batches": ((9, 9), (3, 50)), "repeat": 4}
    _, target = gathering_target("gloo")
    target.collective = replace(LIBRARY, timeout=60.0)
    real = run(replace(configured(**options), target="real", hw=LOOPBACK), target, silent)
    assert not real.failures
    for row in real.rows("All-gathers"):
        assert (row["status"], len(set(row["verified"].split("/")))) == ("ok", 1)
        assert row["verified"] != "0/0"
        assert row["q1"] <= row["med us"] <= row["q3"]
    assert {record.engine for record in real.transfers} == {"gloo:plain", "gloo:symmetric", "gloo:reserve"}
    assert (growths(real, "symmetric"), growths(real, "symmetric, grown")[:2]) == ([0] * 4, [0, 1])


@pytest.mark.parametrize(
    ("options", "key"), [({"ranks": (9,)}, "experiment.ranks=9"), ({"size": (1 << 28,)}, "collective.pool")]
)
def test_ranks_and_bytes_that_the_machine_lacks_are_refused(options, key):
    (line,) = check(configured(**options))
    assert key in line
    with pytest.raises(ConfigError, match=key):
        measure(**options)


def test_real_ranks_without_the_library_are_refused_before_they_start(monkeypatch):
    monkeypatch.setattr("experiments.allgather.plugins.names", lambda group: ["gloo"])
    lacking = type("Lacking", (), {"missing": classmethod(lambda cls: "needs PyTorch; pip install 'pdsim[torch]'")})
    monkeypatch.setattr("experiments.allgather.plugins.resolve", lambda group, name: lacking)
    config = replace(configured(), collective=replace(LIBRARY, name="gloo", implementation="gloo"))
    assert list(check(config)) == []
    said = "collective=gloo needs PyTorch; pip install 'pdsim[torch]'"
    assert list(check(replace(config, target="real"))) == [said]
