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

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path

import pdsim
from benchmarks.fixed_runs import RUNS, SETTINGS
from pdsim.calibration import importers
from pdsim.cli import help as usage
from pdsim.core import plugins
from pdsim.results.kept import KeptRun
from tools.everything_keys import Keys, known_keys
from tools.refit import WHAT

ROOT = Path(__file__).resolve().parents[1]
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
    """Print what the list in *old* has and this tree has not, and the reverse; return how many names are gone."""
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
