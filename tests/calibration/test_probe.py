"""`pdsim probe` keeps what it measured, without names; `calibrate --from` makes files of it that run."""

import gzip
import os
import re
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from pdsim.calibration import bundle
from pdsim.cli import probe as command
from pdsim.cli.main import main
from pdsim.core.files import data
from tests.support.engines import MARKED

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
CX7 = "transfers/mori-2x8xmi300x_cx7.csv"


def written(path: Path, texts: dict[str, str], **about: object) -> Path:
    bundle.write(path, {"hw": "2x8xmi300x_cx7", **about}, texts)
    return path


def fitted(file: Path) -> dict[str, object]:
    kept = OmegaConf.to_container(OmegaConf.load(file))
    assert isinstance(kept, dict)
    return {key: kept.get(key) for key in ("parameters", "intervals", "held_out", "unidentified", "bytes", "form")}


@pytest.fixture
def alice(monkeypatch):
    for key in ("USER", "LOGNAME"):
        monkeypatch.setenv(key, "alice")
    monkeypatch.setattr("socket.gethostname", lambda: "gpu-node7.cluster.example")


def test_names_addresses_and_paths_are_taken_out(alice):
    said = "alice on gpu-node7: gpu-node7.cluster.example has 10.0.0.7:80, 08:c0:eb:d2:ba:30, fe80::1%eth0, \
/home/alice/x.csv, ~/y, http://me/z, PYTHONPATH=/a:/b; 1.5.1, 400 Gb/s, mlx5_0, /dev/shm, 0000:3b:00.0"
    assert bundle.bare(said) == (
        "NAME on NAME: NAME has ADDRESS:80, ADDRESS, ADDRESS, PATH, PATH, ADDRESS, PYTHONPATH=PATH:PATH; 1.5.1, "
        "400 Gb/s, mlx5_0, /dev/shm, 0000:3b:00.0"
    )
    text = "# host: EPYC of alice\n# results: transfer-1\n# command: pdsim --to /home/alice\nblocks,size\n1,4096\n"
    assert bundle.bare_samples(text) == "# host: EPYC of NAME\n# command: pdsim --to PATH\nblocks,size\n1,4096\n"


@pytest.mark.slow
def test_bundle_is_fitted_as_its_samples_are(tmp_path, pdsim_prints):
    samples = data("calibration", "cx7-write.csv")
    written(tmp_path / "mine.zip", {CX7: samples.read_text(), "doctor.txt": "all well"})
    out = pdsim_prints("calibrate", "--from", "mine.zip")
    words = ["hw=2x8xmi300x_cx7", "backend=mori"]
    assert f"to use it: pdsim run --config-dir mine {' '.join(words)}" in out
    assert main(["calibrate", "--from", str(samples), *words, "--name", "own"]) == 0
    made = fitted(tmp_path / "mine" / "calibration" / "mori-2x8xmi300x_cx7.yaml")
    assert made == fitted(tmp_path / "own.yaml")
    job = pdsim_prints("run", "--config-dir", "mine", *words, "experiment=transfer", "--cfg", "job")
    assert OmegaConf.create(job).calibration.name == "mori-2x8xmi300x_cx7"


@pytest.mark.slow
def test_profile_and_machine_of_a_bundle_run_together(tmp_path, pdsim_prints):
    machine = "# a box\ndefaults: [8xh200, _self_]\nname: ourbox\n"
    forwards = gzip.decompress(data("compute", "h200_torch.csv.gz").read_bytes()).decode()
    texts = {"compute/forwards.csv": forwards, "hw.yaml": machine}
    written(tmp_path / "box.zip", texts, hw="ourbox")
    words = "to use it: pdsim run --config-dir own hw=ourbox compute=forwards"
    assert words in pdsim_prints("calibrate", "--from", "box.zip", "--to", "own")
    assert main([*words.partition("pdsim ")[2].split(), "workload=smoke", "--quiet"]) == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [name for name in MARKED if "nixl_tcp" in str(name)])
def test_real_transfers_go_into_a_bundle_without_names(name, tmp_path, pdsim_prints, alice):
    assert "bundle: probe-loopback.zip" in pdsim_prints("probe", f"backend={name}")
    about, texts = bundle.read(tmp_path / "probe-loopback.zip")
    measured = [part for part in about["parts"] if part["status"] == "measured"]
    assert [part["part"] for part in measured][:1] == [f"transfers {name}"]
    assert len(texts[f"transfers/{name}-loopback.csv"].splitlines()) > 60
    with zipfile.ZipFile("probe-loopback.zip") as archive:
        every = b"\n".join([archive.read(entry) for entry in archive.infolist()]).decode()
    paths = (Path.home(), tmp_path, Path(sys.executable).parent)
    lost = ["alice", "gpu-node7", os.uname().nodename, *map(str, paths)]
    assert not [word for word in lost if re.search(rf"(?<!\w){re.escape(word)}(?!\w)", every)]
    assert not re.search(r"(?<![\w.])\d+\.\d+\.\d+\.\d+(?![\w.])", every)
    assert main(["calibrate", "--from", "probe-loopback.zip"]) == 0
    made = tmp_path / "probe-loopback" / "calibration" / f"{name}-loopback.yaml"
    again = ["calibrate", "--from", str(made.with_suffix(".csv")), "hw=loopback", f"backend={name}", "--to", "own"]
    assert main(again) == 0
    assert fitted(made) == fitted(tmp_path / "own" / made.name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MARKED if "nixl_tcp" in str(name)])
def test_part_that_fails_is_named_and_others_go_on(name, tmp_path, capsys):
    assert main(["probe", f"backend={name}", "+backend.options.UCX_TLS=nothing"]) == 1
    assert re.search(rf"^transfers {name}: failed, nothing in .*; pdsim: ", capsys.readouterr().out, re.MULTILINE)
    parts = {part["part"]: part for part in bundle.read(tmp_path / "probe-loopback.zip")[0]["parts"]}
    assert parts[f"transfers {name}"]["status"] == "failed"
    assert "forwards" in parts


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MARKED if "nixl_tcp" in str(name)])
def test_interrupted_probe_keeps_a_bundle(name, tmp_path):
    words = [sys.executable, "-m", "pdsim", "probe", f"backend={name}"]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        next(line for line in process.stderr if line.startswith("probe transfers"))  # it measures
        process.send_signal(signal.SIGINT)
        assert "holds the measurements of 1 of " in process.communicate(timeout=60)[1]
    assert process.returncode == 130
    about = bundle.read(tmp_path / "probe-loopback.zip")[0]
    assert [part["status"] for part in about["parts"] if part["part"] == f"transfers {name}"] == ["interrupted"]


@pytest.mark.slow
def test_part_beyond_its_time_is_stopped(tmp_path, monkeypatch):
    words = ["calibrate", "hw=2xh200", "backend=nvlink", "--no-fit"]
    part = command._Part("transfers nvlink", words, 1.0, command._samples)
    assert command._ran(part, tmp_path, 1.0, {}) == ("partly", "stopped after 1 s; raise --minutes")


def test_gathers_of_a_run_become_rows(tmp_path):
    words = ["run", "experiment=allgather", "hw=2xh200", "collective=nccl", "experiment.ranks=[2]"]
    more = ["experiment.size=[4096]", "experiment.batches=[]", "experiment.growth=false", f"output={tmp_path}/runs"]
    assert main([*words, *more, "--quiet"]) == 0
    (text,) = command._gathers(tmp_path).values()
    head, *rows = text.splitlines()
    assert head == "rank,label,bytes,submitted_us,seen_us"
    assert {row.split(",")[0] for row in rows} == {"rank0", "rank1"}
    assert any(row.split(",")[1] == "2 x 4096 default" for row in rows)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["probe", "--minutes", "0"], "--minutes 0: must be >= 1"),
        pytest.param(
            ["probe", "hw=8xh100", "backend=nvlink"],
            "nothing can be measured here; the lines above say why",
            marks=pytest.mark.slow,
        ),
        (["calibrate", "--from", "good.zip", "hw=2xh200"], "hw=2xh200: a bundle says what it is of; leave it out"),
        (["calibrate", "--from", "empty.zip"], "--from empty.zip: no samples in it; its about.json says why"),
        (["calibrate", "--from", "other.zip"], "--from other.zip: 'a.txt' is not of a bundle; name a file"),
        (["calibrate", "--from", "none.zip"], "--from none.zip: not a bundle ('about.json'); name a file that"),
        (["calibrate", "--from", "sly.zip"], "--from sly.zip: hw '../x' must be a plain name, and hw.yaml without"),
        (["calibrate", "--from", "good.zip", "--no-fit"], "--no-fit measures only, and --from fits only; leave one"),
    ],
)
def test_what_is_no_bundle_is_refused(words, message, tmp_path, pdsim_refuses):
    written(tmp_path / "good.zip", {CX7: "blocks,size\n1,1\n"})
    written(tmp_path / "empty.zip", {"doctor.txt": ""})
    written(tmp_path / "sly.zip", {}, hw="../x")
    for name, entry in (("other.zip", "a.txt"), ("none.zip", "doctor.txt")):
        with zipfile.ZipFile(name, "w") as archive:
            archive.writestr(entry, "")
    assert message in pdsim_refuses(*words)
