"""`pdsim calibrate`: measures, fits, writes files that are a choice at once, and refuses what it cannot do."""

import csv
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import pdsim.run
from pdsim.calibration import transfers
from pdsim.calibration.definition import Calibration
from pdsim.calibration.samples import Cell, grid, reads, repeats, write_points
from pdsim.cli.calibrate import calibrate
from pdsim.cli.main import main
from pdsim.config import build
from pdsim.core.errors import ConfigError
from pdsim.core.files import data

OUTPUTS = Path(__file__).parent / "outputs"
MORI = ["--from", str(OUTPUTS / "mori.txt")]


@pytest.fixture(autouse=True)
def _few_bootstraps(monkeypatch):
    """No test here looks at an interval."""
    monkeypatch.setattr(transfers, "RESAMPLES", 40)


def test_a_calibration_of_the_model_recovers_its_parameters(tmp_path, capsys):
    words = ["hw=2xh200", "backend=mooncake_nvlink", "backend.intra.overlap=false", "backend.intra.pipelined=false"]
    words += ["backend.intra.call=11us", "backend.intra.descriptor=2us", "backend.intra.rate=200GB/s", "--held", "4"]
    words += ["backend.intra.read=3us", "backend.intra.small.saving=4us", "--jobs", "2"]
    assert calibrate([*words, "--largest", "4MiB", "--to", str(tmp_path), f"output={tmp_path}/runs"]) == 0
    file = OmegaConf.to_container(OmegaConf.load(tmp_path / "mooncake_nvlink-2xh200.yaml"))
    made = build(Calibration, file, "calibration")
    given = {"descriptor": "2us", "call": "11us", "rate": "200GB/s", "read": "3us", "read_descriptor": "0s"}
    for name, value in (given | {"small.saving": "4us", "read_rate": None}).items():  # no limit of reads
        assert made.parameters.get(f"backend.intra.{name}") == value
    assert made.kind == "assumed"  # nothing was measured
    assert (made.held_out.points, made.held_out_reads.points, made.held_out.jobs) == (4, 2, 2)
    assert max(made.held_out.p95, made.held_out_reads.p95) < 1e-6
    assert made.held_out.floor_p95 < 1e-9
    rows = csv.DictReader(line for line in (tmp_path / "mooncake_nvlink-2xh200.csv").open() if line[0] != "#")
    held = [row["operation"] for row in rows if row["held"] == "1"]
    assert (held.count("write"), held.count("read")) == (4, 2)
    out, err = capsys.readouterr()
    assert err.startswith("calibrate ")
    assert not (tmp_path / "mooncake_nvlink-2xh200.partial.csv").exists()  # all of it is in the other file
    assert f"mooncake_nvlink-2xh200.csv, of 2 runs in {tmp_path}/runs" in out
    assert "jobs differ by 0.0% in the median" in out


def test_an_interrupted_calibration_keeps_the_samples_of_its_jobs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kept, done = pdsim.run.run, []

    def interrupted(*given, **options):
        if done:
            raise KeyboardInterrupt
        done.append(1)
        return kept(*given, **options)

    monkeypatch.setattr(pdsim.run, "run", interrupted)
    words = ["hw=2xh200", "backend=mooncake_nvlink", "--quick", "--largest", "64KiB", "--held", "2"]
    with pytest.raises(KeyboardInterrupt, match="samples of 1 of 3 jobs are kept; to fit them: pdsim ") as stop:
        calibrate(words)
    assert main(stop.value.args[0].partition("pdsim ")[2].split()) == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        "results", *(f"mooncake_nvlink-2xh200.{end}" for end in ("partial.csv", "csv", "yaml"))
    }  # fmt: skip


def test_outputs_of_other_tools_are_published_without_unknowns(tmp_path, capsys):
    words = ["--from", str(OUTPUTS / "nixlbench_batch64.txt"), "hw=2xh200", "backend=nixl", "--to", str(tmp_path)]
    assert main(["calibrate", *words, "--name", "nixlbench"]) == 0
    text = (tmp_path / "nixlbench.yaml").read_text()
    file = OmegaConf.create(text)
    assert (file.kind, file.source) == ("published", "foreign tool nixlbench, nixlbench_batch64.txt")
    assert max(map(len, text.splitlines())) <= 120
    assert str(tmp_path) not in text
    assert file.unidentified
    for line in capsys.readouterr().out.splitlines():
        if line.split(" ")[0] in file.unidentified:
            assert "not identified by these samples" in line


def test_a_fit_elsewhere_says_where_its_samples_were_measured(tmp_path):
    text = data("calibration", "cx7-write.csv").read_text().replace("kind: published", "kind: measured")
    (tmp_path / "kept.csv").write_text("# host: elsewhere\n# measured: 1a2b3c\n# date: 2020-02-02\n" + text)
    words = ["--from", str(tmp_path / "kept.csv"), "hw=2x8xmi300x", "backend=mori", "--to", str(tmp_path)]
    assert main(["calibrate", *words, "--name", "again"]) == 0
    file = OmegaConf.load(tmp_path / "again.yaml")
    assert (file.date, file.provenance.host, file.provenance.measured) == ("2020-02-02", "elsewhere", "1a2b3c")
    assert {"fit", "commit"} <= set(file.provenance)
    assert "versions" not in file.provenance


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--from"], "--from needs a value after it"),
        (["--largest", "much", "hw=2xh200"], "--largest much: 'much' is not a size"),
        (["--form", "sum"], "unknown option --form; did you mean --format? see pdsim calibrate --help"),
        (["--jobs", "0"], "--jobs 0: must be >= 1"),
        ([*MORI, "--quick"], "--quick measures less, and --from measures nothing; leave one of them out"),
        (["--held", "few"], "--held few: must be a whole number >= 0"),
        (["--held", "1", "--largest", "4KiB"], "--held 1: of 4096 bytes or fewer the grid leaves 0 points; lower"),
        (["--largest", "1KiB"], "--largest 1024: must be >= 4096"),
        (["--name", "../mine"], "--name ../mine: must be letters, digits, dots, hyphens and underscores"),
        (["--path", "within"], "--path within: must be intra or inter"),
        (["--to", "/proc/none"], "--to /proc/none: No such file or directory; name a folder that can be written to"),
        (["output=/proc/none", "--held", "1"], "output=/proc/none: No such file or directory; name a folder"),
        ([*MORI, "--format", "mine"], "--format mine is not known; name one"),
        (
            ["--from", __file__],
            "is in no format that is recognised; name one with --format: samples, table,",
        ),
        (["--from", "nowhere.txt", "hw=2xh200"], "nowhere.txt: "),
        ([*MORI, "hw=2xh200", "--path", "inter"], "backend=mooncake_nvlink has no inter"),
        ([*MORI, "hw=2x8xmi300x", "experiment.operation=read"], "has no read of a pair"),
    ],
)
def test_what_cannot_be_calibrated_is_refused_at_once(words, complaint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refusal:
        calibrate(words)
    assert complaint in str(refusal.value)
    assert list(tmp_path.iterdir()) == []


def test_the_grid_crosses_sizes_and_repeats_quick_points_more(tmp_path):
    cells, left = grid("write", 256 << 20, 16, seed=0)
    assert {cell.size for cell in cells if cell.blocks == 1} >= {4 << 10, 64 << 10, 1 << 20, 256 << 20}
    assert {cell.blocks for cell in cells if cell.size == 4 << 10} >= {1, 8, 64, 512, 4096}
    assert ({cell.concurrency for cell in cells}, len(left), set(cells) & set(left)) == ({1, 2, 4}, 16, set())
    assert max(cell.blocks * cell.size * cell.concurrency for cell in (*cells, *left)) <= 256 << 20
    for own, writes in zip(reads(256 << 20, left), (cells, left), strict=True):  # each beside a write of its shape
        assert {cell._replace(operation="write") for cell in own} <= set(writes)
    cells = [Cell("pair", blocks, 4096, 1, "write") for blocks in (1, 256, 4096)]
    assert [repeats(cell, 7) for cell in cells] == [50, 24, 7]
    write_points(tmp_path / "points.csv", grid("read", 1 << 20, 2, seed=0)[0], 50)
    rows = list(csv.DictReader((tmp_path / "points.csv").open()))
    assert {(row["concurrency"], row["repeat"]) for row in rows} == {("1", "50"), ("2", "200"), ("4", "400")}
    assert {row["operation"] for row in rows} == {"read"}
