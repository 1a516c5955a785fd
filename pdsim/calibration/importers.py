# SPDX-License-Identifier: Apache-2.0
"""Samples from what others print, in the formats of the tools that people run and of published tables.

Each reader returns the time of *one transfer* (a whole batch), as ``experiment=transfer`` measures it, whatever
the tool calls latency; means stand for medians.  What a tool does not print is taken from its command line, if
that is in the file, or from its defaults.  A new tool is a reader and an entry of `FORMATS`.
"""

import csv
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from pdsim.calibration import samples
from pdsim.calibration.samples import Sample, Samples
from pdsim.core import files
from pdsim.core.errors import ConfigError

SERVED = ("vllm", "nixl", "mooncake")
"""Formats of what engines log while they serve."""

Rows = Iterator[Sample]


def read(path: Path, tool: str = "") -> Samples:
    """Return the samples in *path*, which a *tool* of `FORMATS` wrote, by default the one that it shows to be.

    Those of a foreign tool are of kind *published*.  A table of published numbers takes its source from the comments
    at its top.  Raise a `ConfigError` if it cannot be read, or if it holds no samples.
    """
    text = files.given(path, "name a text file")
    tool = tool or tool_of(text)
    if tool not in FORMATS:
        what = f"--format {tool} is not known" if tool else f"{path} is in no format that is recognised"
        raise ConfigError(f"{what}; name one with --format: {', '.join(FORMATS)}")
    if tool == "samples":
        return samples.read(path)
    try:
        rows = list(FORMATS[tool][1](text))
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError, csv.Error) as error:
        # a row that is cut short or was edited: what failed in it says nothing to a user, the tool and the file do
        what = f"no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise ConfigError(f"{path}: not what {tool} prints ({what}); give the whole of its output") from error
    if not rows:
        raise ConfigError(f"{path}: no row of {tool} in it; give the whole of what it printed")
    about = {"kind": "published", "source": f"foreign tool {tool}, {path.name}"}
    lines = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#") and tool == "table"]
    return Samples(rows, about | dict(line.split(": ", 1) for line in lines if ": " in line))


def tool_of(text: str) -> str:
    """Return the name of the tool that printed *text*, or nothing of one that is not known."""
    return next((name for name, (sign, _) in FORMATS.items() if re.search(sign, text)), "")


def _sample(seconds: float, **where: Any) -> Sample:
    return Sample(seconds=seconds, low=seconds, high=seconds, **where)


def _option(text: str, name: str, default: str) -> str:
    # of the listing of options that a tool prints, or of its command line
    said = re.findall(rf"--{name}=[^)]*\)\s*:\s*(\S+)", text) or re.findall(rf"--?{name}[= ]([\w.]+)", text)
    return said[-1] if said else default


def _table(text: str, first: str, split: str = r"\s{2,}") -> Iterator[dict[str, str]]:
    # *split* is between cells: two or more blanks, because headings contain single ones
    heads: list[str] = []
    for line in text.splitlines():
        cells = [cell for cell in re.split(split, line.strip().strip("|").strip()) if cell]
        if first in cells:
            heads = cells
        elif heads and len(cells) == len(heads) and re.fullmatch(r"[\d.]+", cells[0]):
            yield dict(zip(heads, cells, strict=True))


def _nixlbench(text: str) -> Rows:
    # Its latency times a row's batch size is the time of a transfer.
    threads = int(_option(text, "num_threads", "1"))
    operation = _option(text, "op_type", "WRITE").lower()
    kinds = {_option(text, f"{side}_seg_type", "") for side in ("initiator", "target")}
    memory = "gpu" if "VRAM" in kinds else "host" if kinds == {"DRAM"} else ""
    for row in _table(text, "Block Size (B)"):
        size, batch = int(row["Block Size (B)"]), int(row["Batch Size"])
        seconds = float(row["Avg Lat. (us)"]) * 1e-6 * batch
        yield _sample(seconds, blocks=batch, size=size, concurrency=threads, operation=operation, memory=memory)


def _tebench(text: str) -> Rows:
    operation = _option(text, "op_type", "write")
    for row in _table(text, "BlkSize (B)"):
        size, batch, seconds = int(row["BlkSize (B)"]), int(row["Batch"]), float(row["Avg Tx (us)"]) * 1e-6
        rate = float(next(value for name, value in row.items() if name.startswith("BW"))) * 1e9
        threads = max(1, round(rate * seconds / (size * batch)))
        yield _sample(seconds, blocks=batch, size=size, concurrency=threads, operation=operation)


def _transfer_engine_bench(text: str) -> Rows:
    command = ""
    for line in text.splitlines():
        if re.search(r"transfer_engine_bench .*-segment_id", line):  # the initiator's
            command = line
        done = re.search(r"Test completed: duration ([\d.]+), batch count (\d+)", line)
        if done is None:
            continue
        if not command:
            lack = "transfer_engine_bench does not print its block size"
            raise ConfigError(f"{lack}: put its command line above its output")
        threads = int(_option(command, "threads", "12"))  # defaults are those of its flags
        yield _sample(
            float(done[1]) * threads / int(done[2]),
            blocks=int(_option(command, "batch_size", "128")),
            size=int(_option(command, "block_size", "65536")),
            concurrency=threads,
            operation=_option(command, "operation", "read"),
        )


def _mori(text: str) -> Rows:
    # Avg Lat is of a batch in the first table; the second has a total for each message size.
    where = {"operation": _option(text, "op-type", _option(text, "op", "read"))}
    queues = int(_option(text, "num-qp-per-transfer", "4"))
    rows = list(_table(text, "MsgSize (B)", r"\s*\|\s*|\s{2,}"))
    batch = round(float(rows[-1]["TotalSize (MB)"]) * 1e6 / int(rows[-1]["MsgSize (B)"])) if rows else 0
    for row in rows:
        seconds, blocks = float(row["Avg Lat (us)"]) * 1e-6, int(row.get("BatchSize", batch))
        yield _sample(seconds, blocks=blocks, size=int(row["MsgSize (B)"]), queues=queues, **where)
    for row in _table(text, "MsgSize(B)"):
        seconds = float(row["TotalDur(us)"]) * 1e-6 / int(row["Iters"])
        yield _sample(seconds, blocks=int(row["Batch"]), size=int(row["MsgSize(B)"]), queues=queues, **where)


def _perftest(text: str) -> Rows:
    # A bandwidth test keeps TX depth writes in flight, 128 if it does not say.  Its MB is 2**20 bytes.
    operation = "read" if re.search(r"RDMA_Read|ib_read", text) else "write"
    depth, queues = (re.search(rf"{name}\s*:\s*(\d+)", text) for name in ("TX depth", "Number of qps"))
    where = {"blocks": 1, "operation": operation, "queues": int(queues[1]) if queues else 0, "bare": True}
    where["memory"] = "gpu" if re.search(r"use_(cuda|rocm)|CUDA device", text) else "host"
    for row in _table(text, "#bytes", r"\s+(?!peak|average|percentile)"):
        size = int(row["#bytes"])
        if "t_typical[usec]" in row:
            yield _sample(float(row["t_typical[usec]"]) * 1e-6, size=size, **where)
            continue
        unit, value = next((name, float(value)) for name, value in row.items() if name.startswith("BW average"))
        flight = int(depth[1]) if depth else 128
        rate = value * (2**20 if "MB" in unit else 1e9 / 8)
        yield _sample(size * flight / rate, size=size, concurrency=flight, **where)


def _nvbandwidth(text: str) -> Rows:
    # Its cells are copies of the buffer; the median counts.
    size = int(_option(text, "bufferSize", _option(text, "b", "512"))) << 20
    matrix = r"memcpy \w+ GPU\(row\) (<?->?) GPU\(column\) bandwidth \(GB/s\)\n(.*\n)((?:\s*\d+ .*\n)+)"
    for arrow, _, body in re.findall(matrix, text):
        cells = [float(cell) for line in body.splitlines() for cell in line.split()[1:] if cell != "N/A"]
        times = sorted(size / (cell * 1e9) for cell in cells)
        low, middle, high = (times[share * len(times) // 4] for share in (1, 2, 3))
        yield Sample(
            pattern="bidirectional" if arrow == "<->" else "pair", blocks=1, size=size,
            operation="read" if arrow == "<-" else "write", seconds=middle, low=low, high=high,
            per_flow=tuple(times),
        )  # fmt: skip


def _nccl(text: str) -> Rows:
    named = re.search(r"(\w+)_perf", text)
    if named is None:
        raise ConfigError("nccl-tests does not always say which test it is: put its command line above its output")
    pattern = {"sendrecv": "pair"}.get(named[1], named[1])
    for line in text.splitlines():
        cells = line.split()
        row = len(cells) == 13 and all(re.fullmatch(r"[\d.]+", cells[index]) for index in (0, 1, 5, 6))
        if row and int(cells[0]):
            yield _sample(float(cells[5]) * 1e-6, pattern=pattern, blocks=1, size=int(cells[0]))


def _vllm(text: str) -> Rows:
    # A line has the means of some seconds, of reads of blocks of one size.  Its MB is 2**20 bytes.  Some releases
    # count no descriptors: each transfer is taken as one.
    rule = (
        r"Avg xfer time \(ms\)=([\d.]+)(?:.*?Avg post time \(ms\)=([\d.]+))?"
        r".*?Avg MB per transfer=([\d.]+)(?:.*?Avg number of descriptors=([\d.]+))?"
    )
    for time, post, size, descriptors in re.findall(rule, text):
        yield from _read(float(time) * 1e-3, float(post or 0) * 1e-3, float(size) * 2**20, float(descriptors or 1))


def _vllm_metrics(text: str) -> Rows:
    # The means since the server started, of all its ranks.
    totals: dict[str, float] = defaultdict(float)
    for name, value in re.findall(r"(?m)^vllm:nixl_(\w+_(?:sum|count))(?:\{[^}]*\})? (\S+)", text):
        totals[name] += float(value)
    if count := totals["xfer_time_seconds_count"]:
        names = ("xfer_time_seconds", "post_time_seconds", "bytes_transferred", "num_descriptors")
        yield from _read(*(totals[f"{name}_sum"] / count for name in names))


def _read(seconds: float, posting: float, nbytes: float, descriptors: float) -> Rows:
    blocks = round(descriptors)
    if blocks and nbytes >= blocks:
        size, counted = round(nbytes / blocks), blocks > 1
        yield _sample(seconds, posting=posting, blocks=blocks, size=size, operation="read", counted=counted)


# What engines count while they serve does not say how many descriptors a transfer had: each is taken as one.
_OPERATIONS = {"agent_tx_bytes": "write", "agent_rx_bytes": "read"}


def _nixl(text: str) -> Rows:
    # Of the events that ``telemetry_reader`` prints, an agent writes for each transfer that it posted its time, in
    # microseconds, and then its bytes.  Times include the first contact of two agents, which can take 0.2 s.
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    took = 0.0
    for name, value in re.findall(r"Event name: (\w+)\s+Value: (\d+)", text):
        if name == "agent_xfer_time":
            took = int(value) * 1e-6
        elif name in _OPERATIONS and took and int(value):
            times[_OPERATIONS[name], int(value)].append(took)
            took = 0.0
    for (operation, size), own in sorted(times.items()):
        low, _, high = quantiles(own, n=4, method="inclusive") if len(own) > 1 else own * 3
        yield Sample(
            blocks=1, size=size, operation=operation, seconds=median(own), low=low, high=high, repeats=len(own),
            counted=False,
        )  # fmt: skip


def _mooncake(text: str) -> Rows:
    # A row is an interval that Mooncake logs with ``MC_TE_METRIC=1``: the mean of its transfers.  Their bytes are
    # the throughput, of 2**20 bytes a second, times the interval, over the transfers.  Their time is the mean over
    # the bins of the histogram, whose middle stands for each.  The log does not tell writes from reads.
    rule = r"\(over last (\d+)s\): Throughput: ([\d.]+) MB/s \| Latency Distribution \(count=(\d+)\): (.*)"
    for seconds, rate, count, bins in re.findall(rule, text):
        size = round(float(rate) * 2**20 * int(seconds) / max(1, int(count)))
        shares = [
            (float(a), float(b), float(share)) for a, b, share in re.findall(r"(\d+)-(\d+)\D*:([\d.]+)%", bins)
        ]
        total = sum(share for *_, share in shares)
        if size and total:
            mean = sum((a + b) / 2 * share for a, b, share in shares) / total * 1e-6
            yield Sample(blocks=1, size=size, seconds=mean, low=mean, high=mean, repeats=int(count), counted=False)


def _published(text: str) -> Rows:
    # A latency for each size and batch, or rates of writes and reads of a whole node for each block size.  The rest
    # is in the first line's words, as in "8xH800, threads 12, batch 64, 2 QPs".
    about = next(line for line in text.splitlines() if line.startswith("#"))
    rows = list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))
    queues, threads, batch, gpus = (
        int(number[1]) if (number := re.search(rule, about)) else 0
        for rule in (r"(\d+) QPs?\b", r"threads (\d+)", r"batch (\d+)", r"\b(\d+)xH\d+")
    )
    for row in rows:
        if "avg_lat_us" in row:
            where = {"blocks": int(row["batch"]), "size": int(row["msg_bytes"]), "queues": queues}
            operation = "read" if " read" in about else "write"
            yield _sample(float(row["avg_lat_us"]) * 1e-6, operation=operation, **where)
        for operation in ("write", "read"):
            if f"{operation}_gbs" in row:
                size, rate, flows = int(row["block_bytes"]), float(row[f"{operation}_gbs"]) * 1e9, max(1, gpus)
                where = {"blocks": batch, "size": size, "concurrency": threads // flows, "flows": flows}
                yield _sample(threads * batch * size / rate, operation=operation, **where)


FORMATS: Mapping[str, tuple[str, Callable[[str], Rows]]] = {
    "samples": (r"(?m)^pattern,blocks,size,", _published),  # our own, read by `samples.read`
    "table": (r"(?m)^(msg_bytes,batch|block_bytes,write_gbs)", _published),
    "nixlbench": (r"Block Size \(B\)\s+Batch Size", _nixlbench),
    "tebench": (r"BlkSize \(B\)\s+Batch", _tebench),
    "transfer_engine_bench": (r"Test completed: duration", _transfer_engine_bench),
    "mori": (r"MsgSize ?\(B\)", _mori),
    "perftest": (r"#bytes\s+#iterations", _perftest),
    "nvbandwidth": (r"nvbandwidth Version|GPU\(column\) bandwidth", _nvbandwidth),
    "vllm": (r"KV Transfer metrics: ", _vllm),
    "vllm-metrics": (r"(?m)^vllm:nixl_xfer_time_seconds_sum", _vllm_metrics),
    "nixl": (r"=== NIXL Telemetry Event ===", _nixl),
    "mooncake": (r"\[Metrics\] Transfer Engine Stats", _mooncake),
    "nccl-tests": (r"algbw\s+busbw", _nccl),
}
"""By name: what shows that a text is of this tool, and the reader of its rows."""
