"""`pdsim export`: a run in the formats of other tools, read again where pdsim reads them."""

import csv
import json
import re

import pytest

from backends.live import observed
from pdsim.calibration import importers
from pdsim.cli.main import main
from pdsim.results.export import named
from pdsim.results.kept import KeptRun


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    output = tmp_path_factory.mktemp("served")
    assert (
        main(["run", "hw=2xh200", "model=qwen3-8b", "parallel=tp1", "workload=smoke", "-q", f"output={output}"]) == 0
    )
    return KeptRun(next(output.iterdir()))


@pytest.fixture(scope="module")
def moved(tmp_path_factory):
    output, own = tmp_path_factory.mktemp("moved"), ["experiment.patterns=[pair]", "experiment.concurrency=[1,2]"]
    assert main(["run", "experiment=transfer", "hw=2xh200", "backend=nixl", *own, "-q", f"output={output}"]) == 0
    return KeptRun(next(output.iterdir()))


def test_aiperfs_records_and_summary_are_those_of_the_run(served, tmp_path):
    assert main(["export", str(served.folder), "--format", "aiperf", "--to", str(tmp_path)]) == 0
    rows = served.requests.to_pylist()
    for row, (request, was) in zip(rows, observed.read(tmp_path / "profile_export.jsonl"), strict=True):
        assert (request.input, was.tokens, was.status) == (row["input"], row["output"], "ok")
        assert was.first - was.sent == pytest.approx(row["ttft"], abs=1e-8)
        assert was.last - was.sent == pytest.approx(row["e2e"], abs=1e-8)
    main(["export", str(served.folder), "--format", "aiperf", "--to", str(tmp_path)])
    summary = json.loads((tmp_path / "profile_export_aiperf.json").read_text(encoding="utf-8"))
    ttft = summary["time_to_first_token"]
    assert (ttft["unit"], ttft["count"], "p99" in ttft) == ("ms", 12, False)  # 12 requests have no p99
    assert ttft["p50"] == pytest.approx(1e3 * served.metrics["ttft_p50_s"])
    assert summary["request_count"] == {"unit": "requests", "avg": 12.0}
    table = list(csv.reader((tmp_path / "profile_export_aiperf.csv").read_text(encoding="utf-8").splitlines()))
    (row,) = [row for row in table if row and row[0] == "Time to First Token (ms)"]
    assert row[table[0].index("p50")] == f"{ttft['p50']:.2f}"
    assert ["Request Count", "12.00"] in table


def test_nixlbenchs_table_is_read_as_the_same_transfers(moved, tmp_path):
    assert main(["export", str(moved.folder), "--format", "nixlbench", "--to", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"nixlbench-write-1.txt", "nixlbench-write-2.txt"}
    rows = moved.transfers.to_pylist()
    for threads in (1, 2):
        samples = importers.read(tmp_path / f"nixlbench-write-{threads}.txt").rows
        assert len(samples) == 6
        for sample in samples:
            label = f"pair {sample.blocks}x{sample.size} c{threads}"
            times = [row["latency_us"] for row in rows if row["label"] == label]
            assert sample.concurrency == threads
            assert sample.seconds == pytest.approx(sum(times) / len(times) * 1e-6, rel=1e-4)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_histograms_have_an_engines_names_and_add_up(served, tmp_path, engine):
    assert main(["export", str(served.folder), "--format", engine, "--to", str(tmp_path)]) == 0
    text = (tmp_path / f"{engine}.prom").read_text(encoding="utf-8")
    name = f"{engine}:time_to_first_token_seconds"
    found = {key: float(value) for key, value in re.findall(rf"(?m)^{name}(\S+) (\S+)$", text)}
    ttft = served.requests["ttft"].to_pylist()
    assert found['_count{model_name="qwen3-8b"}'] == found['_bucket{model_name="qwen3-8b",le="+Inf"}'] == 12
    assert found['_sum{model_name="qwen3-8b"}'] == pytest.approx(sum(ttft))
    assert found['_bucket{model_name="qwen3-8b",le="0.05"}'] == sum(value <= 0.05 for value in ttft) > 0
    assert named(served, engine)[name].to_pylist() == ttft


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "export needs one run and its format; write --format aiperf, nixlbench, vllm, sglang"),
        (("--format", "genai"), "--format genai is not known"),
        (("--format", "nixlbench"), "has no transfers that nixlbench makes"),
    ],
)
def test_what_cannot_be_exported_is_refused_in_one_line(served, pdsim_says, words, message):
    status, _, said = pdsim_says("export", str(served.folder), *words)
    assert (status, said.count("\n")) == (2, 1)
    assert message in said


def test_choices_are_listed_as_json(pdsim_says):
    status, said, _ = pdsim_says("list", "workload", "--json")
    assert status == 0
    assert json.loads(said)["workload"]["embedded"] == "The small trace that is shipped with pdsim"
