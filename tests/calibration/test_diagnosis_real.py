"""`pdsim diagnose` on real engines: healthy, forced to TCP, and over a link of known rate."""

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
def test_known_link_slower_than_said_is_a_slow_wire(name, tmp_path, capsys):
    sizes = ["experiment.blocks=[1,4]", "experiment.size=[262144,4194304]", "experiment.repeat=5"]
    run = str(ran(tmp_path, "hw=link", f"backend={name}", "hw.link.rate=500Mbps", "hw.link.delay=0.1ms", *sizes))
    said = causes(capsys, run, "hw.link.rate=4Gbps")
    assert next(iter(said)) == "slow wire"
    assert said["slow wire"][0] == pytest.approx(8.0, rel=0.4)
    assert causes(capsys, run)["as expected"][1] < said["as expected"][1] / 2


@pytest.mark.slow
def test_forced_tcp_is_told_from_shared_memory(tmp_path, capsys):
    """A slow host, or one that polls late, slows copies through memory alike: one run is held against the other."""
    sizes = ["experiment.blocks=[1,4,32,256]", "experiment.size=[4096,65536]", "experiment.repeat=40"]
    unexplained = {}
    for name, options in (("nixl_shm", []), ("nixl_tcp", ["+backend.options.UCX_TLS=tcp"])):
        run = ran(tmp_path / name, "hw=loopback", f"backend={name}", *options, *sizes)
        assert main(["export", str(run), "--format", "nixlbench"]) == 0
        said = causes(capsys, str(run / "nixlbench-write-1.txt"), "hw=loopback", "backend=nixl_shm")
        unexplained[name] = said["over TCP"][1] / said["as expected"][1]
    assert unexplained["nixl_tcp"] < 0.7 * unexplained["nixl_shm"]
