"""`pdsim calibrate`: measures, fits, writes files that are a choice at once, and refuses what it cannot do."""

import csv
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import conf
from pdsim.calibration.definition import Calibration
from pdsim.calibration.samples import Cell, grid, reads, repeats, write_points
from pdsim.cli.calibrate import calibrate
from pdsim.cli.main import main
from pdsim.config import build
from pdsim.core.errors import ConfigError
from pdsim.core.repository import data
from pdsim.results import environment

OUTPUTS = Path(__file__).parent / "outputs"
CALIBRATIONS = Path(conf.__file__).parent / "calibration"


def test_of_the_model_it_finds_what_the_model_was_told(tmp_path, capsys):
    words = ["hw=2xh200", "backend=mooncake_nvlink", "backend.intra.overlap=false", "backend.intra.pipelined=false"]
    words += ["backend.intra.call=11us", "backend.intra.descriptor=2us", "backend.intra.rate=200GB/s", "--held", "4"]
    words += ["backend.intra.read=3us", "backend.intra.small.saving=4us", "--jobs", "2"]
    assert calibrate([*words, "--largest", "4MiB", "--to", str(tmp_path), f"output={tmp_path}/runs"]) == 0
    file = OmegaConf.to_container(OmegaConf.load(tmp_path / "mooncake_nvlink-2xh200.yaml"))
    found = build(Calibration, file, "calibration")
    assert found.parameters["backend.intra.descriptor"] == "2us"
    assert found.parameters["backend.intra.call"] == "11us"
    assert found.parameters["backend.intra.rate"] == "200GB/s"
    assert found.parameters["backend.intra.small.saving"] == "4us"
    assert (found.parameters["backend.intra.read"], found.parameters["backend.intra.read_descriptor"]) == (
        "3us",
        "0s",
    )
    assert "backend.intra.read_rate" not in found.parameters  # no limit
    assert (found.held_out.points, found.held_out_reads.points) == (4, 2)
    assert found.held_out.jobs == 2
    assert found.held_out.floor_p95 < 1e-9
    assert found.held_out_reads.p95 < 1e-6
    assert found.kind == "assumed"  # nothing was measured
    assert found.held_out.p95 < 1e-6
    rows = list(csv.DictReader(line for line in (tmp_path / "mooncake_nvlink-2xh200.csv").open() if line[0] != "#"))
    assert [sum((row["held"], row["operation"]) == ("1", kind) for row in rows) for kind in ("write", "read")] == [
        4,
        2,
    ]
    out, err = capsys.readouterr()
    assert err.startswith("calibrate mooncake_nvlink on 2xh200 (the model) begins, ")
    assert "Held-out error" in out
    assert "jobs differ by 0.0% in the median" in out


def test_what_another_tool_printed_is_published_and_its_unknowns_are_not_printed_as_numbers(tmp_path, capsys):
    words = ["--from", str(OUTPUTS / "nixlbench_batch64.txt"), "hw=2xh200", "backend=nixl", "--to", str(tmp_path)]
    assert main(["calibrate", *words, "--name", "nixlbench"]) == 0
    file = OmegaConf.load(tmp_path / "nixlbench.yaml")
    assert (file.kind, file.source) == ("published", "foreign tool nixlbench, nixlbench_batch64.txt")
    assert max(map(len, (tmp_path / "nixlbench.yaml").read_text().splitlines())) <= 120
    assert str(tmp_path) not in (tmp_path / "nixlbench.yaml").read_text()
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


def test_what_is_measured_says_where():
    found = environment.here()
    assert {"date", "measured", "host", "versions"} <= set(found)
    assert "simpy" in found["versions"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--from"], "--from needs a value after it"),
        (["--largest", "much", "hw=2xh200"], "--largest much: 'much' is not a size"),
        (["--form", "sum"], "unknown option --form; did you mean --format? see pdsim calibrate --help"),
        (["--jobs", "0"], "--jobs 0: must be >= 1"),
        (["--held", "few"], "--held few: must be a whole number >= 0"),
        (["--held", "1", "--largest", "4KiB"], "--held 1: of 4096 bytes or fewer the grid leaves 0 points; lower"),
        (["--largest", "1KiB"], "--largest 1024: must be >= 4096"),
        (["--name", "../mine"], "--name ../mine: must be letters, digits, dots, hyphens and underscores"),
        (["--path", "within"], "--path within: must be intra or inter"),
        (["--to", "/proc/none"], "--to /proc/none: No such file or directory; name a folder that can be written to"),
        (["output=/proc/none", "--held", "1"], "output=/proc/none: No such file or directory; name a folder"),
        (["--from", str(OUTPUTS / "mori.txt"), "--format", "mine"], "--format mine is none of these; say --format"),
        (["--from", __file__], "does not show which of these it is; say --format samples, table, nixlbench,"),
        (["--from", "nowhere.txt", "hw=2xh200"], "--from nowhere.txt: "),
        (
            ["--from", str(OUTPUTS / "mori.txt"), "hw=2xh200", "--path", "inter"],
            "backend=mooncake_nvlink has no inter",
        ),
        (
            ["--from", str(OUTPUTS / "mori.txt"), "hw=2x8xmi300x", "experiment.operation=read"],
            "has no read of a pair",
        ),
    ],
)
def test_what_cannot_be_calibrated_is_refused_before_anything_is_measured_or_written(
    words, complaint, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refusal:
        calibrate(words)
    assert complaint in str(refusal.value)
    assert list(tmp_path.iterdir()) == []


def test_the_grid_crosses_counts_and_sizes_and_holds_random_points_out():
    cells, left = grid("write", 256 << 20, 16, seed=0)
    assert {cell.size for cell in cells if cell.blocks == 1} >= {4 << 10, 64 << 10, 1 << 20, 256 << 20}
    assert {cell.blocks for cell in cells if cell.size == 4 << 10} >= {1, 8, 64, 512, 4096}
    assert {cell.concurrency for cell in cells} == {1, 2, 4}
    assert len(left) == 16
    assert not set(cells) & set(left)
    assert max(cell.blocks * cell.size * cell.concurrency for cell in (*cells, *left)) <= 256 << 20


def test_reads_are_a_few_dozen_each_beside_a_write_of_its_configuration():
    cells, left = grid("write", 256 << 20, 16, seed=0)
    beside, unseen = reads(256 << 20, left)
    assert 20 <= len(beside) <= 40
    assert {cell._replace(operation="write") for cell in beside} <= set(cells)
    assert {cell._replace(operation="write") for cell in unseen} <= set(left)
    assert {cell.operation for cell in (*beside, *unseen)} == {"read"}


def test_quick_points_are_repeated_more_often_than_long_ones():
    cells = [Cell("pair", blocks, 4096, 1, "write") for blocks in (1, 256, 4096)]
    assert [repeats(cell, 7) for cell in cells] == [50, 24, 7]
    assert repeats(cells[0]._replace(size=256 << 20), 7) == 7


def test_a_crowd_is_repeated_until_most_of_it_is_in_full_swing(tmp_path):
    write_points(tmp_path / "points.csv", grid("read", 1 << 20, 2, seed=0)[0], 50)
    rows = list(csv.DictReader((tmp_path / "points.csv").open()))
    assert {(row["concurrency"], row["repeat"]) for row in rows} == {("1", "50"), ("2", "200"), ("4", "400")}
    assert {row["operation"] for row in rows} == {"read"}
