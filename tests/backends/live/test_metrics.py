# SPDX-License-Identifier: Apache-2.0
"""What servers report of themselves over HTTP stands beside what the client measured."""

import asyncio
import json
import sys
from collections.abc import Callable

import pyarrow.parquet as pq
import pytest
from aiohttp import web

from tests.support.answering import chunk, openai

BEFORE = 5  # transfers that a server had before the run
LABELS = '{engine="0",model_name="tiny"}'


def vllm(transfers: int) -> str:
    """Return what vLLM with NIXL reports after so many transfers of 3 ms."""
    le = LABELS[:-1]
    return f"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{LABELS} 1.0
# HELP vllm:nixl_xfer_time_seconds Histogram of transfer duration for NIXL KV Cache transfers.
# TYPE vllm:nixl_xfer_time_seconds histogram
vllm:nixl_xfer_time_seconds_bucket{le},le="0.002"}} 0.0
vllm:nixl_xfer_time_seconds_bucket{le},le="0.004"}} {transfers}.0
vllm:nixl_xfer_time_seconds_bucket{le},le="+Inf"}} {transfers}.0
vllm:nixl_xfer_time_seconds_count{LABELS} {transfers}.0
vllm:nixl_xfer_time_seconds_sum{LABELS} {0.003 * transfers}
# HELP vllm:nixl_bytes_transferred Histogram of bytes transferred per NIXL KV Cache transfers.
# TYPE vllm:nixl_bytes_transferred histogram
vllm:nixl_bytes_transferred_bucket{le},le="+Inf"}} {transfers}.0
vllm:nixl_bytes_transferred_count{LABELS} {transfers}.0
vllm:nixl_bytes_transferred_sum{LABELS} {1000.0 * transfers}
"""


def sglang(transfers: int) -> str:
    """Return what SGLang reports, which counts in milliseconds."""
    return f"""# TYPE sglang:kv_transfer_latency_ms histogram
sglang:kv_transfer_latency_ms_bucket{{le="2.0",tp_rank="0"}} 0.0
sglang:kv_transfer_latency_ms_bucket{{le="4.0",tp_rank="0"}} {transfers}.0
sglang:kv_transfer_latency_ms_bucket{{le="+Inf",tp_rank="0"}} {transfers}.0
sglang:kv_transfer_latency_ms_count{{tp_rank="0"}} {transfers}.0
sglang:kv_transfer_latency_ms_sum{{tp_rank="0"}} {3.0 * transfers}
"""


async def served(page: Callable[[int], str], *words: str) -> None:
    """Run a live workload at a server that reports *page* of its transfers, one for each completion."""
    transfers = BEFORE

    async def complete(_: web.Request) -> web.StreamResponse:
        nonlocal transfers
        transfers += 1
        return web.Response(body=chunk(1, last=True), content_type="text/event-stream")

    async with openai(complete, lambda: page(transfers)) as url:
        command = [sys.executable, "-m", "pdsim", "run", "-q", "target=live", f"live.url={url}", *words]
        assert await (await asyncio.create_subprocess_exec(*command)).wait() == 0


@pytest.mark.parametrize(
    ("page", "name", "unit"),
    [(vllm, "vllm:nixl_xfer_time_seconds", 1.0), (sglang, "sglang:kv_transfer_latency_ms", 1e3)],
    ids=["vllm", "sglang"],
)
def test_histograms_of_transfers_are_kept_and_shown(page, name, unit, tmp_path, pdsim_prints):
    words = ["hw=loopback", "live.vocabulary=512", "workload.count=7", "workload.rate=100", "live.sample_every=10ms"]
    words += ["workload.output_mean=1", "workload.output_cv=0", "workload.input_mean=20", f"output={tmp_path}"]
    asyncio.run(served(page, *words))
    (folder,) = tmp_path.iterdir()
    (line,) = [line for line in pdsim_prints("show", "-v", folder).splitlines() if line.split()[1:2] == [name]]
    _, _, count, mean, median = line.split()[:5]
    assert (int(count), float(mean), float(median)) == (7, pytest.approx(0.003 * unit), pytest.approx(0.003 * unit))
    summary = json.loads((folder / "summary.json").read_text())["metrics"]
    assert summary["server0_transfer_mean_s"]["value"] == pytest.approx(0.003)
    samples = [
        row for row in pq.read_table(folder / "metrics.parquet").to_pylist() if row["metric"] == f"{name}_count"
    ]
    assert [row["value"] for row in samples] == sorted(row["value"] for row in samples)
    assert (samples[0]["value"], samples[-1]["value"]) == (BEFORE + 2, BEFORE + 9)  # two requests warm up
