# SPDX-License-Identifier: Apache-2.0
"""One pair of real servers, measured in one go: single requests of many lengths, then loads.

    python -m benchmarks.live_campaign --engine vllm|sglang --output DIR [OPTION ...] [KEY=VALUE ...]

Starts a prefill and a decode server of the engine with dummy weights (Qwen3-8B on 2 x H200 unless told otherwise),
sends single requests of each prompt length to the idle pair, then each load, and ends the servers.  A load is a list
of overrides, so that ``python -m pdsim run target=model WORDS`` predicts it; `LOADS` has their names.  KEY=VALUE
goes to every configuration, as in ``live.connector=NixlPushConnector``.  `benchmarks.live_variants` runs several
side by side.

What it writes, at most eight files below 16 MiB each, anew after every load so that an interrupted campaign keeps
what it has: ``about.json`` (provenance, command lines, what did not run and why), ``singles.json`` (rows, and what
the servers counted for each request), ``summary.json`` (words and metrics of each load), ``requests.parquet``,
``metrics.parquet`` (the servers' gauges and counters over time), ``trace.jsonl`` and a log of each server.

Exit status 1 if the servers did not start, a load did not run, or a request failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from backends.live.live_deployment import LiveDeployment, Served, deployed
from experiments.serve.live_run import result
from pdsim.config import Config
from pdsim.config.compose import compose
from pdsim.config.loading import as_written, plain
from pdsim.core.errors import ConfigError, PdsimError
from pdsim.results.environment import environment
from pdsim.results.record import Result
from pdsim.serving.workload import Request, load

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
SINGLE_OUTPUT = 16
"""Tokens that a single request generates."""

LOADS: dict[str, list[str]] = {
    # fixed lengths: 2,048 in 128 out, of which one prefill GPU does some 19 a second
    "fixed-20": ["workload=poisson", "workload.rate=3.8", "workload.input_mean=2048", "workload.output_mean=128"],
    "fixed-40": ["workload=poisson", "workload.rate=7.6", "workload.input_mean=2048", "workload.output_mean=128"],
    "fixed-60": ["workload=poisson", "workload.rate=11.4", "workload.input_mean=2048", "workload.output_mean=128"],
    "fixed-80": ["workload=poisson", "workload.rate=15.2", "workload.input_mean=2048", "workload.output_mean=128"],
    "fixed-90": ["workload=poisson", "workload.rate=17.1", "workload.input_mean=2048", "workload.output_mean=128"],
    # log-normal lengths of the same means
    "mixed-30": ["workload=poisson", "workload.rate=5.1", "workload.input_mean=2048", "workload.output_mean=128"],
    "mixed-60": ["workload=poisson", "workload.rate=10.2", "workload.input_mean=2048", "workload.output_mean=128"],
    "mixed-80": ["workload=poisson", "workload.rate=13.6", "workload.input_mean=2048", "workload.output_mean=128"],
    # long prompts, and long answers, which fill the decode batch
    "long-60": ["workload=poisson", "workload.rate=2.6", "workload.input_mean=8192", "workload.output_mean=64"],
    "decode": ["workload=poisson", "workload.rate=12", "workload.input_mean=512", "workload.output_mean=512"],
}
for _name, _words in LOADS.items():
    _mixed = _name.startswith("mixed")
    _words += (
        ["workload.input_cv=1.0", "workload.output_cv=0.5"]
        if _mixed
        else ["workload.input_cv=0", "workload.output_cv=0"]
    )

BLIND: dict[str, list[str]] = {
    "fixed1k-30": ["workload=poisson", "workload.rate=10.5", "workload.input_mean=1024", "workload.output_mean=192"],
    "fixed3k-55": ["workload=poisson", "workload.rate=7.2", "workload.input_mean=3072", "workload.output_mean=96"],
    "fixed3k-75": ["workload=poisson", "workload.rate=9.3", "workload.input_mean=3072", "workload.output_mean=96"],
    "short-90": ["workload=poisson", "workload.rate=22", "workload.input_mean=1536", "workload.output_mean=64"],
    "mixed1k-45": [
        "workload=poisson", "workload.rate=11", "workload.input_mean=1536", "workload.output_mean=160",
        "workload.input_cv=1.2", "workload.output_cv=0.7",
    ],
    "mixed3k-70": [
        "workload=poisson", "workload.rate=8.6", "workload.input_mean=3000", "workload.output_mean=96",
        "workload.input_cv=0.8", "workload.output_cv=0.5",
    ],
    "gamma-50": ["workload=gamma", "workload.rate=9.2", "workload.input_mean=2048", "workload.output_mean=128"],
    "long12k-40": ["workload=poisson", "workload.rate=1.1", "workload.input_mean=12288", "workload.output_mean=48"],
    "answers-45": ["workload=poisson", "workload.rate=15", "workload.input_mean=384", "workload.output_mean=384"],
}  # fmt: skip
"""Loads that no parameter was fitted to: other rates, lengths and arrivals than those of `LOADS`."""
THIRD: dict[str, list[str]] = {
    "fixed700-35": ["workload=poisson", "workload.rate=15", "workload.input_mean=700", "workload.output_mean=160"],
    "fixed4k-60": ["workload=poisson", "workload.rate=5.6", "workload.input_mean=4000", "workload.output_mean=80"],
    "answers200-35": ["workload=poisson", "workload.rate=11", "workload.input_mean=200", "workload.output_mean=300"],
    "gamma1k-45": ["workload=gamma", "workload.rate=13", "workload.input_mean=1280", "workload.output_mean=112"],
    "long6k-50": ["workload=poisson", "workload.rate=2.9", "workload.input_mean=6000", "workload.output_mean=72"],
    "mixed2k-50": [
        "workload=poisson", "workload.rate=7.5", "workload.input_mean=2300", "workload.output_mean=120",
        "workload.input_cv=0.6", "workload.output_cv=0.6",
    ],
}  # fmt: skip
"""Loads of the campaign after that of `BLIND`, chosen and predicted when those had been looked at."""
FOURTH: dict[str, list[str]] = {
    "fixed500-40": ["workload=poisson", "workload.rate=13", "workload.input_mean=500", "workload.output_mean=256"],
    "fixed5k-55": ["workload=poisson", "workload.rate=4.1", "workload.input_mean=5000", "workload.output_mean=100"],
    "gamma3k-45": ["workload=gamma", "workload.rate=5.3", "workload.input_mean=3000", "workload.output_mean=150"],
    "mixed1k5-45": [
        "workload=poisson", "workload.rate=10.5", "workload.input_mean=1500", "workload.output_mean=200",
        "workload.input_cv=0.7", "workload.output_cv=0.5",
    ],
}  # fmt: skip
"""Loads of the campaign after that of `THIRD`."""
BLIND |= THIRD | FOURTH
for _name, _words in BLIND.items():
    if not _name.startswith("mixed"):
        _words += ["workload.input_cv=0", "workload.output_cv=0"]

TRACE_SHARE = 0.5
"""Of the prefill's capacity, `CAPACITY`, that the slice of the trace asks for unless told otherwise."""

CAPACITY = 36_000.0
"""Input tokens a second that one H200 prefills of Qwen3-8B, for the pace of the trace."""

ARGUMENTS = {
    "vllm": ["""live.arguments=['--compilation-config','{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}']"""],
    "sglang": [
        "live.arguments=['--attention-backend',triton,'--sampling-backend',pytorch,'--grammar-backend',none,"
        "'--cuda-graph-max-bs','64','--watchdog-timeout','600']",
        "live.prefill_arguments=['--disable-cuda-graph']",
    ],
}
"""What saves a minute of start, and what the engine has without packages that are not everywhere."""

ENGINES = {
    "vllm": ["backend=nixl", "kv.page_size=16"],
    "sglang": ["backend=mooncake_nvlink", "kv.page_size=1"],
}
GPUS = [
    "hw=2xh200",
    "model=qwen3-8b",
    "parallel=tp1",
    "scheduler.memory_fraction=0.55",
    "scheduler.decode_batch=256",
]

BOUNDS = ["live.timeout=60s", "live.ready=240s"]
"""Of a request and of the start, so that one that hangs does not cost the campaign its time."""

LOG = 4 << 20
"""Bytes of a server's log that are kept, from its end."""


class Campaign:
    """What has been measured so far, and its files in *folder*."""

    def __init__(self, folder: Path, about: dict[str, Any], limit: float) -> None:
        self.folder, self.about = folder, about
        self.singles: list[dict[str, Any]] = []
        self.summaries: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []
        self.samples: list[dict[str, Any]] = []
        self.failures = 0
        self._began, self._limit = time.monotonic(), limit

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self._limit - (time.monotonic() - self._began)

    def say(self, text: str) -> None:
        """Print *text* with the seconds since the start."""
        print(f"{time.monotonic() - self._began:6.1f} s  {text}", flush=True)

    def add(self, name: str, found: Result) -> None:
        """Keep the rows of one load, or of one single request."""
        columns = found.requests
        count = len(columns["id"])
        self.rows += [{"load": name, **{key: values[n] for key, values in columns.items()}} for n in range(count)]
        self.failures += len(found.failures)

    def add_load(self, name: str, words: Sequence[str], found: Result, served: Served) -> None:
        """Keep a load."""
        self.add(name, found)
        metrics = {metric.name: metric.value for metric in found.summary}
        self.summaries[name] = {
            "words": list(words),
            "metrics": metrics,
            "failures": list(found.failures)[:20],
            "notes": list(found.notes),
            "reported": _reported(served),
        }
        self.samples += [{"load": name, **asdict(sample)} for sample in served.samples]
        self.write()

    def write(self) -> None:
        """Write all files."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.about["seconds"] = round(time.monotonic() - self._began, 1)
        for name, value in (("about", self.about), ("singles", self.singles), ("summary", self.summaries)):
            (self.folder / f"{name}.json").write_text(json.dumps(plain(value), indent=1) + "\n", encoding="utf-8")
        for name, rows in (("requests", self.rows), ("metrics", self.samples)):
            if rows:
                pq.write_table(pa.Table.from_pylist(rows), self.folder / f"{name}.parquet", compression="zstd")


def _reported(served: Served) -> dict[str, Any]:
    """Return what each server counted: histograms by count, mean and quantiles, and counters that moved."""
    return {
        server: {
            "histograms": {
                name: {
                    "count": one.count,
                    "mean": one.mean,
                    **{f"p{q}": one.quantile(q / 100) for q in (50, 90, 99)},
                }
                for name, one in page.histograms.items()
                if ":" in name and one.count > 0
            },
            "counters": {
                name: value
                for name, value in page.counters.items()
                if ":" in name and value and not name.endswith("_created")
            },
            "gauges": {name: value for name, value in page.gauges.items() if ":" in name and "kv_transfer" in name},
        }
        for server, page in served.reported.items()
    }


def _run_singles(
    campaign: Campaign, config: Config, pair: LiveDeployment, lengths: Sequence[int], repeat: int
) -> None:
    """Measure single requests on the idle pair; the first of each length is a warm-up that is kept and marked.

    Should that fail, none of this length or a longer one follows: each would take its time to fail.
    """
    number = 0
    for length in (n for n in lengths if n + SINGLE_OUTPUT <= config.model.context):
        for repetition in range(-1, repeat):
            number += 1
            request = Request(0.0, length, SINGLE_OUTPUT, None, (1_000_000 + number,))  # contents of its own
            served = pair.serve([request], lambda *_: None)
            found = result(config, [request], served)
            campaign.add(f"single-{length}" if repetition >= 0 else f"warmup-{length}", found)
            row = {key: values[0] for key, values in found.requests.items()}
            row["itl"] = [round(gap, 6) for gap in served.rows[0].gaps]
            about = {"length": length, "repetition": repetition, "warmup": repetition < 0}
            campaign.singles.append({**about, "row": row, "reported": _reported(served)})
            if repetition < 0 and row["status"] != "ok":
                campaign.about["not_run"][f"single requests from {length} on"] = row["status"]
                campaign.say(f"single {length}: {row['status']}; no longer ones")
                return
        last = campaign.singles[-1]["row"]
        campaign.say(f"single {length}: {last['status']}, TTFT {last['ttft']}, handoff {last['handoff']}")
        campaign.write()


def _run_loads(campaign: Campaign, pair: LiveDeployment, base: Sequence[str], loads: dict[str, list[str]]) -> None:
    for name, words in loads.items():
        every = [*base, *words]
        config = compose([*every, "target=live"])
        requests = load(config.workload, config.seed, config.model.context)
        need = requests[-1].arrival * 1.3 + 10
        if campaign.left < need:
            campaign.about["not_run"][name] = f"needs {need:.0f} s, {campaign.left:.0f} s were left"
            campaign.say(f"{name}: not run, {campaign.about['not_run'][name]}")
            continue
        served = pair.serve(requests, lambda *_: None)
        found = result(config, requests, served)
        campaign.add_load(name, every, found, served)
        values = {metric.name: metric.value for metric in found.summary}
        shown = ", ".join(f"{key} {values[key]:.4g}" for key in SHOWN if values.get(key) is not None)
        campaign.say(f"{name}: {values['requests_ok']} of {values['requests']} ok, {shown}")
        for failure in found.failures[:3]:
            campaign.say(f"  {failure}")


SHOWN = ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "e2e_p50_s", "handoff_p50_s")


def trace_load(
    trace: Path, folder: Path, count: int, context: int, capacity: float, share: float = TRACE_SHARE, skip: int = 0
) -> list[str]:
    """Write *count* requests of *trace* that fit into *context*, and return the load that replays them.

    The first *skip* that fit are left out.  The pace is such that they ask for *share* of *capacity* input tokens a
    second.
    """
    kept: list[str] = []
    with trace.open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            if row["input_length"] + row["output_length"] <= context:
                kept.append(line)
            if len(kept) == skip + count:
                break
    kept = kept[skip:]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trace.jsonl").write_text("".join(kept), encoding="utf-8")
    rows = [json.loads(line) for line in kept]
    if not rows:
        raise ConfigError(f"{trace} has no more than {skip} requests that fit; lower --trace-skip")
    seconds = (rows[-1]["timestamp"] - rows[0]["timestamp"]) / 1e3
    if not seconds:
        raise ConfigError(f"the first {count} requests of {trace} arrive at one time; raise --trace-count")
    tokens = sum(row["input_length"] for row in rows)
    speed = share * capacity * seconds / tokens
    words = ["workload=embedded", f"workload.trace={folder / 'trace.jsonl'}", f"workload.speed={speed:.6g}"]
    return [*words, "workload.jitter=auto"]  # its times lie on a grid of 3 s


def _gpus() -> list[str]:
    with suppress(OSError, subprocess.SubprocessError):
        query = [
            "nvidia-smi",
            "--query-gpu=name,uuid,driver_version,clocks.max.sm,memory.total",
            "--format=csv,noheader",
        ]
        return subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
    return []


def _options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engine", choices=sorted(ENGINES), required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--lengths", type=lambda text: [int(one) for one in text.split(",")], default=list(LENGTHS))
    parser.add_argument("--repeat", type=int, default=7, help="single requests of each length")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of a generated load")
    parser.add_argument("--scale", type=float, default=1.0, help="rates of all loads are multiplied by it")
    parser.add_argument("--loads", default=",".join(LOADS), help="names, NAME@2 once more, or none")
    parser.add_argument("--trace", type=Path, help="a Mooncake trace, of which a slice is the last load")
    parser.add_argument("--trace-count", type=int, default=60)
    parser.add_argument("--trace-skip", type=int, default=0, help="requests of it that are left out first")
    parser.add_argument("--trace-share", type=float, default=TRACE_SHARE, help="of the capacity that it asks for")
    parser.add_argument(
        "--turns", type=Path, help="measure when FOLDER/go exists, end the servers when FOLDER/end does"
    )
    parser.add_argument("--freeze", action="store_true", help="freeze the servers' garbage before the loads")
    parser.add_argument("--rest", action="store_true", help="stop the servers' processes until it is their turn")
    parser.add_argument("--limit", type=float, default=560.0, help="seconds in all")
    parser.add_argument("--processor", action="store_true", help="a tiny model on this machine's processor")
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE")
    return parser.parse_intermixed_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Run the campaign and return the exit status."""
    asked = _options(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers end and files are written on the way out
    asked.output.mkdir(parents=True, exist_ok=True)
    base = [*ENGINES[asked.engine], *(["hw=loopback"] if asked.processor else GPUS), f"live.engine={asked.engine}"]
    base += [] if asked.processor else ARGUMENTS[asked.engine]
    base += ["live.launch=true", "live.warmup=0", *BOUNDS, *asked.words]
    command = ["python", "-m", "benchmarks.live_campaign", *(sys.argv[1:] if words is None else words)]
    about = {"command": command, "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "gpus": _gpus(), "not_run": {}}
    campaign = Campaign(asked.output, about | {"words": base} | environment(), asked.limit)
    try:
        _measure(campaign, asked, base)
    except PdsimError as error:
        campaign.say(str(error))
        campaign.about["error"] = str(error)
    finally:
        campaign.write()
    return int(bool(campaign.failures or campaign.about["not_run"] or "error" in campaign.about))


def _measure(campaign: Campaign, asked: argparse.Namespace, base: Sequence[str]) -> None:
    config = compose([*base, "target=live"])
    campaign.about["config"] = as_written(config)
    loads = dict(scaled(asked.loads, asked.seconds, asked.scale))
    if asked.trace:
        capacity = CAPACITY * asked.scale
        loads[f"trace-{100 * asked.trace_share:.0f}"] = trace_load(
            asked.trace, asked.output, asked.trace_count, config.model.context, capacity, asked.trace_share,
            asked.trace_skip,
        )  # fmt: skip
    with tempfile.TemporaryDirectory() as work:
        try:
            with deployed(config, Path(work), lambda *_: None) as pair:
                campaign.say("servers are ready")
                campaign.about["ready_after"] = round(asked.limit - campaign.left, 1)
                with _resting(asked.rest):
                    _await_turn(campaign, asked.turns, "ready", "go")
                _run_singles(campaign, config, pair, asked.lengths, asked.repeat)
                if asked.freeze:
                    _freeze(campaign, pair)
                _run_loads(campaign, pair, base, loads)
                with _resting(asked.rest):
                    _await_turn(campaign, asked.turns, "done", "end")
        finally:
            for log in Path(work).glob("*.log"):
                text = log.read_bytes()
                (asked.output / log.name).write_bytes(text[:2000] + text[2000:][-LOG:])


@contextmanager
def _resting(rest: bool) -> Iterator[None]:
    """Stop the servers, which are leaders of process groups, meanwhile: SGLang's look for work without a pause."""
    groups = _children() if rest else []
    try:
        for group in groups:
            os.killpg(group, signal.SIGSTOP)
        yield
    finally:
        for group in groups:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGCONT)


def _children() -> list[int]:
    """Return the children of this process that lead a process group."""
    tasks = Path("/proc/self/task").glob("*/children")
    found = [int(pid) for task in tasks for pid in task.read_text().split()]
    return [pid for pid in found if os.getpgid(pid) == pid]


def _freeze(campaign: Campaign, pair: LiveDeployment) -> None:
    """Have SGLang leave out of its collections what it has made so far, as its documentation advises."""
    for _, server in pair.servers:
        with urlopen(f"{server.url}/freeze_gc", timeout=10) as answer:
            campaign.say(f"{server.name}: {answer.read().decode().strip()}")


def _await_turn(campaign: Campaign, turns: Path | None, reached: str, wanted: str) -> None:
    """Leave the file *reached* in *turns* and wait for the file *wanted*, for as long as the campaign may take."""
    if turns is None:
        return
    (turns / reached).touch()
    while not (turns / wanted).exists() and campaign.left > 0:
        time.sleep(0.1)
    campaign.say(f"{reached}, {wanted}")


def scaled(names: str, seconds: float, scale: float) -> Iterator[tuple[str, list[str]]]:
    """Yield name and words of each load that was asked for, for so many *seconds* at *scale* times its rate.

    What follows an ``@`` in a name tells repeats of a load apart.
    """
    for name in names.split(",") if names != "none" else ():
        words = dict(word.split("=") for word in (LOADS | BLIND)[name.partition("@")[0]])
        rate = float(words["workload.rate"]) * scale
        words |= {"workload.rate": f"{rate:.4g}", "workload.count": str(max(4, round(rate * seconds)))}
        yield name, [f"{key}={value}" for key, value in words.items()]


if __name__ == "__main__":
    sys.exit(main())
