"""`pdsim diagnose` on real engines: healthy, forced to TCP, and over a link of known rate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from backends.emulation.link.emulated_link import missing_requirements
from pdsim.cli.main import main
from tests.support.engines import MARKED

needs_link = pytest.mark.skipif(bool(missing_requirements()), reason=f"needs a link: {missing_requirements()}")
POINTS = ["experiment=transfer", "experiment.patterns=[pair]", "experiment.order=shuffled", "--quiet"]


def ran(folder: Path, *words: str) -> Path:
    assert main(["run", "target=real", *words, *POINTS, f"output={folder}"]) == 0
    return next(folder.iterdir())


def causes(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, tuple[float, float]]:
    """The factor of each cause and what it leaves unexplained, the best first."""
    capsys.readouterr()
    assert main(["diagnose", *words, "--json"]) == 0
    return {
        one["cause"]: (one["factor"], one["unexplained"]) for one in json.loads(capsys.readouterr().out)["causes"]
    }


@needs_link
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MARKED if "shm" not in str(name)])
def test_known_link_slower_than_said_is_a_slow_wire(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    sizes = ["experiment.blocks=[1,4]", "experiment.size=[262144,4194304]", "experiment.repeat=5"]
    run = str(ran(tmp_path, "hw=link", f"backend={name}", "hw.link.rate=500Mbps", "hw.link.delay=0.1ms", *sizes))
    said = causes(capsys, run, "hw.link.rate=4Gbps")
    assert next(iter(said)) == "slow wire"
    assert said["slow wire"][0] == pytest.approx(8.0, rel=0.4)
    assert causes(capsys, run)["as expected"][1] < said["as expected"][1] / 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_forced_tcp_is_named_and_shared_memory_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Both are held against calibrations of this machine of minutes ago; it may be busy: one of three will do."""
    own, few = tmp_path / "own", ["--quick", "--jobs", "1", "--largest", "1MiB", "--held", "2"]
    words = ["calibrate", "target=real", "hw=loopback", f"output={tmp_path}/runs", *few]
    for name in ("nixl_shm", "nixl_tcp"):
        assert main([*words, f"backend={name}", "--to", str(own / "calibration")]) == 0

    def first(name: str, time: int, *options: str) -> str:
        folder = tmp_path / f"{name}{time}"
        assert main([*words, f"backend={name}", *options, "--no-fit", "--to", str(folder)]) == 0
        file = str(folder / f"{name}-loopback.csv")
        return next(iter(causes(capsys, file, "hw=loopback", "backend=nixl_shm", "--config-dir", str(own))))

    assert any(first("nixl_tcp", time, "+backend.options.UCX_TLS=tcp") == "over TCP" for time in range(3))
    assert any(first("nixl_shm", time) != "over TCP" for time in range(3))
