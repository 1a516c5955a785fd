# SPDX-License-Identifier: Apache-2.0
"""Measure what the tests of the protocol, the schedulers and the model notice: break one statement, run the tests.

A *mutant* is the source with one small change (`sites`).  It is *killed* if a test fails or hangs, and it
*survives* if all pass: an assertion is missing, or the change makes no difference.

    python -m tools.mutation cover                            # which test runs which line; takes minutes
    python -m tools.mutation draw --seed 0 --count 260        # the mutants, equal for equal seed and source
    python -m tools.mutation run                              # try each; goes on where it was interrupted
    python -m tools.mutation report --save RECORD.json        # table, survivors; keep the outcome
    python -m tools.mutation again RECORD.json                # the same mutants in a later state of the source

Intermediate files lie in `results/mutation` (see `--folder`).  Mutants are applied to a private copy of the tree,
never to the checkout.  `again` finds a mutant by its statement without receivers, also in another function or file;
else it is ``gone``.  Five operators make mutants; what speaks to people (log lines, texts of errors, `__repr__`) is
left alone:

- *condition*: a comparison or a test is turned round, moved to its boundary, or has `and` and `or` exchanged
- *drop call*: a statement that calls something does nothing
- *skip release*: the same, of a call that gives something back (free, release, close, settle ...)
- *off by one*: a small number, a length or the end of a range is one too high
- *reorder*: two adjacent statements that call change places
"""

import argparse
import ast
import contextlib
import functools
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
OPERATORS = ("condition", "drop call", "off by one", "reorder", "skip release")
RELEASE = re.compile(
    "free|release|close|settle|cancel|discard|remove|clear|abort|withdraw|unregister|quiesce|expire"
)
SPEECH = {"log", "logger", "logging", "warnings", "print"}
SILENT = {"__repr__", "__str__", "__del__"}
SWAPS: dict[type[ast.AST], type[Any]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


@dataclass
class Mutant:
    """A change of one statement, and what became of it."""

    file: str
    function: str  # with the names of its classes
    operator: str
    statement: str  # of a compound statement the first line
    occurrence: int  # among equal statements of the function
    site: int  # among the sites of this operator in the statement
    replacement: str
    outcome: str = ""  # killed, timeout, survived, gone, unreached, error
    by: str = ""  # the test that failed

    @property
    def room(self) -> str:
        """The folder that holds its file: one of `ROOMS`, or another one that took the statement over."""
        return "/".join(self.file.split("/")[:2])

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells it from all other mutants of one state of the source."""
        return self.file, self.function, self.operator, self.statement, self.occurrence, self.site


@dataclass
class Site(Mutant):
    """A mutant of the source as it is, with the lines of the statement and the change itself."""

    lines: range = range(0)
    apply: Callable[[], None] = field(default=lambda: None, repr=False)

    def mutant(self) -> Mutant:
        """Return what is kept of it."""
        return Mutant(*(getattr(self, name) for name in Mutant.__dataclass_fields__))


def sites(file: str, source: str) -> tuple[ast.Module, list[Site]]:
    """Return the tree of *source*, and every change of it that an operator makes."""
    tree = ast.parse(source)
    result: list[Site] = []
    for function, node in _functions(tree, ""):
        seen: Counter[str] = Counter()
        for body, index in _places(node.body):
            statement = body[index]
            text = _text(statement)
            numbers: Counter[str] = Counter()
            for operator, shown, replacement, apply in _changes(body, index):
                whole = shown or text
                result.append(
                    Site(
                        file, function, operator, whole, seen[text], numbers[operator], replacement,
                        lines=_lines(statement), apply=apply,
                    )
                )  # fmt: skip
                numbers[operator] += 1
            seen[text] += 1
    return tree, result


def _functions(node: ast.AST, name: str) -> Iterator[tuple[str, Any]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{name}.{child.name}".lstrip(".")
            if not isinstance(child, ast.ClassDef) and child.name not in SILENT:
                yield inner, child
            yield from _functions(child, inner)
        elif isinstance(child, ast.stmt):
            yield from _functions(child, name)


def _places(body: list[ast.stmt]) -> Iterator[tuple[list[ast.stmt], int]]:
    for index, statement in enumerate(body):
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        yield body, index
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            continue
        for name in ("body", "orelse", "finalbody"):
            yield from _places(getattr(statement, name, []))
        for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
            yield from _places(part.body)


def _text(statement: ast.stmt) -> str:
    return ast.unparse(statement).partition("\n")[0]


def _lines(statement: ast.stmt) -> range:
    body = getattr(statement, "body", None) or getattr(statement, "cases", None)
    end = (getattr(body[0], "lineno", 0) or statement.lineno + 1) if body else (statement.end_lineno or 0) + 1
    return range(statement.lineno, max(end, statement.lineno + 1))


def _changes(body: list[ast.stmt], index: int) -> Iterator[tuple[str, str, str, Callable[[], None]]]:
    statement = body[index]
    call = _call(statement)
    if isinstance(statement, ast.Raise | ast.Assert) or _root(call) in SPEECH:
        return
    if isinstance(statement, ast.Expr) and call is not None:
        simple = isinstance(statement.value, ast.Call)
        nothing = ast.Pass() if simple else ast.parse("yield from ()").body[0]
        kind = "skip release" if RELEASE.search(_name(call)) else "drop call"
        yield kind, "", _text(nothing), functools.partial(body.__setitem__, index, nothing)
    if index + 1 < len(body) and call is not None and _acts(statement) and _acts(second := body[index + 1]):
        one, two = _text(statement), _text(second)
        if one != two and _call(second) is not None and _root(_call(second)) not in SPEECH:
            pair = [second, statement]
            swap = functools.partial(body.__setitem__, slice(index, index + 2), pair)
            yield "reorder", f"{one} ; {two}", f"{two} ; {one}", swap
    for parent, name, place, node in _expressions(statement):
        yield from _expression_changes(parent, name, place, node)


def _call(statement: ast.stmt) -> ast.Call | None:
    value = getattr(statement, "value", None)
    if isinstance(value, ast.Yield | ast.YieldFrom | ast.Await):
        value = value.value
    return value if isinstance(value, ast.Call) else None


def _name(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def _root(call: ast.Call | None) -> str:
    return "" if call is None else ast.unparse(call.func).partition(".")[0]


def _acts(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Assign):
        return isinstance(statement.targets[0], ast.Attribute | ast.Subscript)
    return isinstance(statement, ast.Expr)


def _expressions(node: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, ast.expr]]:
    for name, value in ast.iter_fields(node):
        for place, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.comprehension | ast.keyword | ast.withitem):
                yield from _expressions(child)
            elif isinstance(child, ast.expr) and not isinstance(child, ast.JoinedStr) and name != "annotation":
                yield node, name, place, child
                yield from _expressions(child)


def _expression_changes(
    parent: ast.AST, name: str, place: int | None, node: ast.expr
) -> Iterator[tuple[str, str, str, Callable[[], None]]]:
    def put(new: ast.expr) -> Callable[[], None]:
        if place is None:
            return functools.partial(setattr, parent, name, new)
        return functools.partial(getattr(parent, name).__setitem__, place, new)

    new: ast.expr
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        new = ast.Compare(node.left, [SWAPS[type(node.ops[0])]()], node.comparators)
        yield "condition", "", ast.unparse(new), put(new)
    elif isinstance(node, ast.BoolOp):
        new = ast.BoolOp(SWAPS[type(node.op)](), node.values)
        yield "condition", "", ast.unparse(new), put(new)
    elif name == "ifs" or (name == "test" and isinstance(parent, ast.If | ast.IfExp)):
        new = node.operand if isinstance(node, ast.UnaryOp) else ast.UnaryOp(ast.Not(), node)
        yield "condition", "", ast.unparse(new), put(new)
    elif isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) <= 8:
        new = ast.Constant(node.value + 1)
        yield "off by one", "", ast.unparse(new), put(new)
    elif isinstance(node, ast.Call) and _name(node) in ("range", "len") and node.args:
        more = ast.BinOp(node if _name(node) == "len" else node.args[-1], ast.Add(), ast.Constant(1))
        new = more if _name(node) == "len" else ast.Call(node.func, [*node.args[:-1], more], node.keywords)
        yield "off by one", "", ast.unparse(new), put(new)


def everything(rooms: tuple[str, ...]) -> list[Site]:
    """Return the sites of all files of *rooms*."""
    files = sorted(path for room in rooms for path in (ROOT / room).rglob("*.py"))
    return [site for p in files for site in sites(p.relative_to(ROOT).as_posix(), p.read_text(encoding="utf-8"))[1]]


def locate(mutant: Mutant, candidates: list[Site]) -> Site | None:
    """Return the site of *mutant* among the *candidates*, the likeliest with its statement; None if that is gone."""

    def likeness(site: Site) -> tuple[bool, bool, bool, bool]:
        same_name = site.function.rpartition(".")[2] == mutant.function.rpartition(".")[2]
        return site.key == mutant.key, site.file == mutant.file, same_name, site.occurrence == mutant.occurrence

    def what(one: Mutant) -> tuple[str, str, int]:
        return one.operator, re.sub(r"\b(?:\w+\.)+_?|\b_(?=\w)", "", one.statement), one.site

    wanted = what(mutant)
    return max((site for site in candidates if what(site) == wanted), key=likeness, default=None)


ROOMS = ("pdsim/kv", "pdsim/serving", "pdsim/sim")
TESTS = ("tests/kv", "tests/serving", "tests/sim", "tests/test_clock.py")
OPTIONS = ("-q", "-n", "0", "-p", "no:cacheprovider", "--hypothesis-profile=ci")  # ci: always the same examples
BUDGET = 30.0  # CPU seconds of tests a mutant, as measured under coverage
HANG, WALL = 25, 300  # CPU seconds of a process, and seconds of a run, after which it hangs
MEMORY = 8 << 30


class Recorder:
    """A pytest plugin: a context of coverage for each test, and one for each fixture that several tests share."""

    def __init__(self) -> None:
        import coverage

        self.coverage = coverage.Coverage(data_file=None, source=[str(ROOT / "pdsim")], config_file=False)
        self._users: dict[str, set[str]] = defaultdict(set)
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()

    @contextlib.contextmanager
    def _within(self, context: str, after: str) -> Iterator[None]:
        self.coverage.switch_context(context)
        try:
            yield
        finally:
            self.coverage.switch_context(after)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Measure a test, in CPU seconds, so that a busy machine changes no choice."""
        for name in getattr(item, "fixturenames", ()):
            self._users[name].add(item.nodeid)
        self._item, start = item.nodeid, time.process_time()
        with self._within(item.nodeid, "start"):
            result = yield
        self.seconds[item.nodeid] = time.process_time() - start
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        """Measure what several tests share for all of them."""
        if fixturedef.scope == "function":
            return (yield)
        with self._within(f"fixture {fixturedef.argname} {fixturedef.baseid}", self._item):
            return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember tests that fail or are skipped: they do not count."""
        if report.outcome != "passed":
            self.failed.add(report.nodeid)

    def tests(self, context: str) -> set[str]:
        """Return the tests of *context*."""
        kind, _, rest = context.partition(" ")
        name, _, base = rest.partition(" ")
        users = {test for test in self._users[name] if test.startswith(base)} if kind == "fixture" else {context}
        return users & self.seconds.keys() - self.failed


def record(tests: list[str], path: Path) -> None:
    """Run all *tests* once, and write to *path* which test runs which line of `pdsim/`, and how long it takes."""
    recorder = Recorder()
    recorder.coverage.start()
    pytest.main([*OPTIONS, "-o", "timeout=600", "--continue-on-collection-errors", *tests], plugins=[recorder])
    recorder.coverage.stop()
    passed = {test: round(s, 3) for test, s in recorder.seconds.items() if test not in recorder.failed}
    number = {test: index for index, test in enumerate(passed)}
    data = recorder.coverage.get_data()
    lines = {
        Path(file).relative_to(ROOT).as_posix(): {
            line: sorted({number[test] for context in contexts for test in recorder.tests(context)})
            for line, contexts in data.contexts_by_lineno(file).items()
        }
        for file in data.measured_files()
    }
    path.write_text(json.dumps({"tests": passed, "lines": lines}, separators=(",", ":")))


class Cover:
    """Which tests run which line, and how long each takes, as `record` wrote it."""

    def __init__(self, path: Path):
        content = json.loads(path.read_text())
        self.seconds: dict[str, float] = content["tests"]
        self._names = list(self.seconds)
        self._lines: dict[str, dict[str, list[int]]] = content["lines"]

    def tests(self, site: Site) -> set[str]:
        """Return the tests that run a line of *site*."""
        lines = self._lines.get(site.file, {})
        return {self._names[number] for line in site.lines for number in lines.get(str(line), ())}

    def chosen(self, site: Site, budget: float, first: str = "") -> list[str]:
        """Return the tests to run: *first*, then the closest and quickest, as long as they fit; by file."""
        stem, room = Path(site.file).stem, Path(site.file).parts[1]

        def order(test: str) -> tuple[bool, bool, bool, float]:
            path, _, name = test.partition("::")  # its file may have moved
            return name != first.partition("::")[2], stem not in path, f"/{room}/" not in path, self.seconds[test]

        left = budget
        files: dict[str, list[str]] = defaultdict(list)
        for test in sorted(self.tests(site), key=order):
            if not files or self.seconds[test] <= left:
                left -= self.seconds[test]
                files[test.partition("::")[0]].append(test)
        return [test for tests in files.values() for test in tests]


def copied(folder: Path) -> None:
    """Copy the checkout, without what git ignores, to *folder*."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def tested(copy: Path, tests: list[str]) -> tuple[int, str]:
    """Run *tests* in *copy*; return the exit status, negative if they hang, and the output."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (HANG, HANG + 5))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))

    options = [*OPTIONS, "-x", "-o", "timeout=60", "--no-header", "--tb=no", f"--basetemp={copy}.tmp"]
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=copy, env=os.environ | {"PYTHONPATH": str(copy)}, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=limited,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=WALL)
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL, ""
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with what the tests started
        process.wait()
    return process.returncode, output


def trial(copy: Path, site: Site, tests: list[str]) -> tuple[str, str]:
    """Return the outcome of *tests* in *copy* with *site* applied, and the test that failed."""
    path = copy / site.file
    original = path.read_text(encoding="utf-8")
    tree, all_sites = sites(site.file, original)
    next(other for other in all_sites if other.key == site.key).apply()
    _write(path, ast.unparse(ast.fix_missing_locations(tree)))
    try:
        status, output = tested(copy, tests)
    finally:
        _write(path, original)
    if status <= 0:
        return "timeout" if status else "survived", ""
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
    return ("killed", failed[1]) if failed else ("error", output[-300:])


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):  # may be as old and as long as the new text
        compiled.unlink()


def draw(known: Cover, count: int, seed: int) -> list[Mutant]:
    """Return *count* mutants of covered statements: by room as it has statements, in a room by operator in turn."""
    covered = [site for site in everything(ROOMS) if known.tests(site)]
    lines = {room: {(s.file, s.lines.start) for s in covered if s.room == room} for room in ROOMS}
    total = sum(map(len, lines.values()))
    chosen: list[Mutant] = []
    for number, room in enumerate(ROOMS):
        random_ = random.Random(f"{seed} {room}")
        quota = count - len(chosen) if number == len(ROOMS) - 1 else round(count * len(lines[room]) / total)
        queues = {op: [s for s in covered if s.room == room and s.operator == op] for op in OPERATORS}
        for queue in queues.values():
            random_.shuffle(queue)
        taken: set[tuple[str, int]] = set()
        while quota and any(queues.values()):
            for queue in queues.values():
                while queue and (queue[-1].file, queue[-1].lines.start) in taken:
                    queue.pop()
                if queue and quota:
                    site = queue.pop()
                    taken.add((site.file, site.lines.start))
                    chosen.append(site.mutant())
                    quota -= 1
    return chosen


def run(work: list[tuple[Mutant, Site | None]], known: Cover, journal: Path, workers: int, budget: float) -> None:
    """Try each mutant at its site that the *journal* lacks, and add its outcome there."""
    lock, done = threading.Lock(), {mutant.key for mutant in load(journal)} if journal.exists() else set()
    scratch = Path(tempfile.mkdtemp(prefix="mutation-"))
    copies = [scratch / str(number) for number in range(workers)]
    for copy in copies:
        copied(copy)

    def one(mutant: Mutant, site: Site | None) -> None:
        start = time.monotonic()
        if site is None:
            mutant.outcome = "gone"
        elif not (tests := known.chosen(site, budget, mutant.by)):
            mutant.outcome, mutant.by = "unreached", ""
        else:
            copy = copies.pop()
            mutant.outcome, mutant.by = trial(copy, site, tests)
            copies.append(copy)
        with lock, journal.open("a") as file:
            file.write(json.dumps(asdict(mutant)) + "\n")
            seconds = time.monotonic() - start
            print(
                f"{mutant.outcome:9} {seconds:5.1f} s  {mutant.operator:12} {mutant.file} {mutant.function}",
                flush=True,
            )

    try:
        with ThreadPoolExecutor(workers) as pool:
            for result in [pool.submit(one, *pair) for pair in work if pair[0].key not in done]:
                result.result()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def again(earlier: list[Mutant], known: Cover, args: argparse.Namespace) -> None:
    """Try mutants of *earlier* in the present source."""
    pool = everything(("pdsim",))
    some = [m for m in earlier if m.outcome in args.outcomes and m.room in args.rooms]
    run([(m, locate(m, pool)) for m in some], known, args.folder / "again.jsonl", args.workers, args.budget)


def load(path: Path) -> list[Mutant]:
    """Return the mutants of a record or a journal."""
    rows = (json.loads(line.rstrip(",\n")) for line in path.read_text().splitlines() if line[:2] == '{"')
    return [Mutant(**{each.name: row[each.name] for each in fields(Mutant) if each.name in row}) for row in rows]


def save(mutants: list[Mutant], path: Path) -> None:
    """Write a record: a list in JSON, one line a mutant."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(json.dumps(asdict(mutant)) for mutant in mutants) + "\n]\n")


def report(mutants: list[Mutant]) -> str:
    """Return the outcomes by room and operator, and the mutants that no test noticed."""
    lines = [f"{'':14} {'':12} mutants  killed  survived  other  score"]
    rows = [(room, op) for room in sorted({m.room for m in mutants}) for op in (*OPERATORS, "all")]
    for room, operator in [*rows, ("all", "all")]:
        part = [m for m in mutants if room in (m.room, "all") and operator in (m.operator, "all")]
        killed = sum(m.outcome in ("killed", "timeout") for m in part)
        survived = sum(m.outcome == "survived" for m in part)
        score = f"{100 * killed / (killed + survived):5.1f} %" if killed + survived else ""
        rest = len(part) - killed - survived
        lines.append(f"{room:14} {operator:12} {len(part):7} {killed:7} {survived:9} {rest:6}  {score}")
    for outcome in ("survived", "gone", "unreached", "error"):
        some = [m for m in mutants if m.outcome == outcome]
        lines += ["", f"{outcome}: {len(some)}"] if some else []
        lines += [f"  {m.file} {m.function} [{m.operator}] {m.statement}  ->  {m.replacement}" for m in some]
    return "\n".join(lines)


def main() -> None:
    """Run a command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("command", choices=("cover", "draw", "run", "report", "again"))
    parser.add_argument("record", nargs="?", type=Path, help="of again and report: outcomes that were saved")
    parser.add_argument("--folder", type=Path, default=ROOT / "results" / "mutation")
    parser.add_argument("--tests", nargs="+", default=list(TESTS))
    parser.add_argument("--rooms", nargs="+", default=list(ROOMS))
    parser.add_argument("--outcomes", nargs="+", default=["killed", "timeout"], help="of again: which to try")
    parser.add_argument("--count", type=int, default=260)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--budget", type=float, default=BUDGET, help="CPU seconds of tests a mutant")
    parser.add_argument("--save", type=Path, help="of report: the record to write")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    drawn, journal = args.folder / "drawn.json", args.folder / "run.jsonl"
    if args.command == "cover":
        return record(args.tests, args.folder / "cover.json")
    if args.command == "report":
        mutants = load(args.record or journal)
        print(report(mutants))
        return save(mutants, args.save) if args.save else None
    known = Cover(args.folder / "cover.json")
    if args.command == "draw":
        save(draw(known, args.count, args.seed), drawn)
    elif args.command == "run":
        places = {site.key: site for site in everything(ROOMS)}
        run([(mutant, places[mutant.key]) for mutant in load(drawn)], known, journal, args.workers, args.budget)
    else:
        again(load(args.record), known, args)
    return None


if __name__ == "__main__":
    main()
