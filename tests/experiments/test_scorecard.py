"""``pdsim validate --against inferencex`` predicts measured servers and says how far off it is."""

import csv

import pytest

from experiments.scorecard import COLUMNS, Server, was_cold
from experiments.serve import ServeOptions, job
from pdsim.config.compose import compose
from pdsim.serving.colocated import instances

TAILS = ["p90_tpot", "p90_ttft", "p99_tpot", "p99_ttft"]


def row(output: float, method: str = "none", framework: str = "sglang") -> list[object]:
    return ["h200", framework, "fp8", method, "False", 256, 64, 2, output, 0.01, 0.1, *(8, 1, "False", 0) * 2]


@pytest.fixture
def against(pdsim_prints, tmp_path):
    """Return a function that predicts rows, with tails if the first has them, and returns the report."""

    def predict(rows: list[list[object]], *more: str) -> str:
        heads = [*COLUMNS, *TAILS]
        path = tmp_path / "rows.csv"
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([heads[: len(rows[0])], *rows])
        return pdsim_prints("validate", "--against", "inferencex", path, f"output={tmp_path}", *more)

    return predict


def errors(said: str) -> list[list[str]]:
    return [line.split() for line in said.splitlines() if "in-sample" in line]


def test_rows_are_the_median_over_dates(against):
    rows = [row(10.0), row(20.0), row(40.0), row(20.0, method="mtp"), row(20.0, framework="trt")]
    said = against(rows, "-v")
    assert "left out: 1 of rows with speculative decoding" in said
    assert "left out: 1 of trt" in said
    assert "in-sample" in said
    assert " 20 " in said.partition("Servers")[2]


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (b"\xff\xfe", "'utf-8' codec can't decode"),
        (b"hardware,isl\nh200,256\n", "has no column framework or precision or spec_method or disagg or osl"),
        (b"", "has no rows; name a CSV file of InferenceX"),
    ],
)
def test_a_file_of_something_else_is_refused(pdsim_says, tmp_path, written, said):
    (tmp_path / "rows.csv").write_bytes(written)
    status, _, error = pdsim_says("validate", "--against", "inferencex", tmp_path / "rows.csv", f"output={tmp_path}")
    assert status == 2
    assert said in error
    assert "incomplete" not in error


def test_tails_count_where_rows_have_them_and_objectives_apart(against):
    (line,) = errors(against([[*row(10.0), 1.0, 1.0, 1.0, ""]]))
    assert min(float(line[column]) for column in (7, 8, 9)) > 50  # TPOT and TTFT of a second
    assert line[10:12] == ["-", "-"]  # neither the p99 of TTFT nor what needs all
    # within 5 s and 50 ms, not within 1 s and 20 ms
    (line,) = errors(against([[*row(10.0), 0.03, 2.0, 0.03, 2.0]]))
    assert [float(cell) for cell in line[11:13]] == [100.0, 0.0]  # pdsim says that both are met


def test_regret_counts_steady_servers_apart(against):
    tails = (0.02, 1.0, 0.02)
    pair = [
        [*row(each)[:-8], *(8, ep, "False", 0) * 2, *tails, late] for ep, each, late in ((1, 1, 60.0), (8, 9, 0.1))
    ]
    every, steady = errors(against(pair))
    assert float(every[-1]) == 800.0  # pdsim's best is the one that stood still
    assert (steady[1], steady[-1]) == ("steady", "-")


def test_servers_start_as_their_scripts_say_by_tp():
    def words(tp: int, disagg: str, framework: str = "sglang") -> list[str]:
        values = ["b200", framework, "fp8", "none", disagg, 8192, 1024, 4, 1.0, 0.01, 0.1, *(tp, 1, "False", 1) * 2]
        return Server.of(dict(zip(COLUMNS, map(str, values), strict=True))).words()

    assert "scheduler.chunk=8192" in words(4, "False")
    assert "scheduler.decode_batch=128" in words(8, "False")
    assert not [word for word in words(8, "True") if word.startswith("scheduler.decode_batch")]
    assert compose(words(8, "True")).experiment.router == "least_tokens"
    assert compose(words(8, "True", "dynamo-sglang")).experiment.router == "random"
    config = compose(words(4, "False"))
    assert instances(job(config, ServeOptions.of(config))) == ("colocated0",)


def test_a_server_is_cold_if_most_were_not_warmed():
    before, after = {"date": "2026-01-20"}, {"date": "2026-01-21"}
    assert was_cold([before, before, after])
    assert not was_cold([before, after])
    assert not was_cold([{}])


def test_errors_stand_also_without_servers_that_stood_still(against):
    rows = [[*row(10.0), 1.0, 1.0, 1.0, p99] for p99 in (1.0, 100.0)]
    rows[1][COLUMNS[:8].index("conc")] = 3
    lines = errors(against(rows))
    counts = [(line[0], line[line.index("in-sample") + 1]) for line in lines]
    assert counts == [("colocated", "2"), ("colocated,", "1")]


def test_weights_of_four_bits_decode_faster(against):
    eight, four = ["b200", *row(10.0)[1:]], ["b200", *row(10.0)[1:]]
    four[2] = "fp4"
    lines = [line.split() for line in against([eight, four], "-v").partition("Servers")[2].splitlines()]
    of = {line[1]: float(line[10]) for line in lines if line[:1] == ["b200"]}
    assert of["fp4"] < of["fp8"]


def test_against_needs_rows_of_inferencex(pdsim_refuses):
    said = pdsim_refuses("validate", "--against", "mlperf", "rows.csv")
    assert "--against mlperf rows.csv: write --against inferencex FILE" in said
