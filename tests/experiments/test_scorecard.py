"""``pdsim validate --against inferencex`` predicts measured servers and says how far off it is."""

import csv
from pathlib import Path

import pytest

from experiments.scorecard import Server
from pdsim.cli.main import main

HEAD = ["hardware", "framework", "precision", "spec_method", "disagg", "isl", "osl", "conc"]
METRICS = ["output_tput_per_gpu", "median_tpot", "median_ttft"]
TAILS = ["p90_tpot", "p90_ttft", "p99_tpot", "p99_ttft"]
SIDES = [f"{side}_{name}" for side in ("prefill", "decode") for name in ("tp", "ep", "dp_attention", "num_workers")]


def row(output: float, method: str = "none", framework: str = "sglang") -> list[object]:
    return ["h200", framework, "fp8", method, "False", 256, 64, 2, output, 0.01, 0.1, *(8, 1, "False", 0) * 2]


def against(folder: Path, rows: list[list[object]], *more: str) -> int:
    """Predict *rows*, of which the first says whether they have tails, and return the exit status."""
    heads = HEAD + METRICS + SIDES + TAILS
    with (folder / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([heads[: len(rows[0])], *rows])
    return main(["validate", "--against", "inferencex", str(folder / "rows.csv"), f"output={folder}", *more])


def errors(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    return [line.split() for line in capsys.readouterr().out.splitlines() if "in-sample" in line]


def test_rows_are_the_median_over_dates(tmp_path, capsys):
    rows = [row(10.0), row(20.0), row(40.0), row(20.0, method="mtp"), row(20.0, framework="trt")]
    assert against(tmp_path, rows, "-v") == 0
    said = capsys.readouterr().out
    assert "left out: 1 of rows with speculative decoding" in said
    assert "left out: 1 of trt" in said
    assert "in-sample" in said
    assert " 20 " in said.partition("Servers")[2]


def test_tails_count_where_rows_have_them_and_objectives_apart(tmp_path, capsys):
    assert against(tmp_path, [[*row(10.0), 1.0, 1.0, 1.0, ""]]) == 0
    (line,) = errors(capsys)
    assert min(float(line[column]) for column in (7, 8, 9)) > 50  # TPOT and TTFT of a second
    assert line[10:12] == ["-", "-"]  # neither the p99 of TTFT nor what needs all
    # within 5 s and 50 ms, not within 1 s and 20 ms
    assert against(tmp_path, [[*row(10.0), 0.03, 2.0, 0.03, 2.0]]) == 0
    (line,) = errors(capsys)
    assert [float(cell) for cell in line[11:13]] == [100.0, 0.0]  # pdsim says that both are met


def test_regret_counts_steady_servers_apart(tmp_path, capsys):
    tails = (0.02, 1.0, 0.02)
    pair = [
        [*row(each)[:-8], *(8, ep, "False", 0) * 2, *tails, late] for ep, each, late in ((1, 1, 60.0), (8, 9, 0.1))
    ]
    assert against(tmp_path, pair) == 0
    every, steady = errors(capsys)
    assert float(every[-1]) == 800.0  # pdsim's best is the one that stood still
    assert (steady[1], steady[-1]) == ("steady", "-")


def test_servers_start_as_their_scripts_say_by_tp():
    def words(tp: int, disagg: str) -> list[str]:
        values = ["b200", "sglang", "fp8", "none", disagg, 8192, 1024, 4, 1.0, 0.01, 0.1, *(tp, 1, "False", 1) * 2]
        return Server.of(dict(zip(HEAD + METRICS + SIDES, map(str, values), strict=True))).words()

    assert "scheduler.chunk=8192" in words(4, "False")
    assert "scheduler.decode_batch=128" in words(8, "False")
    assert not [word for word in words(8, "True") if word.startswith("scheduler.decode_batch")]


def test_errors_stand_also_without_servers_that_stood_still(tmp_path, capsys):
    rows = [[*row(10.0), 1.0, 1.0, 1.0, p99] for p99 in (1.0, 100.0)]
    rows[1][HEAD.index("conc")] = 3
    assert against(tmp_path, rows) == 0
    lines = errors(capsys)
    counts = [(line[0], line[line.index("in-sample") + 1]) for line in lines]
    assert counts == [("colocated", "2"), ("colocated,", "1")]


def test_weights_of_four_bits_decode_faster(tmp_path, capsys):
    eight, four = ["b200", *row(10.0)[1:]], ["b200", *row(10.0)[1:]]
    four[2] = "fp4"
    assert against(tmp_path, [eight, four], "-v") == 0
    lines = [line.split() for line in capsys.readouterr().out.partition("Servers")[2].splitlines()]
    of = {line[1]: float(line[10]) for line in lines if line[:1] == ["b200"]}
    assert of["fp4"] < of["fp8"]


def test_against_needs_rows_of_inferencex(capsys):
    assert main(["validate", "--against", "mlperf", "rows.csv"]) == 2
    assert "--against mlperf rows.csv: write --against inferencex FILE" in capsys.readouterr().err
