# SPDX-License-Identifier: Apache-2.0
"""Faults injected into real serving jobs: Mooncake and NIXL over TCP, at random moments that follow from a seed.

    python -m tools.faults_real run --seeds 0:40 [--to data/benchmarks/faults_real.csv]
    python -m tools.faults_real run --seeds 0:4000 --kind leave --loopback --workers 8 --to FILE
    python -m tools.faults_real table [FILE ...]

Each seed is one job of `experiment=serve`.  `draw` makes its requests and faults, `attempt` runs it and checks
how each request and each rank ended, pages, and what is left on the machine; a row of a CSV file holds the counts.
Seeds that a file has are not run again, and the rows of several files add up.  A link takes root.  A job keeps two
or three cores busy.
"""

import argparse
import csv
import ctypes
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from backends.jobs.launcher import Processes
from experiments import serve
from pdsim.config.compose import compose
from pdsim.core.units import format_size
from pdsim.hardware.machine import LinkChange
from pdsim.kv.messages import ROUTER, instance_of
from pdsim.serving.workload import Request
from pdsim.transfer.job import Outcome, RankResult, RankSpec
from tools.tables import markdown

CHECKS = ("violations", "bytes_lost", "leaks", "hangs", "crashes", "leftovers")
"""Counts that must be 0; see `attempt`."""

KINDS = ("SIGKILL", "restart", "SIGSTOP", "SIGCONT", "link cut", "link stalled", "leave")
"""Kinds of faults."""

PAGE = 16
"""Tokens of a page."""

_TOKEN = 32 * 2 * 2 * 64 * 2  # bytes of KV of a token: layers, K and V, heads, elements, bytes of an element
_SHAPES = ((1, 1), (2, 1), (1, 2), (2, 2), (2, 2))  # instances of prefill and of decode

# seconds
DEADLINE = 3.0  # of silence after which a rank counts as gone
TIMEOUT = 4.0  # that a transfer may take
_FIRST, _LAST = 0.6, 4.5  # after the start, between which faults begin; requests arrive all the while
LIMIT = 90.0  # after which a job that has not ended hangs; the longest is over after 25 on an idle machine
LINGER = 2.0  # of rest before the probes, and again before the ranks are stopped
RECOVERY = 30.0  # in which instances that were started again must be connected: a process may take ten
_UNNOTICED = 0.5  # of a pause that cannot make a peer give up, or a transfer time out
_AFTER = 15.0  # in which a fault that is over may still be the reason of a failure: what it held up goes on
PATIENCE = 20.0  # that what a job leaves behind may take to go

_KINDS = ("PeerLost", "TransferTimeout", "TransferFailed")
_UCX = re.compile(r"killed by signal (6|11)\n.*Connection reset by remote peer", re.DOTALL)


@dataclass
class Plan:
    """One job: *prefill* and *decode* instances of one rank each, on *link* or on loopback, and its faults.

    Times are seconds after the start.  *pause* has the times of SIGSTOP and SIGCONT.
    """

    seed: int
    engine: str
    handoff: str
    link: bool
    prefill: int
    decode: int
    requests: list[Request]
    kill: dict[str, float] = field(default_factory=dict)
    restart: dict[str, float] = field(default_factory=dict)
    pause: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    changes: list[LinkChange] = field(default_factory=list)
    leave: dict[str, float] = field(default_factory=dict)  # instances, and when they begin to drain

    @property
    def ranks(self) -> list[str]:
        """The engines' ranks, without the router."""
        return [f"prefill{n}.0" for n in range(self.prefill)] + [f"decode{n}.0" for n in range(self.decode)]

    def injected(self, until: float = inf) -> Counter[str]:
        """Count the faults of each of `KINDS` before the time *until*, at which the job may have ended."""
        moments = [("SIGKILL", at) for at in self.kill.values()] + [("restart", at) for at in self.restart.values()]
        for start, end in (span for times in self.pause.values() for span in times):
            moments += [("SIGSTOP", start), ("SIGCONT", end)]
        moments += [({"cut": "link cut", "stall": "link stalled"}[each.kind], each.start) for each in self.changes]
        moments += [("leave", at) for at in self.leave.values()]
        return Counter(kind for kind, at in moments if at <= until)

    @property
    def expected(self) -> list[str]:
        """The instances that must serve at the end: those that were not lost, or were started again."""
        given_up = [name for name, times in self.pause.items() if max(b - a for a, b in times) >= DEADLINE]
        lost = {name for name in (*self.kill, *given_up) if name not in self.restart}
        return [instance_of(name) for name in self.ranks if name not in lost]

    @property
    def calm(self) -> float:
        """When the last fault is over."""
        ends = [*self.kill.values(), *self.restart.values(), *(change.end for change in self.changes)]
        return max([0.0, *ends, *(end for times in self.pause.values() for _, end in times)])


def draw(seed: int) -> Plan:
    """Return the job of *seed*."""
    chance = np.random.default_rng([18, seed])
    link = bool(chance.random() < 0.25)
    prefill, decode = (1, 1) if link else _SHAPES[chance.integers(len(_SHAPES))]
    plan = Plan(
        seed=seed,
        engine=("mooncake_tcp", "nixl_tcp")[seed % 2],
        handoff="pull" if chance.random() < 0.25 else "push",
        link=link,
        prefill=prefill,
        decode=decode,
        requests=[
            Request(float(at), int(chance.integers(64, 256 if link else 640)), int(chance.integers(1, 6)))
            for at in np.arange(0.2, _LAST + 2.5, 0.2)
        ],
    )
    at = _FIRST
    for _ in range(int(chance.integers(1, 4)) if link else 0):
        at += float(chance.uniform(0.1, 1.2))
        length = float(chance.choice([chance.uniform(0.05, 0.6), chance.uniform(0.6, 2.0)]))
        plan.changes.append(LinkChange(kind=str(chance.choice(["cut", "stall"])), start=at, end=at + length))
        at += length
    ranks = plan.ranks
    if chance.random() < 0.25:
        every = chance.random() < 0.5
        together = [name for name in ranks if every or name[0] == chance.choice(["p", "d"])]
        at, pause = float(chance.uniform(_FIRST, _LAST)), float(chance.uniform(0.2, 1.2))
        plan.kill |= dict.fromkeys(together, at)
        plan.restart |= dict.fromkeys(together, at + pause)
        ranks = [name for name in ranks if name not in together]
    for name in ranks:
        fate = chance.choice(["none", "kill", "restart", "stops", "long stop"], p=[0.1, 0.15, 0.3, 0.3, 0.15])
        _disturb(plan, name, str(fate), chance)
    fate = chance.random()
    if fate < 0.15:
        at = float(chance.uniform(_FIRST, _LAST))
        if fate < 0.03:
            plan.kill[ROUTER] = at
        else:
            plan.pause[ROUTER] = [(at, at + float(chance.uniform(0.05, 0.8)))]
    _have_leave(plan, np.random.default_rng([31, seed]))
    return plan


def _have_leave(plan: Plan, chance: np.random.Generator) -> None:
    # Half of the instances that nothing else disturbs; each joins again when it must have ended, unless it stayed.
    for name in plan.ranks:
        at = float(chance.uniform(_FIRST, _LAST))
        if name not in {*plan.kill, *plan.pause} and chance.random() < 0.5:
            plan.leave[instance_of(name)] = at
            plan.restart[name] = at + 2 * DEADLINE + 1.0


def _disturb(plan: Plan, name: str, fate: str, chance: np.random.Generator) -> None:
    at = float(chance.uniform(_FIRST, _LAST))
    if fate in ("kill", "restart"):
        plan.kill[name] = at
    if fate == "restart":
        plan.restart[name] = at + float(chance.uniform(0.1, 1.5))
    if fate == "stops":
        middle = (_FIRST + _LAST) / 2
        starts = [float(chance.uniform(_FIRST, middle - 0.8)), float(chance.uniform(middle, _LAST))]
        plan.pause[name] = [(start, start + float(chance.uniform(0.02, 0.8))) for start in starts]
    if fate == "long stop":  # its peers give it up meanwhile
        end = at + DEADLINE * float(chance.uniform(1.2, 1.6))
        plan.pause[name] = [(at, end)]
        if chance.random() < 0.5:
            plan.restart[name] = end + 1.0


@dataclass
class JobReport:
    """The outcome of a job: ends of its requests, and failures by `CHECKS`, each with a line in *details*.

    *suspected* counts failures by the silence of a peer that no fault reached: on a busy machine a rank may not get
    the processor for `DEADLINE` seconds.  *engine* counts ranks that the engine ended, as
    ``backends/engines/nixl.py`` says that UCX may.
    """

    ok: int
    failed: int
    nbytes: int
    quarantined: int
    probes: int
    suspected: int
    engine: int
    seconds: float
    injected: Counter[str]
    counts: Counter[str]
    details: list[str]


def attempt(plan: Plan) -> JobReport:
    """Run *plan* and check what `CHECKS` names.

    - *violations*: each request has ended, by a reason that a fault on its own instances, the router or the link
      explains, in its lifetime or shortly before; a probe through every pair of instances that lives succeeds;
    - *bytes_lost*: no request is served with fewer bytes than its pages have, and all bytes that arrived, compared
      with what was computed, are those;
    - *leaks*: the pages of each instance that lives are free or in quarantine, and no room is open without pages
      there;
    - *hangs*: the job has ended within `LIMIT`;
    - *crashes*: a rank ends by what was injected, or because its instance was given up;
    - *leftovers*: no process, file in shared memory, network namespace or descriptor is left.
    """
    before, began = _machine(), time.monotonic()
    target, specs = job(plan)
    outcome = target.run(specs, plan.kill, plan.restart, plan.pause)
    seconds = time.monotonic() - began
    return Check(plan, outcome).report(seconds, _left(before))


def job(plan: Plan) -> tuple[Processes, list[RankSpec]]:
    """Return the target and the ranks of *plan*."""
    config = compose(
        f"target=real hw={'link' if plan.link else 'loopback'} backend={plan.engine} "
        f"parallel.prefill.instances={plan.prefill} parallel.decode.instances={plan.decode} "
        f"engine.handoff={plan.handoff} engine.lease=10s engine.heartbeat=1s "
        f"experiment=serve experiment.deadline={DEADLINE}s experiment.router=round_robin "
        "model.layers=32 model.kv_heads=2 model.head_dim=64 "
        f"kv.pool=80MiB kv.page_size={PAGE} scheduler.chunk=512 compute.scale=0.001".split()
    )
    if plan.link:
        assert config.hw.link is not None
        link = replace(config.hw.link, rate=60e6, changes=tuple(plan.changes))
        config = replace(config, hw=replace(config.hw, link=link))
    what = serve.job(config, serve.ServeOptions.of(config))
    router, *others = serve.specs(config, what, plan.requests)
    program = "experiments.faults.programs:router"
    arguments = {"calm": plan.calm, "linger": LINGER, "expected": plan.expected, "patience": RECOVERY}
    arguments["drains"] = [(instance, at, DEADLINE) for instance, at in plan.leave.items()]
    router = replace(router, program=program, arguments={**router.arguments, **arguments})
    backend = replace(config.backend, timeout=TIMEOUT)
    target = Processes(backend, deadline=LIMIT, device_capacity=1 << 28, link=config.hw.link, nodes=config.hw.nodes)
    return target, [router, *others]


class Check:
    """The checks of one *outcome* of *plan*: `report` makes them, once."""

    def __init__(self, plan: Plan, outcome: Outcome) -> None:
        self._plan = plan
        self._ranks = outcome.ranks
        self._seconds = outcome.seconds
        self._counts: Counter[str] = Counter()
        self._details: list[str] = []
        self._engine = {name for name, rank in outcome.ranks.items() if self._ended_by_engine(name, rank)}
        self._spans = {name: list(self._disturbed(name)) for name in outcome.ranks}
        self._links = [(change.start, change.end + _AFTER) for change in plan.changes]

    def report(self, seconds: float, left: list[str]) -> JobReport:
        """Return the report of a job that took *seconds* and has *left* this on the machine."""
        values = {name: rank.value for name, rank in self._ranks.items() if rank.value is not None}
        lost = {"rows": [["", "", 0, f"PeerLost: {ROUTER}"]] * len(self._plan.requests), "probes": []}
        router = values.get(ROUTER, lost)
        for name, rank in self._ranks.items():
            self._rank(name, rank)
        for name, value in values.items():
            if "pages" in value:
                self._pages(name, value)
        rows: list[list[Any]] = router["rows"]
        never = [[0.0, "", []]]  # it ended with the router
        for number, (row, sent) in enumerate(zip(rows, router.get("histories", [never] * len(rows)), strict=True)):
            self._request(number, row, sent[-1])
        for prefill, decode, status in router["probes"]:
            over = [name for name in (prefill, decode) if self._ranks[f"{name}.0"].error]
            if status != "ok" and not over:
                self._note("violations", f"the probe from {prefill} to {decode}, which live: {status}")
        for what in left:
            self._note("leftovers", what)
        ok = sum(row[3] == "ok" for row in rows)
        return JobReport(
            ok=ok,
            failed=len(rows) - ok,
            nbytes=sum(row[2] for row in rows if row[3] == "ok"),
            quarantined=sum(each.get("quarantined_pages", 0) for each in values.values()),
            probes=sum(status == "ok" for *_, status in router["probes"]),
            suspected=self._counts.pop("suspected", 0),
            engine=len(self._engine),
            seconds=seconds,
            injected=self._plan.injected(self._seconds),
            counts=self._counts,
            details=self._details,
        )

    def _ended_by_engine(self, name: str, rank: RankResult) -> bool:
        reads = self._plan.engine == "nixl_tcp" and self._plan.handoff == "pull" and name.startswith("prefill")
        return reads and any(other[0] == "d" for other in self._plan.kill) and bool(_UCX.match(rank.error))

    def _disturbed(self, name: str) -> Iterator[tuple[float, float]]:
        plan = self._plan
        again = plan.restart.get(name, inf)
        if name in plan.kill:
            yield plan.kill[name], again + _AFTER
        for start, end in plan.pause.get(name, ()):
            if end - start >= _UNNOTICED:
                lost = bool(self._ranks[name].error)  # it was given up meanwhile, and is not back
                yield start, inf if lost else max(end, again if again < inf else end) + _AFTER
        if name in self._engine:
            yield min(at for other, at in plan.kill.items() if other[0] == "d"), inf

    def _reached(self, names: Iterable[str], start: float = 0.0, end: float = inf) -> bool:
        spans = [*self._links, *(span for name in [ROUTER, *names] for span in self._spans[name])]
        return any(first <= end and start <= last for first, last in spans)

    def _note(self, check: str, text: str) -> None:
        self._counts[check] += 1
        self._details.append(f"{check}: {text}"[:300])

    def _rank(self, name: str, rank: RankResult) -> None:
        first = rank.error.partition("\n")[0]
        if not first or name in self._engine or (first.endswith("as was asked for") and name in self._plan.kill):
            return
        named = {f"{instance}.0" for instance in re.findall(r"\b(?:prefill|decode)\d+\b", first)} & set(self._spans)
        if first.startswith(("TransferTimeout: not done", "PeerLost: silent")):
            self._note("hangs", f"{name}: {first}")
        elif not first.startswith("PeerLost: "):
            self._note("crashes", f"{name}: {rank.error}")
        elif not self._reached(named | {name}):
            self._suspect(first, f"{name}: {first}")

    def _suspect(self, reason: str, text: str) -> None:
        silence = any(words in reason for words in ("nothing from", "no ", "given up", "is gone"))
        self._note("suspected" if silence else "violations", text)

    def _pages(self, name: str, value: dict[str, Any]) -> None:
        if value["free_pages"] + value["used_pages"] + value["quarantined_pages"] != value["pages"]:
            self._note("leaks", f"{name}: pages {value}")
        if value["used_pages"] or (value["open_rooms"] and not value["quarantined_pages"]):
            self._note("leaks", f"{name}: {value}")

    def _request(self, number: int, row: list[Any], history: list[Any]) -> None:
        status, (ended, _, tries) = row[3], history
        kind = status.partition(":")[0]
        if status == "ok":
            pages = -(-self._plan.requests[number].input // PAGE)
            unknown = row[2] == 0 and self._reached([f"{row[0]}.0"])  # prefill's account is lost
            if row[2] < pages * PAGE * _TOKEN and not unknown:
                self._note("bytes_lost", f"request {number}: {row[2]} bytes for {pages} pages")
        elif kind == "PeerLost" and ROUTER in self._plan.kill and not ended:
            return
        elif kind.startswith("room "):
            self._note("bytes_lost", f"request {number}: {status}")
        elif kind not in _KINDS:
            self._note("violations", f"request {number}: {status or 'has not ended'}")
        else:
            own = {f"{instance}.0" for *_, prefill, decode in tries for instance in (prefill, decode) if instance}
            missing = re.search(r"no (\w+) instance is left", status)
            if missing:  # all of a side, or one of each pair
                own |= {name for name in self._spans if missing[1] == "connected" or name.startswith(missing[1])}
            if not self._reached(sorted(own), tries[0][0] if tries else ended, ended):
                self._suspect(status, f"request {number}: {status}")


def _machine() -> dict[str, set[str]]:
    shared = Path("/dev/shm")
    tasks = Path("/proc/self/task").iterdir()
    return {
        "process": {child for task in tasks for child in (task / "children").read_text().split()},
        "file in /dev/shm": {path.name for path in shared.iterdir() if not path.name.startswith("sem.mp-")},
        "descriptor": {path.name for path in Path("/proc/self/fd").iterdir() if path.is_symlink()},
    }


def _left(before: dict[str, set[str]]) -> list[str]:
    until = time.monotonic() + PATIENCE
    while True:
        left = [f"{kind} {name}" for kind, names in _machine().items() for name in sorted(names - before[kind])]
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.2)


STORED = Path(__file__).resolve().parent.parent / "data" / "benchmarks" / "faults_real.csv"
NUMBERS = ("ok", "failed", "nbytes", "probes", "quarantined", "suspected", "engine")
_JOB = ("seed", "engine_name", "handoff", "link", "prefill", "decode")
COLUMNS = (*_JOB, *KINDS, "requests", *NUMBERS, *CHECKS, "seconds", "details")


def row(plan: Plan, outcome: JobReport) -> dict[str, object]:
    """Return the row of *plan* and its *outcome* in the file, with `COLUMNS`."""
    return {
        "seed": plan.seed,
        "engine_name": plan.engine,
        "handoff": plan.handoff,
        "link": int(plan.link),
        "prefill": plan.prefill,
        "decode": plan.decode,
        **{kind: outcome.injected[kind] for kind in KINDS},
        "requests": len(plan.requests),
        **{name: getattr(outcome, name) for name in NUMBERS},
        **{check: outcome.counts[check] for check in CHECKS},
        "seconds": round(outcome.seconds, 1),
        "details": " | ".join(outcome.details),
    }


def run(seeds: range, to: Path, kind: str = "", *, loopback: bool = False, workers: int = 1) -> int:
    """Run the jobs of *seeds* that *to* lacks, append their rows, and return how many have a failed check.

    With *kind*, one of `KINDS`, only jobs with such a fault are run; with *loopback*, only those without a link.
    *workers* jobs run at a time.
    """
    done = {int(each["seed"]) for each in read([to])} if to.exists() else set()
    plans = [plan for plan in map(draw, seeds) if plan.seed not in done and not (loopback and plan.link)]
    plans = [plan for plan in plans if not kind or plan.injected()[kind]]
    bad = 0
    with ProcessPoolExecutor(workers, initializer=_end_with, initargs=(os.getpid(),)) as pool:
        for plan, outcome in zip(plans, pool.map(attempt, plans), strict=True):
            new = not to.exists()
            with to.open("a", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                if new:
                    writer.writeheader()
                writer.writerow(row(plan, outcome))
            bad += bool(outcome.counts)
            said = "; ".join(outcome.details) or "clean"
            faults = f"{outcome.injected.total()} faults, {outcome.ok} ok, {outcome.failed} failed"
            print(f"seed {plan.seed}: {faults}: {said}", flush=True)
    return bad


def _end_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: or a worker would wait for jobs for ever
    if os.getppid() != parent:
        os._exit(1)


def read(files: Sequence[Path]) -> list[dict[str, str]]:
    """Return the rows of *files*, each seed once, the last row of it."""
    rows: dict[str, dict[str, str]] = {}
    for path in files:
        with path.open(newline="", encoding="utf-8") as file:
            rows |= {each["seed"]: each for each in csv.DictReader(file)}
    return list(rows.values())


def table(files: Sequence[Path] = (STORED,)) -> Iterator[str]:
    """Yield the lines of the table of docs/reliability.md: a column for each engine."""
    rows = read(files)
    engines = sorted({each["engine_name"] for each in rows})
    sums = {name: Counter[str]() for name in engines}
    for each in rows:
        for key in (*KINDS, "requests", *NUMBERS, *CHECKS):
            sums[each["engine_name"]][key] += int(each.get(key) or 0)  # a file may be older than a kind
        sums[each["engine_name"]]["jobs"] += 1
        sums[each["engine_name"]]["seconds"] += round(float(each["seconds"]))
    columns = [*sums.values(), sum(sums.values(), Counter[str]())]
    checks = ", ".join(check.replace("_", " ") for check in CHECKS)
    lines: dict[str, Callable[[Counter[str]], object]] = {
        "jobs": lambda of: of["jobs"],
        "hours": lambda of: f"{of['seconds'] / 3600:.2f}",
        "**faults injected**": lambda of: sum(of[kind] for kind in KINDS),
        "requests": lambda of: of["requests"],
        "requests served": lambda of: of["ok"],
        "requests failed, explained by a fault": lambda of: of["failed"] - of["suspected"],
        "KV compared": lambda of: format_size(of["nbytes"]),
        "probes served": lambda of: of["probes"],
        "pages in quarantine at the end": lambda of: of["quarantined"],
        f"**{checks}**": lambda of: sum(of[check] for check in CHECKS),
    }
    body = [[name, *map(of, columns)] for name, of in lines.items()]
    yield from markdown(["", *(f"`{name}`" for name in engines), "all"], body)


def main(arguments: Sequence[str]) -> int:
    """Run the command of *arguments*; return 1 if a job has a failed check."""
    parser = argparse.ArgumentParser(prog="python -m tools.faults_real")
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="inject faults, and append what was found to a file")
    running.add_argument("--seeds", required=True, help="FIRST:END, without END")
    running.add_argument("--to", type=Path, default=STORED)
    running.add_argument("--kind", default="", choices=KINDS, help="only jobs with such a fault")
    running.add_argument("--loopback", action="store_true", help="only jobs without a link")
    running.add_argument("--workers", type=int, default=1, help="jobs at a time")
    printing = commands.add_parser("table", help="print the table of files that were written so")
    printing.add_argument("files", type=Path, nargs="*", default=[STORED])
    asked = parser.parse_args(arguments)
    if asked.command == "table":
        print("\n".join(table(asked.files)))
        return 0
    first, _, end = asked.seeds.partition(":")
    seeds = range(int(first), int(end))
    return int(run(seeds, asked.to, asked.kind, loopback=asked.loopback, workers=asked.workers) > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
