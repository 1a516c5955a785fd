# SPDX-License-Identifier: Apache-2.0
"""Several pairs of real servers side by side on two GPUs, measured one after the other, and predicted before.

    python -m benchmarks.live_variants run PLAN --output DIR [--limit SECONDS] [--site ENGINE=FOLDER ...]
    python -m benchmarks.live_variants predict PLAN DIR       # before: a sealed file for each variant

A start of servers takes 80 s, a load 20: the variants of a plan start together and share the memory, each with a
pool of its own size, and are measured in turn by `benchmarks.live_campaign`, which writes into DIR/VARIANT.  Idle
servers ask their sockets only, so the one that is measured has the GPUs to itself.  What does not start is left out.
A folder of ``--site`` has an ``env.sh`` to be read first; ``--hold FILE`` waits until FILE exists, for a copy to
end.

A variant is a list of words over those of its engine, and for the prediction what the model has to be told instead.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.live_campaign import CAPACITY, GPUS, LENGTHS, SINGLE_OUTPUT, scaled, trace_load
from benchmarks.live_validation import SYSTEMS, told
from experiments.validate_live.parts import single_requests
from pdsim.config.compose import compose
from pdsim.results.environment import commit
from pdsim.serving.workload import Request
from pdsim.serving.workload import load as drawn
from pdsim.validation.verdicts import seal, unseal

SEED = "seed=7"
SECONDS = 14.0
REPEAT = 3
COUNT, SHARE, SKIP = 16, 0.25, 100
"""Of the slice of the trace: its requests, the share of the capacity that they ask for, and those left out before.

36, 0.4 and 400 in the campaigns before that of `FOURTH`, whose trace had its arrivals on a grid of 3 s.
"""
ALL = "mixed3k-70,answers-45,mixed1k-45,fixed3k-55,fixed3k-75,short-90,gamma-50,long12k-40,fixed1k-30"
TWO = "mixed3k-70,answers-45"
NEW = "fixed700-35,gamma1k-45,mixed2k-50,long6k-50"
"""Of `THIRD`, those that both engines are asked; what follows repeats loads of before, and one of these."""
FOURTH = "fixed500-40,fixed5k-55,gamma3k-45,mixed1k5-45"
PORTS = range(20100, 32000, 2000)
"""Of the first server of each variant, below those that the kernel gives to clients."""


@dataclass(frozen=True)
class Variant:
    """One pair of servers.

    *pool* is the memory for KV of each, in bytes; *model* are words of the prediction only.
    """

    engine: str
    site: str
    pool: int
    loads: str
    lengths: str = "2048,8192,32768"
    words: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()  # arguments of the decode server
    trace: bool = False
    repeat: int = REPEAT
    predicted: bool = True
    both: tuple[str, ...] = ()  # arguments of both servers
    flags: tuple[str, ...] = ()  # of the campaign
    hw: str = "2xh200"  # of the prediction: no two ranks of the model share a GPU

    @property
    def token(self) -> int:
        """Bytes of one token in the KV cache."""
        return 131072 if LLAMA[0] in self.words else 147456

    @property
    def live(self) -> list[str]:
        """Words of the servers alone: their memory, which is given and not shared out by what is free."""
        if self.engine == "vllm":
            ranks = {side: 2 if f"parallel.{side}.tp=2" in self.words else 1 for side in ("prefill", "decode")}
            memory = {side: ["--kv-cache-memory-bytes", str(self.pool // of)] for side, of in ranks.items()}
            fraction = 0.16
            sides = {"prefill": [*memory["prefill"], *self.both], "decode": [*memory["decode"], *self.decode]}
        else:
            tokens, fraction = ["--max-total-tokens", str(self.pool // self.token), *self.both], 0.9
            sides = {"prefill": ["--disable-cuda-graph", *tokens], "decode": tokens}
        return [
            *(f"live.{side}_arguments={_quoted(arguments)}" for side, arguments in sides.items()),
            f"scheduler.memory_fraction={fraction}",
        ]


def _quoted(arguments: Sequence[str]) -> str:
    return "[" + ",".join(f"'{one}'" for one in arguments) + "]"


LLAMA = ("model=llama-3.1-8b", "model.context=40960")
NO_THREAD = (
    '{"kv_connector":"NixlConnector","kv_role":"kv_both",'
    '"kv_connector_extra_config":{"progress_thread":false,"num_threads":0}}'
)
"""Of decode, which reads.  vLLM has no such option; `PATCH` gives it one."""

PATCH = (
    "s/nixl_agent_config(num_threads=num_threads, capture/nixl_agent_config(enable_prog_thread=vllm_config."
    'kv_transfer_config.get_from_extra_config("progress_thread", True), num_threads=num_threads, capture/'
)
"""For `sed -i` on vLLM 0.22.1's nixl/worker.py."""
EACH = ",".join(map(str, LENGTHS))
UP_TO_8K = ",".join(str(length) for length in LENGTHS if length <= 8192)
PUSHED = ("engine.posting_holds=false", "backend.intra.read_descriptor=0s")
"""Push of vLLM 0.26.0 as it was sealed: no engine waits for posts.  `engine=vllm26_push` knows more."""

CROWDED = ("engine.prefill.launch=0.8ms",)
CROWDED_SGLANG = ("engine.prefill.launch=0.55ms",)
"""Of the model beside the servers of three more pairs: short forwards of single requests took vLLM 30 to 36 ms there
(data/live/blind), 19 to 21 with one pair alone."""
QUIET = ("engine.prefill.launch=0.7ms",)
"""The same in between: vLLM beside three pairs took 21 to 29 ms on the third host (data/live/third)."""
SMALL = 9_000_000_000
NO_WORKERS = NO_THREAD.replace('"progress_thread":false,', "")
"""vLLM's own option: its progress thread stays, and posts without helpers."""
POSTS_ALONE = (
    "backend.intra.descriptor=4.9us", "backend.intra.read_descriptor=0s", "backend.intra.fresh_descriptor=0.9us"
)  # fmt: skip
"""Of the model for `NO_THREAD`: the caller posts all descriptors itself, as fast as it did when first measured."""
ONE_TO_TWO = ("parallel.decode.tp=2", "live.prefill_gpus=[0]", "live.decode_gpus=[0,1]", "live.timeout=25s")
TWO_TO_ONE = ("parallel.prefill.tp=2", "live.prefill_gpus=[0,1]", "live.decode_gpus=[1]", "live.timeout=25s")
UNBALANCED = ("live.environment={SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK:'false'}",)
"""GPUs that other servers use, too."""
SLICED = ("backend.intra.descriptor=4.6us",)
"""Of Mooncake where heads are cut out token by token, posted from GPU 0 by one thread beside SGLang's loop.

`benchmarks.sliced_copies` measured 4.2 to 6.1 us beside a busy thread.  Sealed for the fourth host with 2.85 us."""
SLICED_FAR = ("backend.intra.descriptor=19.5us",)
"""The same from GPU 1, whose copies take 18 to 21 us there whatever posts them."""
SIX = 6_600_000_000
"""Bytes, of which 6.04 GB hold one request of 40,960 tokens."""

PLANS: Mapping[str, Mapping[str, Variant]] = {
    "vllm": {
        "vllm": Variant("vllm", "vllm", 26_000_000_000, ALL, EACH, trace=True),
        "vllm-chunk2k": Variant(
        "vllm", "vllm", 11_000_000_000, f"{TWO},long12k-40", words=("scheduler.chunk=2048",)
    ),
        "vllm-llama": Variant("vllm", "vllm", 12_000_000_000, f"{TWO},mixed1k-45,fixed3k-55", words=LLAMA),
        # 2.9 us a descriptor: 3.2 by 3,427 to 3,820 us, 1,024 descriptors of 16 KiB without and with it
        "vllm-nothread": Variant(
            "vllm", "vllm", 11_000_000_000, TWO, decode=("--kv-transfer-config", NO_THREAD),
            model=("backend.intra.descriptor=2.87us",),
        ),
    },
    "sglang": {
        "sglang": Variant("sglang", "sglang", 176_000 * 147456, ALL, EACH, trace=True),
        "sglang-llama": Variant("sglang", "sglang", 80_000 * 131072, f"{TWO},fixed3k-55", words=LLAMA),
        "vllm26-pull": Variant(
        "vllm", "vllm_push", 11_000_000_000, TWO, words=("live.connector=NixlPullConnector",)
    ),
        "vllm26-push": Variant(
            "vllm", "vllm_push", 11_000_000_000, TWO, words=("live.connector=NixlPushConnector",), model=PUSHED
        ),
    },
    # two plans of four pairs each, 127 GB of a GPU at most
    "again": {
        "vllm": Variant("vllm", "vllm", SMALL, TWO, EACH),
        "vllm-again": Variant("vllm", "vllm", SMALL, TWO),  # what a repeat differs by, in the same hour
        "vllm-page64": Variant("vllm", "vllm", SMALL, TWO, words=("kv.page_size=64",)),
        "vllm-threads0": Variant(
            "vllm", "vllm", SMALL, TWO, decode=("--kv-transfer-config", NO_WORKERS),
            model=("backend.options.num_threads='0'",),
        ),
    },
    "second": {
        "vllm26-pull": Variant("vllm", "vllm_push", SMALL, TWO, words=("live.connector=NixlPullConnector",)),
        "vllm26-push": Variant(
            "vllm", "vllm_push", SMALL, TWO, words=("live.connector=NixlPushConnector",), model=PUSHED
        ),
        # measured only, single requests: vLLM keeps heads first (HND) where the sides differ, so a page stays one
        # descriptor; the model has tokens first, and no two ranks on a GPU
        "vllm26-1to2": Variant("vllm", "vllm_push", SMALL, "none", EACH, words=ONE_TO_TWO, predicted=False),
        "vllm26-2to1": Variant("vllm", "vllm_push", SMALL, "none", EACH, words=TWO_TO_ONE, predicted=False),
    },
    # as many as fit into a quarter of an hour, the start of the servers included
    "third": {
        "vllm": Variant("vllm", "vllm", SMALL, f"{NEW},{TWO},fixed700-35@2", EACH, model=CROWDED, repeat=4),
        "vllm-page64": Variant("vllm", "vllm", SMALL, TWO, words=("kv.page_size=64",), model=CROWDED),
        "vllm-nothread": Variant(
            "vllm", "vllm", SMALL, TWO, decode=("--kv-transfer-config", NO_THREAD), model=(*CROWDED, *POSTS_ALONE)
        ),
        "vllm-1to2": Variant("vllm", "vllm", 6_000_000_000, "none", EACH, words=ONE_TO_TWO, predicted=False),
    },
    "fourth": {
        "sglang": Variant(
            "sglang", "sglang", 176_000 * 147456,
            f"{NEW},fixed4k-60,answers200-35,answers-45,fixed3k-75,fixed1k-30,fixed700-35@2", EACH,
            model=CROWDED_SGLANG, repeat=4,
        ),
        "vllm26-pull": Variant(
            "vllm", "vllm_push", SMALL, TWO, words=("live.connector=NixlPullConnector",), model=CROWDED
        ),
        "vllm26-push": Variant(
            "vllm", "vllm_push", SMALL, TWO, words=("live.connector=NixlPushConnector",), model=(*CROWDED, *PUSHED)
        ),
        "vllm-threads0": Variant(
            "vllm", "vllm", SMALL, TWO, decode=("--kv-transfer-config", NO_WORKERS),
            model=(*CROWDED, "backend.options.num_threads='0'"),
        ),
    },
    # TP between the sides and vLLM, then SGLang and a chunk: 700 s
    "fifth": {
        "vllm-1to2": Variant(
            "vllm", "vllm", SIX, "none", EACH, words=ONE_TO_TWO, model=QUIET, flags=("--rest",), hw="4xh200",
        ),
        "vllm-2to1": Variant(
            "vllm", "vllm", SIX, "none", EACH, words=TWO_TO_ONE, model=QUIET, flags=("--rest",), hw="4xh200",
        ),
        "vllm": Variant(
            "vllm", "vllm", SMALL, f"{FOURTH},mixed3k-70,long12k-40,fixed500-40@2", EACH, model=QUIET, trace=True,
        ),
        "vllm-threads0": Variant(
            "vllm", "vllm", SMALL, "mixed3k-70", decode=("--kv-transfer-config", NO_WORKERS),
            model=(*QUIET, "backend.options.num_threads='0'"),
        ),
    },
    "sixth": {
        "sglang-1to2": Variant(
            "sglang", "sglang", 68_000 * 147456, "none", UP_TO_8K, words=(*ONE_TO_TWO, *UNBALANCED), model=SLICED,
            both=("--disable-custom-all-reduce",), flags=("--rest",), hw="4xh200",
        ),
        "sglang-2to1": Variant(
            "sglang", "sglang", 68_000 * 147456, "none", UP_TO_8K, words=(*TWO_TO_ONE, *UNBALANCED),
            model=SLICED_FAR, both=("--disable-custom-all-reduce",), flags=("--rest",), hw="4xh200",
        ),
        "sglang": Variant(
            "sglang", "sglang", 120_000 * 147456, f"{FOURTH},mixed2k-50,fixed700-35,fixed500-40@2", EACH,
            flags=("--freeze", "--rest"), trace=True,
        ),
        "vllm-chunk2k": Variant(
            "vllm", "vllm", SMALL, "mixed3k-70,long12k-40", "2048,8192", words=("scheduler.chunk=2048",),
            model=QUIET, flags=("--rest",),
        ),
    },
    # what the plans fifth and sixth had no time for, by the predictions that were sealed for them: 320 s; the first
    # load of SGLang, which nothing predicts, is to have every batch size run once
    "rest": {
        "sglang": Variant(
            "sglang", "sglang", 120_000 * 147456,
            f"fixed1k-30,{FOURTH},mixed2k-50,fixed700-35,fixed500-40@2", "128,2048",
            flags=("--freeze", "--rest"), trace=True, predicted=False,
        ),
        "vllm-chunk2k": Variant(
            "vllm", "vllm", SMALL, "mixed3k-70,long12k-40", "2048,8192", words=("scheduler.chunk=2048",),
            flags=("--rest",), predicted=False,
        ),
        "vllm-threads0": Variant(
            "vllm", "vllm", SMALL, "mixed3k-70", decode=("--kv-transfer-config", NO_WORKERS), flags=("--rest",),
            predicted=False,
        ),
    },
    # changes of vLLM 0.22 beside the same without them on one host, sealed for the plans before: 240 s
    "changes": {
        "vllm": Variant(
            "vllm", "vllm", SMALL, "mixed3k-70,long12k-40", "2048", flags=("--rest",), repeat=1, predicted=False,
        ),
        "vllm-chunk2k": Variant(
            "vllm", "vllm", SMALL, "mixed3k-70,long12k-40", "2048", words=("scheduler.chunk=2048",),
            flags=("--rest",), repeat=1, predicted=False,
        ),
        "vllm-threads0": Variant(
            "vllm", "vllm", SMALL, "mixed3k-70", "2048", decode=("--kv-transfer-config", NO_WORKERS),
            flags=("--rest",), repeat=1, predicted=False,
        ),
        "vllm-nothread": Variant(
            "vllm", "vllm", SMALL, "mixed3k-70", "2048", decode=("--kv-transfer-config", NO_THREAD),
            flags=("--rest",), repeat=1, predicted=False,
        ),
    },
    # what a change gains, 300 s more
    "seventh": {
        "vllm26-pull": Variant(
            "vllm", "vllm_push", SMALL, TWO, words=("live.connector=NixlPullConnector",),
            model=("engine=vllm26", *QUIET),
        ),
        "vllm26-push": Variant(
            "vllm", "vllm_push", SMALL, TWO, words=("live.connector=NixlPushConnector",),
            model=("engine=vllm26_push", *QUIET),
        ),
        "vllm-page64": Variant("vllm", "vllm", SMALL, "mixed3k-70", words=("kv.page_size=64",), model=QUIET),
        "vllm-nothread": Variant(
            "vllm", "vllm", SMALL, "mixed3k-70", decode=("--kv-transfer-config", NO_THREAD),
            model=(*QUIET, *POSTS_ALONE),
        ),
    },
}  # fmt: skip
"""Variants by name, in the order in which they are measured."""

CHANGES = {
    "chunk 8192 -> 2048": ("vllm", "vllm-chunk2k"),
    "progress thread on -> off at decode": ("vllm", "vllm-nothread"),
    "pull -> push": ("vllm26-pull", "vllm26-push"),
    "blocks of 16 -> 64": ("vllm-again", "vllm-page64"),  # the same single requests before
    "posting threads 4 -> 0 at decode": ("vllm-again", "vllm-threads0"),
    "blocks of 16 -> 64, other servers": ("vllm", "vllm-page64"),
    "posting threads 4 -> 0, other servers": ("vllm", "vllm-threads0"),
}
"""What a change gains: before and after, of which the loads that both have are compared."""


def command(variant: Variant, folder: Path, limit: float, trace: Path, number: int) -> list[str]:
    """Return the command line that measures *variant* into *folder* in its turn."""
    return [
        *(sys.executable, "-m", "benchmarks.live_campaign", "--engine", variant.engine, "--output", str(folder)),
        *("--turns", str(folder / "turns"), "--limit", f"{limit:.0f}", "--seconds", f"{SECONDS:g}"),
        *("--repeat", str(variant.repeat), "--lengths", variant.lengths, "--loads", variant.loads),
        *(("--trace", str(trace)) if variant.trace else ()),
        *("--trace-count", str(COUNT), "--trace-share", str(SHARE), "--trace-skip", str(SKIP)),
        *(*variant.flags, SEED, f"live.port={PORTS[number]}", *variant.live, *variant.words),
    ]


def run(plan: Mapping[str, Variant], asked: argparse.Namespace) -> int:
    """Start all variants of *plan*, measure one after the other, end them; return how many did not end well."""
    began, sites = time.monotonic(), dict(word.split("=", 1) for word in asked.site)
    processes: dict[str, subprocess.Popen[bytes]] = {}

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {text}", flush=True)

    def left() -> float:
        return float(asked.limit - (time.monotonic() - began))

    def reached(name: str, what: str) -> bool:
        return (asked.output / name / "turns" / what).exists() or processes[name].poll() is not None

    for number, (name, variant) in enumerate(plan.items()):
        folder = asked.output / name
        (folder / "turns").mkdir(parents=True, exist_ok=True)
        line = shlex.join([*command(variant, folder, asked.limit, asked.trace, number), *asked.word])
        if variant.site in sites:
            # and nothing of another engine's
            own = f"export PYTHONPATH=; . {shlex.quote(sites[variant.site])}/env.sh"
            line = f"{own}; export PYTHONPATH=$PYTHONPATH:$LATER; exec {line}"
        with (folder / "campaign.log").open("wb") as log:
            environment = os.environ | {"LATER": asked.python_path}
            processes[name] = subprocess.Popen(["bash", "-c", line], stdout=log, stderr=log, env=environment)
    try:
        _wait(
            lambda: all(reached(name, "ready") for name in plan) and (not asked.hold or asked.hold.exists()),
            asked.ready,
        )
        for name in sorted(plan, key=lambda one: not reached(one, "ready")):  # the slow ones last
            if processes[name].poll() is not None or left() < 30:
                say(f"{name}: not measured, status {processes[name].poll()}, {left():.0f} s are left")
                continue
            for other, before in plan.items():
                rests = before.engine == variant.engine or "--rest" in before.flags  # else SGLang's loops never do
                if not rests and reached(other, "done"):
                    (asked.output / other / "turns" / "end").touch()
            _wait(lambda: all(_rests(asked.output / one, processes[one]) for one in plan), 20.0)
            say(f"{name}: its turn, {'ready' if reached(name, 'ready') else 'not ready'}")
            (asked.output / name / "turns" / "go").touch()
            _wait(lambda: reached(name, "done"), left())  # noqa: B023
            say(f"{name}: {(asked.output / name / 'campaign.log').read_text(errors='replace')[-1500:]}")
    finally:
        for name, process in processes.items():
            (asked.output / name / "turns" / "end").touch()
            if not (asked.output / name / "turns" / "done").exists():
                process.terminate()
        for process in processes.values():
            try:
                process.wait(timeout=40)
            except subprocess.TimeoutExpired:
                process.kill()
    say(f"ended: { {name: process.poll() for name, process in processes.items()} }")
    return sum(bool(process.poll()) for process in processes.values())


def _rests(folder: Path, process: subprocess.Popen[bytes]) -> bool:
    """Return whether nothing of a variant is about to end: it has ended, or has not been told to."""
    return process.poll() is not None or not (folder / "turns" / "end").exists()


def _wait(done: Any, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        time.sleep(0.1)


def predict(plan: Mapping[str, Variant], folder: Path, trace: Path, only: str = "") -> None:
    """Write into *folder* what the model says of each variant of *plan*, and of each engine's by the other's.

    Of *only* that one, if it is named.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plan = {name: variant for name, variant in plan.items() if variant.predicted and only in ("", name)}
    for name, variant in plan.items():
        base = [*GPUS[1:], *_system(variant.engine, variant), *variant.words, *variant.model]
        _write(folder / f"expected-{name}.json", variant.engine, base, _parts(variant, trace, folder), variant.hw)
        if variant.trace:
            other = "sglang" if variant.engine == "vllm" else "vllm"
            words = [*GPUS[1:], *_system(other, variant), *variant.words]
            _write(folder / f"expected-{name}-as-{other}.json", other, words, _parts(variant, trace, folder))
    (folder / "trace.jsonl").unlink(missing_ok=True)
    found = {
        change: changed(*(unseal((folder / f"expected-{name}.json").read_bytes(), name) for name in pair))
        for change, pair in CHANGES.items()
        if set(pair) <= set(plan)
    }
    path = folder / f"expected-changes-{next(iter(plan))}.json"
    path.write_bytes(seal({"changes": found, "commit": commit()}))


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return by load and metric how many times as large a latency is *after*."""
    return {
        load: {
            name: value / before["loads"][load]["metrics"][name]
            for name, value in made["metrics"].items()
            if value and before["loads"][load]["metrics"].get(name)
        }
        for load, made in after["loads"].items()
        if load in before["loads"]
    }


def _system(engine: str, variant: Variant) -> list[str]:
    pool = variant.pool
    return [SEED, *(word for word in SYSTEMS[engine] if not word.startswith("kv.pool=")), f"kv.pool={pool}B"]


def _write(
    path: Path, engine: str, base: Sequence[str], parts: Mapping[str, Sequence[Request]], hw: str = "2xh200"
) -> None:
    words = [word for word in base if not word.startswith("live.")]
    path.write_bytes(seal(told(engine, words, parts, (), hw)))
    print(f"sealed: {path}", flush=True)


def _parts(variant: Variant, trace: Path, folder: Path) -> dict[str, list[Request]]:
    """Return the requests of *variant*, in its order."""
    own = [word for word in (*variant.words, *variant.model) if not word.startswith("live.")]
    base = [f"hw={variant.hw}", *GPUS[1:], SEED, *own]
    context = compose(base).model.context
    found = single_requests([int(one) for one in variant.lengths.split(",")], SINGLE_OUTPUT, variant.repeat, context)
    loads = dict(scaled(variant.loads, SECONDS, 1.0))
    if variant.trace:
        slices = trace_load(trace, folder, COUNT, context, CAPACITY, SHARE, SKIP)
        loads[f"trace-{100 * SHARE:.0f}"] = slices
    for name, words in loads.items():
        config = compose([*base, *words])
        found[name] = list(drawn(config.workload, config.seed, config.model.context))
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Do what *words* say; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("run", "predict"))
    parser.add_argument("plan", choices=sorted(PLANS))
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--trace", type=Path, required=True, help="the conversation trace")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds in all")
    parser.add_argument("--ready", type=float, default=200.0, help="seconds after which those that are ready begin")
    parser.add_argument("--hold", type=Path, help="a file without which nothing is measured before --ready")
    parser.add_argument("--site", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--python-path", default="", help="folders that come after those of a site")
    parser.add_argument("--only", default="", help="predict this variant alone")
    parser.add_argument("--word", action="append", default=[], help="for every campaign, as in --word=--processor")
    asked = parser.parse_args(words)
    plan = PLANS[asked.plan]
    if asked.what == "run":
        return run(plan, asked)
    predict(plan, asked.folder, asked.trace, asked.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
