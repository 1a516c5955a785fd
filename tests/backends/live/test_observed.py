"""What deployments log becomes a workload and a measured run."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from backends.live import observed
from pdsim.calibration import importers
from pdsim.cli.main import main
from pdsim.core.errors import ConfigError
from pdsim.results.store import load

DATA = Path(__file__).resolve().parents[3] / "data" / "live"

LENGTHS = {"input_lens": [20, 10, 30], "output_lens": [3, 2, 0], "errors": ["", "", "Connection reset"]}
TIMES = {"start_times": [100.5, 100.0, 101.0], "ttfts": [0.25, 0.5, 0.0], "itls": [[0.125, 0.125], [0.25], []]}
BENCH = LENGTHS | TIMES
METRICS = {
    "input_sequence_length": {"value": 100, "unit": "tokens"},
    "output_sequence_length": {"value": 5, "unit": "tokens"},
    "time_to_first_token": {"value": 50.0, "unit": "ms"},
    "request_latency": {"value": 250.0, "unit": "ms"},
}
AIPERF = [
    {"metadata": {"request_start_ns": 2_000_000_000, "benchmark_phase": "profiling"}, "metrics": METRICS},
    {"metadata": {"request_start_ns": 1_000_000_000, "benchmark_phase": "warmup"}, "metrics": {}},
    {"metadata": {"request_start_ns": 3_000_000_000}, "metrics": {}, "error": {"message": "503"}},
]
# a log of vLLM 0.22.1 on 2 x H200
VLLM = """\
INFO 11-22 11:28:43 [metrics.py:103] KV Transfer metrics: Num successful transfers=26, Avg xfer time (ms)=142.053, \
P90 xfer time (ms)=147.35, Avg post time (ms)=122.056, P90 post time (ms)=124.547, Avg MB per transfer=1152.0, \
Throughput (MB/s)=8109.667, Avg number of descriptors=36864.0
INFO 11-22 11:28:43 [loggers.py:271] Engine 000: Avg prompt throughput: 0.0 tokens/s, Running: 1 reqs
"""


def read(path: Path):
    """Return arrival, input, output, first and last token, and status of each request in the log."""
    return [
        (one.arrival, one.input, row.tokens, row.first, row.last, row.status) for one, row in observed.read(path)
    ]


def test_benchmarks_have_arrivals_tokens_and_failures(tmp_path):
    (tmp_path / "log").write_text(json.dumps(BENCH))
    assert read(tmp_path / "log") == [
        (100.0, 10, 2, 100.5, 100.75, "ok"),
        (100.5, 20, 3, 100.75, 101.0, "ok"),
        (101.0, 30, 0, None, None, "Error: Connection reset"),
    ]
    lines = observed.trace(observed.read(tmp_path / "log")).splitlines()
    rows = [tuple(json.loads(line).values()) for line in lines]
    assert rows == [(0.0, 10, 2, []), (500.0, 20, 3, []), (1000.0, 30, 1, [])]
    (tmp_path / "log").write_text("".join(json.dumps(record) + "\n" for record in AIPERF))
    one, two = read(tmp_path / "log")
    assert one == (2.0, 100, 5, pytest.approx(2.05), pytest.approx(2.25), "ok")
    assert two == (3.0, 0, 0, None, None, "Error: 503")


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("hello", "", "is in no format that is recognised; name one with --format: vllm-bench, aiperf, sglang"),
        ("hello", "genai", "--format genai is not known; name one"),
        (json.dumps({"ttfts": [1.0]}), "", "no start_times, without which arrivals are unknown"),
        (json.dumps(BENCH | {"itls": []}), "", "not what vllm-bench writes"),
        ('{"request_received_ts": 1.0}', "", "no 'prompt_tokens'"),
        ("", "aiperf", "no request of aiperf in it"),
    ],
)
def test_other_files_are_refused_with_the_reason(tmp_path, text, kind, message):
    (tmp_path / "log").write_text(text)
    with pytest.raises(ConfigError, match=message):
        observed.read(tmp_path / "log", kind)


def test_counts_of_engines_become_points_that_the_model_repeats(tmp_path, capsys):
    log = Path(__file__).parents[2] / "calibration" / "outputs" / "nixl.txt"
    assert main(["observe", str(log), "--to", str(tmp_path)]) == 0
    file = tmp_path / "nixl.samples.csv"
    assert f"8 kinds of transfers: {file}" in capsys.readouterr().out
    words = ["experiment=transfer", f"experiment.points={file}", "hw=loopback", "backend=nixl_shm"]
    assert main(["run", *words, f"output={tmp_path / 'run'}"]) == 0


def test_vllms_log_has_samples_of_its_reads(tmp_path):
    (tmp_path / "decode.log").write_text(VLLM)
    (row,) = importers.read(tmp_path / "decode.log").rows
    assert (row.blocks, row.size, row.operation, row.seconds) == (36864, 32768, "read", 0.142053)


def test_what_sglang_reported_is_a_run_like_any_other(tmp_path, pdsim_prints):
    rows = pq.read_table(DATA / "sglang-2xh200" / "requests.parquet").to_pylist()
    rows = [row for row in rows if row["load"] == "fixed-40"]
    log = tmp_path / "meta.jsonl"
    log.write_text("".join(row["reported"] + "\n" for row in rows))
    words = ["hw=2xh200", "model=qwen3-8b", "parallel=tp1"]
    assert main(["observe", str(log), *words, f"output={tmp_path}/results", "--to", str(tmp_path)]) == 0
    (folder,) = (tmp_path / "results").iterdir()
    metrics = load(folder)["metrics"]
    assert metrics["requests_ok"]["value"] == len(rows) == 152
    # the server does not see the client's part of 20 ms and more
    ttft = sorted(row["ttft_us"] for row in rows)[len(rows) // 2] * 1e-6
    assert 0.6 * ttft < metrics["ttft_p50_s"]["value"] < ttft
    # the trace is a workload that the model can serve
    trace = tmp_path / "meta.trace.jsonl"
    again = [f"workload.trace={trace}", f"output={tmp_path}/model", "workload.count=20"]
    assert "20 served in" in pdsim_prints("run", *words, *again)
    # and validate predicts it and compares
    words += [f"experiment.stored={folder}", "experiment.loads=[1.0]"]
    assert main(["validate", *words, f"output={tmp_path}/compared", "-v"]) == 0
    (compared,) = (tmp_path / "compared").iterdir()
    assert 0 < load(compared)["metrics"]["error_e2e_p50"]["value"] < 0.2


@pytest.mark.parametrize("words", [[], ["a", "b"], ["a", "--what"], ["a", "--to"]])
def test_observe_says_what_it_takes(words, pdsim_refuses):
    assert "see pdsim observe --help" in pdsim_refuses("observe", *words)
