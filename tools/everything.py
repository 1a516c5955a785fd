# SPDX-License-Identifier: Apache-2.0
"""List every command, option, choice, key, recipe and entry point that a user has, and run them.

    python -m tools.everything list > tools/everything.txt     # one line each, sorted
    python -m tools.everything compare tools/everything.txt    # what is gone, what is new; fails if anything is gone
    python -m tools.everything run                             # all of it; fails if anything does
    python -m tools.everything run --part keys --of OLD.txt    # the names of another list, on this tree

Names come from the program: commands and options from its help, choices from ``conf/``, keys from the dataclasses
that type the configuration, recipes from the unmarked blocks of commands in README and ``docs/``, entry points from
pyproject.toml.  What a machine lacks a library or a device for is skipped, and said.
"""

import argparse
import copy
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

import pdsim
from benchmarks.fixed_runs import RUNS, SETTINGS
from pdsim.calibration import importers
from pdsim.cli import help as usage
from pdsim.cli.help import parse
from pdsim.config import Config, ExperimentOptions, as_written, compose
from pdsim.config.keys import dataclasses_in, type_of
from pdsim.core import plugins
from pdsim.core.errors import ConfigError
from pdsim.kv.policy import Policy
from pdsim.results.kept import KeptRun
from tools.refit import WHAT

ROOT = Path(__file__).resolve().parents[1]


@cache
def known_keys() -> dict[str, str]:
    """Return every key with its type, as the dataclass has it.

    What stands in a list or a mapping is written ``backend.intra.ramp[].first``.
    """
    keys: dict[str, str] = {}
    _walk(Config, "", keys)
    _walk(Policy, "backend.policy", keys)
    for name in plugins.names(plugins.EXPERIMENTS):
        _walk(ExperimentOptions.class_for({"name": name}), f"experiment({name})", keys)
    return {key: keys[key] for key in sorted(keys)}


def _walk(cls: type, prefix: str, keys: dict[str, str]) -> None:
    hints = typing.get_type_hints(cls)
    for field in fields(cls):
        key = f"{prefix}.{field.name}".lstrip(".")
        below = dataclasses_in(hints[field.name])
        several = str(field.type).startswith(("tuple", "Mapping"))
        if prefix.startswith("experiment"):  # a machine or a model of a report has the keys of hw= and model=
            below = [cls for cls in below if cls.__module__.startswith("experiments.") and cls.__base__ is object]
        if key in ("experiment", "calibration", "policy") or re.search(r"\.sources$|^experiment.*\.name$", key):
            continue  # programs write these; experiments and policies are walked by themselves
        if several or not below:
            keys[key] = type_of(field)
        for each in below:
            _walk(each, f"{key}[]" if several else key, keys)


CONTEXTS = (
    "", "target=real hw=loopback", "hw=2x8xh20 backend=mooncake", "hw=link", "compute=h200_torch hw=8xh200",
    "target=live live.url=[http://localhost:8000]", "workload=poisson", "workload=sessions", "workload=bursty",
    "workload=diurnal",
    "workload=gamma", "model=tiny-hybrid",
    "model=deepseek-v3 parallel=tp8 hw=2x8xh20 scheduler.memory_fraction=0.95",
    "hw=2x8xmi300x backend=mori", "hw=rdma_guest backend=nixl",
    "live.prompts=text", "parallel=tp2 parallel.prefill.pp=2",
    "calibration=mooncake_nvlink-2xh200 hw=2xh200", "cache=vllm engine=vllm backend=nixl", "kv.staging=true",
    "hw=2xh200 backend=nixl", "hw=2xh200 backend=nixl check.plausible=false", "hw=2x8xh200_efa",
    "hw=loopback", "hw=8x8xh200", "hw=8xmi300x backend=mori",
    "hw=2x8xmi300x_cx7 backend=mori", "hw=2x8xh200_efa backend=mooncake_efa", "hw=link backend=nixl_tcp",
    "hw=2xh200 backend=nvlink", "hw=4xh200 backend=nvlink", "hw=4xh200 backend=nixl", "hw=8xh200 backend=nvlink",
    "hw=4xh200", "hw=8xh200", "hw=8xh200 backend=nixl", "hw=2xh200",
    "target=live live.launch=true engine=vllm hw=2xh200 model=qwen3-8b parallel=tp1",
)  # fmt: skip
"""What else is typed with a key: the first with which a value is taken counts."""

GIVEN = {
    "bool": ("true", "false"),
    "int": ("1", "2", "3", "4", "8", "0", "16", "96", "512", "1000", "9000"),
    "float": ("0.5", "0.9", "0.25", "1.5", "2", "3", "0", "1"),
    "Seconds": ("1ms", "2us", "20us", "1s", "2s", "90s", "0s"),
    "Size": ("64MiB", "4KiB", "1MiB", "8GiB", "1GiB", "100GB"),
    "Rate": ("40GB/s", "350GB/s", "3TB/s", "1GB/s", "100MB/s"),
    "Flops": ("100TFLOPS", "200TFLOPS"),
    "Frequency": ("2req/s", "2"),
    "Count": ("1B", "7B", "1000"),
}
OWN = {
    r"workload\.trace": "workload.trace={root}/pdsim/serving/data/conversation_small.jsonl",
    r"engine\.name": "engine.name=sglang_mine",
    r"engine\.version": "engine.version=0.5.23",
    r"launch\.bind": "launch.bind=127.0.0.2",
    r"live\.(url|prefill|decode)": "live.\\1=[http://localhost:8001]",
    r"backend\.vendors": "backend.vendors=[nvidia,amd]",
    r"hw\.guest": "hw.guest=false",
    r"(backend\.\w+)\.ramp.*": "\\1.ramp=[{first:1,extra:1us}]",
    r"(backend\.\w+)\.small\..*": "\\1.small={bytes:1KiB,descriptors:3,saving:1us}",
    r"(backend\.\w+)\.workers\..*": "\\1.workers={threads:3,least:5}",
    r"(backend\.\w+)\.by_option.*": "\\1.by_option=[{options:{progress_thread:'false',num_threads:'0'},"
    "evidence:'published: x',latency:1us,descriptor:1us,rate:0.9,workers:{threads:3,least:5},"
    "intervals:{latency:['1us','2us']},errors:{mean:0.1,median:0.1,p95:0.2}}]",
    r"(collective\.\w+)\.device.*": "\\1.device=[{latency:1us,rate:1GB/s}]",
    r"compute\.kernels\.allreduce.*": "compute.kernels.allreduce={2:{latency:1us,rate:1GB/s}}",
    r"compute\.kernels\.shapes.*": "compute.kernels.shapes={1x2:{tokens:[1],factor:[1.5]}}",
    r"hw\.link\.changes.*": "hw.link.changes=[{kind:slow,start:1s,end:2s,share:0.5,hop:0}]",
    r"workload\.tenants.*": "workload.tenants=[{name:chat,rate:3,ttft:1s,tpot:20ms,input_mean:100,input_cv:0.5,"
    "output_mean:10,output_cv:0.3,priority:1}]",
    r"experiment\(seed_nixl_staging\)\.experts": "experiment.experts.context=9000",
    r"experiment\(seed_nixl_staging\)\.tp": "experiment.tp=[2to1]",
    r"experiment\(\w+\)\.tp": "experiment.tp=[1to1]",
    r"experiment\(transfer\)\.placement": "experiment.placement=[spread]",
    r"model\.kv_dtype": "model.kv_dtype=fp16",
    r"parallel\.decode\.cp": "parallel.decode.cp=1",
    r"experiment\(compare_engines\)\.backends": "experiment.backends.nixl.timeout=3s",
    r"experiment\(compare_engines\)\.engines": "experiment.engines.vllm.proxy=3s",
    r"experiment\(report_figures\)\.backends": "experiment.backends.nixl.timeout=3s",
    r"experiment\(report_figures\)\.machines": "experiment.machines={}",
    r"experiment\(report_figures\)\.models": "experiment.models={}",
    r"experiment\(report_figures\)\.sglang": "experiment.sglang.proxy=3s",
    r"experiment\(seed_mooncake_tcp\)\.tcp": "experiment.tcp.timeout=3s",
    r"experiment\(seed_mori_state\)\.served": "experiment.served.context=9000",
    r"experiment\(seed_mori_state\)\.states": "experiment.states.mamba.context=9000",
}
"""Overrides for keys that have nothing in common with others of their type, by pattern."""

SEEN_IN = {"host_factor": "backend", "draw_host": "backend", "engine.host_factor": "engine.proxy"}
"""Where the effect of a key is, if it is not kept itself."""

ONE_VALUE = {"parallel.decode.cp"}
"""Keys that take their default alone."""


class Keys:
    """Sets one key at a time in what Hydra composed, types and checks it, as ``run KEY=VALUE --cfg job`` does."""

    def __init__(self) -> None:
        self._composed: dict[str, tuple[dict[str, Any], Any] | None] = {}
        self.said = ""  # to the last context that cannot be run

    def failure(self, name: str) -> str:
        """Return "" if the key *name* accepts another value than its own, else the message of the last refusal."""
        experiment = re.match(r"experiment\((\w+)\)", name)
        own = f"experiment={experiment[1]} " if experiment else ""
        said = "no context has it"
        for context in CONTEXTS:
            values, base = self._base(own + context) or ({}, {})
            words = _words(name) if base else []
            for word in words:  # which grows: a refusal may name the values that there are
                said = self._try(name, word, [*own.split(), *context.split()], values, base)
                if not said:
                    return ""
                known = re.search(
                    r"(?:must be one of|must be of|must be|there are) ([\w', -]+?)(?: for .*)?(?:, got|; |$)", said
                )
                key, _, value = word.partition("=")
                if known and "mine" in value:
                    words += [
                        f"{key}={value.replace('mine', each)}"
                        for each in known[1].replace("'", "").replace(" or ", ", ").split(", ")
                        if each
                    ]
        return said

    def _try(self, name: str, word: str, context: Sequence[str], values: dict[str, Any], base: Any) -> str:
        key, _, inner = re.sub(r"\(\w+\)", "", name).partition("[].")
        at, _, value = word.partition("=")
        changed = copy.deepcopy(values)
        try:
            _set(changed, at, OverridesParser.create().parse_override(f"++{word}").value())
            config = as_written(compose.load(changed, [*context, word]))
        except (ConfigError, HydraException) as error:
            return f"{word}: {error}"
        seen = SEEN_IN.get(key, key)
        if (_at(config, seen) == _at(base, seen) and key not in ONE_VALUE) or inner.rpartition(".")[2] not in value:
            return f"{word}: changes nothing"
        return ""

    def choice(self, word: str) -> str:
        """Return "" if *word*, the choice of a group, composes with some context, else the last refusal."""
        group = word.partition("=")[0]
        fitting = (context for context in CONTEXTS if f"{group}=" not in context)
        return "" if any(self._base(f"{context} {word}".strip()) for context in fitting) else self.said

    def _base(self, context: str) -> tuple[dict[str, Any], Any] | None:
        if context not in self._composed:
            rest, options = parse("run", context.split())
            line = compose.CommandLine.of(rest, options)
            try:
                with compose.initialized(line):
                    values = compose.plain(line, line.words)
                    self._composed[context] = values, as_written(compose.load(values, line.words))
            except Exception as error:  # what does not go together
                self._composed[context], self.said = None, str(error)
        return self._composed[context]


def _words(name: str) -> list[str]:
    for pattern, word in OWN.items():
        if match := re.fullmatch(pattern, name):
            return [match.expand(word).replace("{root}", str(ROOT))]
    key = re.sub(r"\(\w+\)", "", name)
    kind = known_keys()[name]
    if kind.startswith("Mapping"):
        return [f"{key}={{{of}:{value}}}" for of in ("a", "mine") for value in ("b", "0.5")]
    depth = kind.count("tuple[")
    element = (re.search(r"(\w+)(?:, \.\.\.)?\]", kind) or re.match(r"(\w+)", kind) or [""])[1]
    return [f"{key}={'[' * depth}{value}{']' * depth}" for value in GIVEN.get(element, ("mine",))]


def _at(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values.get(part) if isinstance(values, Mapping) else None
    return values


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    *parts, last = key.split(".")
    for part in parts:
        if not isinstance(values.get(part), dict):
            values[part] = {}
        values = values[part]
    values[last] = value


DEADLINE = 300.0  # seconds of one command
FORMS = ("svg", "pdf", "png")  # of figures
FOREIGN = {"--save-detailed", "--tensor-parallel-size"}
"""Options of other programs that the help names."""


def verbs() -> Iterator[str]:
    """Yield the commands."""
    yield from (f"verb {verb}" for verb in usage.COMMANDS)


def options() -> Iterator[str]:
    """Yield the options of each command, and the words that take their place."""
    for verb in usage.COMMANDS:
        flags = set(re.findall(r"(?<![\w=/-])--?[a-z][a-z-]*\b", usage.of(verb))) - FOREIGN
        yield from (f"option {verb} {flag}" for flag in {*flags, "--help"})
    yield from (f"option refit {what}" for what in WHAT)
    yield from (f"option calibrate --format={name}" for name in importers.FORMATS)
    yield from (f"option report --format={form}" for form in FORMS)


def choices() -> Iterator[str]:
    """Yield the choices of every configuration group."""
    yield from (f"choice {group}={name}" for group in plugins.groups() for name in plugins.options(group))
    yield from (f"choice experiment/on={path.stem}" for path in (ROOT / "conf/experiment/on").glob("*.yaml"))


def keys() -> Iterator[str]:
    """Yield the configuration keys; those of an experiment are written ``experiment(NAME).KEY``."""
    yield from (f"key {key}" for key in known_keys())


def recipes() -> Iterator[str]:
    """Yield the commands of README and ``docs/`` in blocks without a mark, numbered within their page."""
    for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))):
        text = page.read_text("utf-8")
        blocks = re.findall(r"(^<!-- [^\n]* -->\n)?^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        lines = "".join(text for mark, text in blocks if not mark).replace("\\\n", " ").splitlines()
        typed = (re.sub(r"\s+# .*", "", line).strip() for line in lines)
        for number, line in enumerate((line for line in typed if line), 1):
            yield f"recipe {page.relative_to(ROOT)} {number:02} {line}"


def python() -> Iterator[str]:
    """Yield the entry points, and the names of the Python interface."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for group, names in project["entry-points"].items():
        yield from (f"entry {group} {name}" for name in names)
    yield from (f"entry console {name}" for name in project["scripts"])
    yield from (f"python pdsim.{name}" for name in pdsim.__all__)
    yield from (f"python KeptRun.{name}" for name in vars(KeptRun) if not name.startswith("_"))


PARTS: dict[str, Callable[[], Iterator[str]]] = {
    "verbs": verbs, "options": options, "choices": choices, "keys": keys, "recipes": recipes, "python": python,
}  # fmt: skip


def listed() -> list[str]:
    """Return the lines of the list, sorted."""
    return sorted({line for part in PARTS.values() for line in part()})


def part_of(line: str) -> str:
    """Return the part that *line* of a list belongs to."""
    kind = line.partition(" ")[0]
    return {"entry": "python", "recipe": "recipes"}.get(kind, kind if kind == "python" else f"{kind}s")


def compare(old: Path) -> int:
    """Print the names that are only in *old*, and only in this tree; return the number of those gone."""
    before, now = set(old.read_text("utf-8").splitlines()), set(listed())
    gone = sorted(before - now)
    for word, lines in (("gone", gone), ("new", sorted(now - before))):
        print("".join(f"{word}: {line}\n" for line in lines), end="")
    print(f"{len(before)} names before, {len(now)} now, {len(gone)} gone")
    return len(gone)


SMOKE = "hw=8xh20 workload=smoke"
COMMANDS = {
    "run": f"run {SMOKE}",
    "sweep": f"sweep {SMOKE} seed=0,1",
    "best": "best sweep/*",
    "explain": "explain one/*",
    "report": "report one/*",
    "timeline": "timeline one/*",
    "show": "show one/*",
    "compare": "compare one/* two/*",
    "calibrate": "calibrate --from data/calibration/cx7-write.csv hw=2x8xmi300x_cx7",
    "probe": "probe backend=nixl_shm --minutes 2",
    "refit": "refit published cx7-write",
    "profile": "profile --from data/compute/h200_torch.csv.gz hw=8xh200",
    "validate": "validate experiment.predict=only hw=2xh200 experiment.classes=[pair] experiment.repeat=2",
    "observe": "observe result.json hw=2xh200 backend=nixl model=qwen3-8b engine=vllm",
    "diagnose": "diagnose data/calibration/nixl-2xh200.csv hw=2xh200 backend=nixl",
    "list": "list",
    "doctor": "doctor",
    "completion": "completion",
}
"""A command line of each command, in a folder with two runs and a sweep."""

WITH = {
    "--cfg": "--cfg job", "--config-dir": "--config-dir conf", "--slo": "--slo ttft=2s,tpot=30ms",
    "--request": "--request 1 --fast", "--figure": "--figure latency", "-o": "-o out", "--held": "--held 2",
    "--jobs": "--jobs 2", "--largest": "--largest 1MiB", "--name": "--name mine", "--path": "--path inter",
    "--repeat": "--repeat 2", "--to": "--to made", "--seeds": "--seeds 2", "--zip": "--zip seed,workload.rate",
    "--tables": "--tables sglang:0.5.10", "--compact": "--compact h200_torch",
    "--search": "--search optuna --trials 2", "--trials": "--search optuna --trials 2",
    "--maximize": "--search optuna --trials 2 --maximize goodput",
    "--minimize": "--search optuna --trials 2 --minimize ttft_p50_s",
}  # fmt: skip
"""What is typed for an option that takes a value."""

INSTEAD = {
    "report --format": "report one/* --figure latency --format svg",
    "timeline -o": "timeline one/* -o out.json",
    "sweep --seeds": f"sweep {SMOKE} --seeds 2",
    "sweep --zip": f"sweep {SMOKE} seed=0,1 workload.rate=1,2 --zip seed,workload.rate",
    "validate --cfg": "validate --cfg job",
    "observe --format": "observe result.json --format vllm-bench hw=2xh200 backend=nixl model=qwen3-8b engine=vllm",
    "observe --from": COMMANDS["calibrate"],
    "calibrate --from": COMMANDS["calibrate"],
    "diagnose --format": f"{COMMANDS['diagnose']} --format samples",
    "diagnose --path": f"{COMMANDS['diagnose']} --path intra",
    "diagnose --config-dir": f"{COMMANDS['diagnose']} --config-dir conf",
    "calibrate --format": "calibrate --from data/calibration/nixl-2xh200.csv --format samples hw=2xh200 "
    "backend=nixl",
    "calibrate --no-fit": "calibrate hw=2xh200 backend=nvlink --quick --largest 64KiB --held 2 --no-fit",
    "calibrate --config-dir": f"{COMMANDS['calibrate']} --config-dir conf",
    "probe --minutes": COMMANDS["probe"],
    "profile --from": COMMANDS["profile"],
    "profile --config-dir": f"{COMMANDS['profile']} --config-dir conf",
    **{f"report --format={form}": f"report one/* --figure latency --format {form}" for form in FORMS},
    **{f"profile {flag}": "profile --device cpu --limit 100s --gpus 1 --models tiny:1,tiny-mla:1 hw=loopback"
       for flag in ("--device", "--gpus", "--limit", "--models")},
}  # fmt: skip
"""Whole command lines of options that do not go with the line of their command."""

TABLE = "# source: p5en 8xH200, threads 16 batch 128\nblock_bytes,write_gbs,read_gbs\n65536,97.11,96.87\n"
VLLM = (
    "KV Transfer metrics: Num successful transfers=26, Avg xfer time (ms)=142.053, P90 xfer time (ms)=147.35, "
    "Avg post time (ms)=122.056, P90 post time (ms)=124.547, Avg MB per transfer=1152.0, "
    "Throughput (MB/s)=8109.667, Avg number of descriptors=36864.0\n"
)
"""What tools have printed whose outputs are not in ``tests/calibration/outputs``."""

SERVE = f"run {SMOKE} model=llama-3.1-8b parallel=tp1"
ENTRIES = {
    "pdsim.routers": "{serve} parallel.prefill.instances=2 experiment.router={name}",
    "pdsim.schedulers": "{serve} engine.scheduler={name}",
    "pdsim.handoffs": "{serve} engine=generic engine.handoff={name} backend=nixl",
    "pdsim.executors": "sweep {smoke} seed=0,1 executor={name} executor.workers=2{more} output=of-{name}",
    "console": "--version",
}
"""A command line that uses each entry point of a group; what is loaded by itself is not here."""

EXPERIMENTS = {
    "capacity": "hw=8xh20 experiment.requests=100 experiment.finalists=1 experiment.final_requests=100 "
    "experiment.prefill_tp=[4] experiment.decode_tp=[4] experiment.instances=[1] experiment.processes=1",
    "compare_engines": SMOKE,
    "report_figures": "experiment.only=[9149]",
    "validate_live": "target=live live.url=[http://localhost:8000] --cfg job",
}
REAL = "run target=real hw=loopback experiment=transfer experiment.patterns=[pair] experiment.size=[64KiB] "
REAL_ENTRIES = {
    "pdsim.backends mooncake": REAL + "backend=mooncake_tcp",
    "pdsim.backends nixl": REAL + "backend=nixl_tcp",
    "pdsim.collectives gloo": "run target=real hw=loopback experiment=allgather collective=gloo "
    "experiment.ranks=[2] experiment.size=[64KiB] experiment.repeat=2",
}
LACKING = re.compile(
    r"pip install|needs (PyTorch|torch|scipy|a GPU|--from DIR)|is not installed|no PyTorch"
    r"|No module named '(?!pdsim|backends|experiments)"
)
"""What says that this machine lacks a library or a device: such a name is skipped."""


class Bench:
    """A folder with two runs, a sweep and a log, in which names are run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.keys = folder, Keys()
        for name in ("conf", "data", SETTINGS.parts[0], "tests"):
            (folder / name).symlink_to(ROOT / name)
        times = {"start_times": [0.5, 0.0], "input_lens": [20, 10], "output_lens": [3, 2], "ttfts": [0.25, 0.5]}
        (folder / "result.json").write_text(json.dumps(times | {"itls": [[0.1, 0.1], [0.2]], "errors": ["", ""]}))
        self.said: dict[str, str] = {}
        for command in (
            f"run {SMOKE} output=one",
            f"run {SMOKE} output=two seed=1",
            f"sweep {SMOKE} seed=0,1 output=sweep",
        ):
            if said := self.typed(command):
                raise SystemExit(f"everything: pdsim {command}: {said}")

    def failure(self, line: str) -> str:
        """Run what *line* of the list names; return "" or what was said, "skipped: ..." where something lacks."""
        kind, _, name = line.partition(" ")
        if kind == "key":
            return self.keys.failure(name) if name in known_keys() else "there is no such key"
        if kind == "choice" and not name.startswith("executor="):
            return self.keys.choice(_choice(name))
        return str(getattr(self, f"_{kind}")(name))

    def typed(self, words: str) -> str:
        """Return "" if ``pdsim`` with *words* ends well, else what it said."""
        return self.shell(f"python -m pdsim {words}")

    def shell(self, text: str) -> str:
        """Return "" if the shell command *text* ends well, else the end of what it said; each is run once."""
        if text not in self.said:
            self.said[text] = self._shell(text)
        return self.said[text]

    def _shell(self, text: str) -> str:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
        try:
            ended = subprocess.run(
                ["bash", "-euc", text], cwd=self.folder, env=environment, capture_output=True, text=True,
                timeout=DEADLINE, check=False, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"did not end within {DEADLINE:g} s: {text}"
        said = (ended.stderr or ended.stdout).strip()[-400:]
        if not ended.returncode:
            return ""
        return f"{'skipped: ' if LACKING.search(said) else ''}{text}: {said}"

    def _choice(self, name: str) -> str:
        return self._entry(f"pdsim.executors {name.partition('=')[2]}")

    def _verb(self, name: str) -> str:
        return self.typed(f"help {name}") or self.typed(f"{name} --help") or self.typed(COMMANDS[name])

    def _option(self, name: str) -> str:
        verb, _, flag = name.partition(" ")
        if name.startswith("calibrate --format="):
            tool = flag.partition("=")[2]
            file = ROOT / f"tests/calibration/outputs/{tool.replace('-', '_')}.txt"
            if tool == "samples":  # its own, which the command reads
                return self.typed(
                    "calibrate --from data/calibration/nixl-2xh200.csv --name again hw=2xh200 backend=nixl"
                )
            if not file.exists():
                file = self.folder / "printed"
                file.write_text({"table": TABLE, "vllm": VLLM}[tool])
            return "" if len(importers.read(file, tool).rows) else f"{file}: nothing was read"
        if verb == "refit" and not flag.startswith("-"):
            return self.typed(f"refit {flag}")
        return self.typed(INSTEAD.get(name, f"{COMMANDS[verb]} {WITH.get(flag, flag)}"))

    def _recipe(self, name: str) -> str:
        page, _, command = name.split(" ", 2)
        return self.shell(f"mkdir -p {page}; cd {page}; ln -sfn {ROOT}/conf {ROOT}/data .; {command}")

    def _entry(self, name: str) -> str:
        group, _, own = name.partition(" ")
        if group in ENTRIES:
            more = " executor.cluster=local" if own == "slurm" else ""
            return self.typed(ENTRIES[group].format(name=own, smoke=SMOKE, serve=SERVE, more=more))
        if group == "pdsim.experiments":
            fixed = next(
                (r.overrides for r in RUNS.values() if f"experiment={own} " in r.overrides + " " and not r.only), ""
            )
            small = EXPERIMENTS.get(own) or f"--config-dir {SETTINGS} {fixed}"
            return self.typed(f"run {small} experiment={own}" if own in EXPERIMENTS else f"run {small}")
        project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
        EntryPoint(own, project["entry-points"][group][own], group).load()
        return self.typed(REAL_ENTRIES[name]) if name in REAL_ENTRIES else ""

    def _python(self, name: str) -> str:
        owner, _, attribute = name.partition(".")
        run = pdsim.load(next((self.folder / "one").iterdir()))
        if name == "pdsim.simulate":
            return "" if pdsim.simulate(*SMOKE.split(), output=str(self.folder / "three")).metrics else "no metrics"
        getattr(pdsim if owner == "pdsim" else run, attribute)
        return ""


def _choice(name: str) -> str:
    group, _, option = name.partition("=")
    if group != "experiment/on":
        return name
    experiment, _, machine = option.partition("-")
    return f"experiment={experiment} hw={machine}{' target=real' if machine == 'loopback' else ''}"


def run(lines: Sequence[str]) -> int:
    """Run the names in *lines*, print those that fail or are skipped, and return how many fail."""
    counts: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="everything-") as folder:
        bench = Bench(Path(folder))
        for line in lines:
            began = time.monotonic()
            try:
                said = bench.failure(line)
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
            count = counts.setdefault(part_of(line), [0, 0, 0, 0.0])
            count[0 if not said else 1 if said.startswith("skipped") else 2] += 1
            count[3] += time.monotonic() - began
            if said:
                print(f"{line}\n    {'' if said.startswith('skipped') else 'FAILED: '}{said}", flush=True)
    for part, (well, skipped, failed, seconds) in counts.items():
        print(f"{part}: {well:g} run, {skipped:g} skipped, {failed:g} failed, {seconds:.0f} s")
    return int(sum(count[2] for count in counts.values()))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.everything", description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("list", "run", "compare"))
    parser.add_argument("old", nargs="?", type=Path, help="compare: a list of another tree")
    parser.add_argument("--part", choices=PARTS, help="this part alone")
    parser.add_argument("--of", type=Path, help="run: the names of this list, instead of this tree's")
    options = parser.parse_args(argv)
    lines = options.of.read_text("utf-8").splitlines() if options.of else listed()
    lines = [line for line in lines if options.part in (None, part_of(line))]
    if options.command == "list":
        print("\n".join(lines))
        return 0
    if options.command == "compare":
        return 1 if compare(options.old or ROOT / "tools" / "everything.txt") else 0
    return 1 if run(lines) else 0


if __name__ == "__main__":
    sys.exit(main())
