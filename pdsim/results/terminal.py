# SPDX-License-Identifier: Apache-2.0
"""What a person reads at the end of a run, and what a machine does.

Both come from the files of the run, so that ``pdsim run`` and ``pdsim show`` cannot disagree.  `brief_lines` are the
dozen lines of a run, ``-v`` prints every number with its definition; without evidence none are printed.

On a terminal rich draws tables and a bar; anywhere else lines are plain, have no colour and are never broken, and
rich is not imported, which takes longer than many simulations.
"""

import math
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from json import dumps
from pathlib import Path
from shlex import join
from typing import IO, Any, Self

from pdsim.core.errors import ConfigError
from pdsim.core.files import printable
from pdsim.core.units import format_time
from pdsim.results import evidence, schema, store
from pdsim.results.record import Table

GOAL = 0.99
"""Share of requests that is to meet the SLO."""
_FIRST = "load: ", "failures: ", "autoscale: ", "tenants "
"""Beginnings of the notes that come first."""

_STYLES = {"failed": "red", "warning": "yellow"}  # of lines of `brief_lines`, by how they begin
_NO_EVIDENCE = "evidence: none, so no number is printed: give hw and backend their sources"


def show(folder: Path, file: IO[str] | None = None, *, verbose: bool = False) -> None:
    """Print the report of the complete run in *folder* to *file*, by default standard output.

    A run without evidence for its hardware or engine shows no numbers. Raise a `ConfigError` if *folder* is not a
    complete run.
    """
    run, screen = store.load(folder), _Screen(file)
    screen.say(headline(run, folder), "bold")
    if not verbose:
        met = run["metrics"].get("slo_attainment", {}).get("value") or 0.0
        styles = {**_STYLES, "SLO": "green" if met >= GOAL else "yellow"}
        for line in brief_lines(run, folder):
            screen.say(line, styles.get(line.partition(":")[0], ""))
        return
    sources: dict[str, str] = run["evidence"]["sources"]
    if sources:
        metrics = {name: metric for name, metric in run["metrics"].items() if not metric["tabled"]}
        rows = [(name, cell(metric["value"]), metric["definition"]) for name, metric in metrics.items()]
        if rows:
            screen.grid(("metric", "value", "definition"), rows, (False, True, False))
        for table in run["tables"]:
            used = list(table["columns"]) == ["name", "utilisation"]
            screen.table(_use(table) if used else Table(table["title"], table["columns"], table["rows"]))
    screen.say()
    if not sources:
        screen.say(_NO_EVIDENCE, "red")
    else:
        for kind, parameters in evidence.kinds(sources).items():
            screen.say(f"evidence: {kind} for {', '.join(parameters)}")
        screen.say(f"weakest evidence: {kind}:")
        for text, parameters in evidence.texts(sources, kind).items():
            screen.say(f"  {', '.join(parameters)}: {text}", "dim")
    if calibration := run["evidence"].get("calibration"):
        screen.say(spread(calibration))
    for note in run["notes"]:
        screen.say(f"note: {note}", "yellow")
    for failure in run["failures"]:
        screen.say(f"failed: {failure}", "red")
    screen.say(f"results: {folder}")


def as_json(folder: Path) -> str:
    """Return the same as one JSON object on one line: ``run.json``, ``summary.json`` and ``folder``.

    Numbers that are not finite are null. Raise a `ConfigError` if *folder* is not a complete run.
    """
    return dumps(store.load(folder), ensure_ascii=False, allow_nan=False)


def show_table(table: Table, file: IO[str] | None = None, *, definitions: bool = True) -> None:
    """Print *table* and, unless *definitions* is false, what its columns mean, to *file* or standard output."""
    columns = table.columns if definitions else dict.fromkeys(table.columns, "")
    _Screen(file).table(Table(table.title, columns, table.rows))


def show_lines(*lines: str, file: IO[str] | None = None) -> None:
    """Print *lines* as the rest of a report is printed: unbroken, to *file* or standard output."""
    screen = _Screen(file)
    for line in lines:
        screen.say(line)


class _Screen:
    """Lines and tables on a terminal, by rich; on any other file without colours, and never broken."""

    def __init__(self, file: IO[str] | None) -> None:
        self._file = sys.stdout if file is None else file
        self._console: Any = None
        if self._file.isatty():
            from rich.console import Console

            self._console = Console(file=self._file, markup=False, highlight=False, emoji=False)

    def say(self, text: str = "", style: str = "") -> None:
        text = printable(text)
        if self._console is None:
            self._file.write(f"{text}\n")
        else:
            self._console.print(text, style=style or None, soft_wrap=True)

    def grid(self, headings: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[bool]) -> None:
        # *numeric* columns are to the right
        headings, *rows = [[printable(text) for text in row] for row in (headings, *rows)]
        if self._console is None:
            for line in _aligned([headings, *rows], numeric):
                self.say(line)
            return
        from rich import box
        from rich.table import Table as Grid

        table = Grid(box=box.SIMPLE_HEAD, pad_edge=False)
        for heading, number in zip(headings, numeric, strict=True):
            table.add_column("\n".join(_broken(heading)), justify="right" if number else "left", overflow="fold")
        for row in rows:
            table.add_row(*row)
        self._console.print(table)

    def table(self, table: Table) -> None:
        # A column is to the right if none of its cells is text; definitions stand below.
        self.say()
        self.say(table.title, "bold")
        headings = list(table.columns)
        numeric = [all(not isinstance(row[i], str) for row in table.rows) for i in range(len(headings))]
        cells = [[cell(value) for value in row] for row in table.rows]
        shown = self._fitting(headings, cells)
        self.grid(headings[:shown], [row[:shown] for row in cells], numeric[:shown])
        for heading in headings[:shown]:
            if table.columns[heading]:
                self.say(f"  {heading}: {table.columns[heading]}", "dim")
        if shown < len(headings):
            self.say(f"  columns hidden (narrow terminal): {', '.join(headings[shown:])}", "dim")

    def _fitting(self, headings: Sequence[str], cells: Sequence[Sequence[str]]) -> int:
        width = 0
        for number, heading in enumerate(headings):
            width += max(map(len, (*_broken(heading), *(row[number] for row in cells)))) + 3
            if self._console is not None and width > self._console.width and number:
                return number
        return len(headings)


def _aligned(lines: Sequence[Sequence[str]], numeric: Sequence[bool]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = zip(line, widths, numeric, strict=True)
        padded = (text.rjust(width) if number else text.ljust(width) for text, width, number in cells)
        yield "  ".join(padded).rstrip()


def _broken(heading: str) -> list[str]:
    return re.sub(r"(?<=\w)(\.|(?=/s/))", r"\1\n", heading).split("\n")


def _use(table: Mapping[str, Any]) -> Table:
    # links or memories that are alike are one row
    definition = table["columns"]["utilisation"]
    columns = {"name": "where", "alike": "how many", "least": "of them", "utilisation": definition}
    rows = [[name, count, share(least), share(most)] for name, count, least, most in alike(dict(table["rows"]))]
    return Table(table["title"], columns, rows)


def spread(calibration: Mapping[str, Any]) -> str:
    """Return how far a modelled transfer time may be from a real one, by *calibration*."""
    begin = f"calibration: {calibration['name']}, {calibration['source']}, {calibration['date']}"
    held_out = calibration["held_out"]
    if not held_out:
        return f"{begin}; it was compared with no samples but its own"
    text = (
        f"{begin}; transfer times of {held_out['points']} samples left out of the fit ({held_out['how']}) are met "
        f"within {held_out['mean']:.1%} in the mean and {held_out['p95']:.1%} at the 95th percentile"
    )
    floor = held_out.get("floor_p95")
    return text if floor is None else f"{text}, where what its {held_out['jobs']} jobs differ by makes {floor:.1%}"


def cell(value: Any) -> str:
    """Return *value* as it is printed: four significant digits, counts in full, ``-`` if it was not measured.

    >>> cell(None), cell(0.0), cell(12), cell(1234.5), cell(0.012345)
    ('-', '0', '12', '1234', '0.0123')
    """
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, float):
        return str(value)
    if not value:
        return "0"
    if not 1e-3 <= abs(value) < 1e7:
        return f"{value:.3e}"
    whole = abs(int(value))
    return f"{value:.{max(0, 4 - len(f'{whole}')) if whole else 4}f}"


class Progress:
    """A progress bar on standard error after a second; a file gets a line now and then.

    Call it with the share done, 0 to 1, and a few words, from any thread; use it as a context manager, or call
    `close`.  A terminal sees the bar *after* so many seconds; other files get a line *every* so many.  With
    *at_once*, for what takes minutes, the first line comes after half a second, which refusals do not take, and
    others follow, at first every 2 s, also while nothing calls: a thread writes what was said last.
    """

    def __init__(
        self,
        description: str,
        file: IO[str] | None = None,
        after: float = 1.0,
        every: float = 10.0,
        *,
        at_once: bool = False,
    ) -> None:
        self._file = sys.stderr if file is None else file
        self._description = description
        self._terminal = self._file.isatty()
        self._began = time.monotonic()
        self._pause = 0.1 if self._terminal else min(2.0, every) if at_once else every
        self._every = every
        self._next = self._began + (after if self._terminal else 0.5 if at_once else every)
        self._first: float | None = None  # the share when it was first called: what an earlier run has done
        self._last = 0.0, ""
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True) if at_once else None
        self._bar: Any = None

    def __call__(self, share: float, text: str = "", until: float | None = None) -> None:  # noqa: ARG002
        """Show that *share* is done; *until* is that of `pdsim.core.progress.ShowProgress`."""
        with self._lock:
            self._last = min(max(share, 0.0), 1.0), f"{self._description} {text}".rstrip()
            if self._first is None:
                self._first = self._last[0]
                if self._thread is not None:
                    self._thread.start()
            self._show()

    def _repeat(self) -> None:
        # Runs on a thread of its own, for work that does not call for long.
        while not self._over.wait(max(0.05, self._next - time.monotonic())):
            with self._lock:
                if not self._over.is_set():
                    self._show()

    def _show(self) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        share, what = self._last
        self._next = now + self._pause
        if self._terminal:
            self._bar = self._bar or _bar(self._file)
            self._bar.update(self._bar.task_ids[0], completed=share, description=what)
            return
        self._pause = min(2.0 * self._pause, self._every)
        self._file.write(f"{what}: {share:.0%}{self._left(now - self._began, share)}\n")
        self._file.flush()

    def _left(self, spent: float, share: float) -> str:
        done = share - (self._first or 0.0)
        if spent < 1.0:
            return ""
        took = f", {format_time(round(spent))} so far"
        if spent < 3.0 or done < 0.01 or share >= 1.0:
            return took
        return f"{took}, about {format_time(max(1.0, round(spent * (1.0 - share) / done)))} left"

    def close(self) -> None:
        """Take the bar off the terminal; nothing is written after that."""
        self._over.set()
        with self._lock:
            if self._bar is not None:
                self._bar.stop()
                self._bar = None
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _bar(file: IO[str]) -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn())
    bar = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(file=file), transient=True)
    bar.start()
    bar.add_task("", total=1.0)
    return bar


# --- the dozen lines of a run --------------------------------------------------------------------------------------


_LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "end to end", "transfer": "KV exposed"}
_BOUND = {
    "queueing": "requests wait for an instance: add instances, or lower the load",
    "prefill": "prefill compute dominates: more or faster GPUs for prefill",
    "decode": "decode steps dominate: more or faster GPUs for decode",
    "handshake": "prefill waits for the pages of decode: add memory to decode",
    "transfer": "KV arrives late: compare backends, or set kv.staging=true",
    "polling": "decode looks between two steps only: shorter steps",
}
_PHASES = ("queueing", "compute", "handshake", "transfer", "polling")
_RESTS_ON = {
    "transfer": ("backend.PATH.descriptor", "backend.PATH", "backend", "collective"),
    "polling": ("engine",),
    "handshake": ("engine", "hw"),
}
"""Parameters that a phase depends on most, by how they begin; next, and of other phases, it is ``compute``.

PATH is inter on several nodes, else intra.
"""
_TRUST = {
    "measured": "every number rests on measurements",
    "published": "the numbers rest on published figures",
    "datasheet": "the numbers rest on datasheets, which state peaks",
    "assumed": "the numbers are estimates",
}
_LONGEST = 80  # characters of a source
_MOST = 5  # rows of a table, or metrics, of an experiment that serves nothing


def headline(run: Mapping[str, Any], folder: Path) -> str:
    """Return what *run*, kept in *folder*, was: experiment, model, machine, workload, layout, engine and target."""
    moved_by = f", bytes moved by {', '.join(run['engine'])}" if run["engine"] and run["target"] != "model" else ""
    where = f"({run['target']}{moved_by}), seed {run['seed']}, pdsim {run['pdsim']}"
    if "ttft_p50_s" not in run["metrics"]:
        return f"{run['experiment']} on {run['hw']} with {run['backend']} {where}"
    config = schema.read_configuration(folder / "config.yaml")
    trace, arrivals = config.get("workload.trace"), config.get("workload.arrivals")
    load = (
        f"trace {Path(trace).name}" if trace else f"{arrivals} {'trace' if arrivals == 'embedded' else 'arrivals'}"
    )
    about = f"{run['experiment']} {config.get('model.name')} on {run['hw']}: {load}"
    if run["target"] != "live":
        sides = ["parallel.prefill", "parallel.decode"]
        if config.get("experiment.deployment") == "colocated":  # `pdsim.serving.deployment.colocated_places`
            one = _gpus(config, sides[0])
            wanted = sum(_gpus(config, side) * config.get(f"{side}.instances", 1) for side in sides)
            held = min(wanted, config.get("hw.nodes", 1) * config.get("hw.gpus", 0) or wanted) // one
            count = config.get("experiment.engines") or held
            config, sides = {**config, "parallel.prefill.instances": count}, sides[:1]
        layout = " -> ".join(_divided(config, side) for side in sides)
        about += f", {layout}, {config.get('engine.name')}, {run['backend']}"
    return f"{about} {where}"


def _gpus(config: Mapping[str, Any], side: str) -> int:
    return math.prod(config.get(f"{side}.{key}", 1) for key in ("tp", "pp", "cp"))


def _divided(config: Mapping[str, Any], side: str) -> str:
    sizes = {key: config.get(f"{side}.{key}", 1) for key in ("tp", "pp", "cp", "dp", "ep")}
    how = " ".join(f"{key.upper()}{size}" for key, size in sizes.items() if key == "tp" or size != 1)
    return f"{config.get(f'{side}.instances', 1)} x {how}"


def brief_lines(run: Mapping[str, Any], folder: Path, *, page: bool = False) -> Iterator[str]:
    """Yield the lines about *run*, which `pdsim.results.store.load` read from *folder*, below its headline."""
    sources = run["evidence"]["sources"]
    metrics = {name: metric["value"] for name, metric in run["metrics"].items()}
    shares = {name: metrics.get(f"share_{name}") or 0.0 for name in _PHASES}
    most = max(shares, key=lambda name: shares[name])
    if not sources:
        yield _NO_EVIDENCE
    elif "ttft_p50_s" in metrics:
        yield from (note for note in run["notes"] if note.startswith(_FIRST))
        config = schema.read_configuration(folder / "config.yaml")
        yield _verdict(metrics, config)
        yield from () if page else _latencies(metrics)
        yield from _interval(run, metrics, config)
        yield from (note for note in run["notes"] if note.startswith("TTFT: "))
        yield from _bound(run, metrics, {} if config.get("workload.tenants") else config, shares, most)
    elif not page:
        yield from _measured(run)
        yield from (note for note in run["notes"] if note.startswith("95 % interval: "))
    failures = run["failures"]
    yield from (f"failed: {failure}" for failure in failures[:3])
    if len(failures) > 3:
        yield f"... and {len(failures) - 3} more: -v"
    if sources:
        hw = schema.read_nested(folder / "config.yaml").get("hw") or {}
        yield _evidence(sources, most, hw.get("nodes") != 1, "more below" if page else "more: -v")
    if warnings := [note for note in run["notes"] if note.startswith("warning: ")]:
        yield warnings[0] + (f" (and {len(warnings) - 1} more: -v)" if len(warnings) > 1 and not page else "")
    yield from (note for note in run["notes"] if " has no effect on " in note)  # what was typed in vain
    if not page:
        yield from (f"results: {folder}", "next:")
        yield from (f"  {command}" for command in _next(run, folder))


def program() -> str:
    """Return how this process was called, for commands that can be pasted: pdsim, or PYTHON -m pdsim."""
    words = sys.orig_argv[:3]
    return join(words) if words[1:] == ["-m", "pdsim"] else "pdsim"


def share(value: float) -> str:
    """Return *value*, a share of one, for people.

    >>> share(0.9412), share(0.0003), share(-0.0), share(1e-9)
    ('94.1 %', '0.03 %', '0.0 %', '< 0.001 %')
    """
    percent = 100.0 * value + 0.0  # no -0.0
    if 0.0 < percent < 0.001:
        return "< 0.001 %"
    return f"{percent:.1f} %" if percent >= 10 or not percent else f"{percent:.2g} %"


def group(name: str) -> str:
    """Return *name* with ``*`` for its numbers, which names all that are alike.

    >>> group("node0.gpu3.hbm")
    'node*.gpu*.hbm'
    """
    return re.sub(r"\d+", "*", name)


def alike(used: Mapping[str, float]) -> list[tuple[str, int, float, float]]:
    """Return *used*, shares by name, most used first; names that differ only in numbers are one.

    >>> alike({"gpu0/memory": 0.5, "gpu1/memory": 0.25, "host": 0.125})
    [('gpu*/memory', 2, 0.25, 0.5), ('host', 1, 0.125, 0.125)]
    """
    groups: dict[str, list[str]] = {}
    for name in used:
        groups.setdefault(group(name), []).append(name)
    rows = []
    for pattern, names in groups.items():
        shares = [used[name] for name in names]
        rows.append((pattern if len(names) > 1 else names[0], len(names), min(shares), max(shares)))
    return sorted(rows, key=lambda row: (-row[3], row[0]))


def _verdict(metrics: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    total, done, failed = (metrics.get(name, 0) for name in ("requests", "requests_ok", "requests_failed"))
    limits = [config.get(f"slo.{name}") for name in ("ttft", "tpot")]
    if not all(isinstance(limit, int | float) for limit in limits):
        raise ConfigError(f"config.yaml of the run has no limits in slo, got {limits}; it was changed since")
    slo = f"TTFT <= {format_time(config['slo.ttft'])} and TPOT <= {format_time(config['slo.tpot'])}"
    if config.get("workload.tenants"):
        slo = "the SLO of their tenant"
    rate, good = metrics.get("request_rate"), metrics.get("goodput")
    makespan = metrics.get("makespan_s")
    took = f" in {format_time(makespan)}" if makespan is not None else ""
    served = f"{done} served{took}{f', {failed} failed' if failed else ''}"
    speed = f" ({rate:.3g}/s, {good:.3g}/s within the SLO)" if rate is not None and good is not None else ""
    met = share(metrics.get("slo_attainment") or 0.0)
    return f"SLO: {met} of {total} requests meet {slo} (goal {100 * GOAL:.0f} %); {served}{speed}"


def _latencies(metrics: Mapping[str, Any]) -> Iterator[str]:
    yield f"{'':<12}{'p50':>10}{'p90':>10}{'p99':>10}"
    for name, title in _LATENCIES.items():
        values = [metrics.get(f"{name}_{q}_s") for q in ("p50", "p90", "p99")]
        texts = ["-" if value is None else format_time(value) for value in values]
        yield f"{title:<12}{''.join(f'{text:>10}' for text in texts)}"


def _interval(run: Mapping[str, Any], metrics: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[str]:
    if servers := run["evidence"].get("servers"):
        between = config.get("hw.nodes", 1) != 1 and config.get("experiment.deployment") != "colocated"
        yield from evidence.lines(servers, metrics, between=between)


def _bound(
    run: Mapping[str, Any],
    metrics: Mapping[str, Any],
    limits: Mapping[str, Any],
    shares: Mapping[str, float],
    most: str,
) -> Iterator[str]:
    used = [
        f"{what} {share(alike(of)[0][-1])}"
        for what, of in (("busiest link", run["links"]), ("fullest memory", run["pools"]))
        if of
    ]
    if shares[most]:
        others = [f"{name} {share(value)}" for name, value in shares.items() if name != most and value >= 5e-4]
        causes = ", ".join([f"{most} {share(shares[most])}", *others, *used])
        yield f"bound by {causes}; {_hint(metrics, limits, shares, most)}"
    elif used:
        yield f"use: {', '.join(used)}"


def _hint(metrics: Mapping[str, Any], limits: Mapping[str, Any], shares: Mapping[str, float], most: str) -> str:
    # About the first token where that alone misses the SLO, else about the whole request.
    whole, first = (metrics.get(f"{name}_avg_s") or 0.0 for name in ("e2e", "ttft"))
    decode = whole - first  # after the first token all is decode
    prefill = shares["compute"] * whole - decode
    if (metrics.get("slo_attainment") or 0.0) < GOAL and _misses(metrics, limits) == ["ttft"]:
        times = {name: share * whole for name, share in shares.items() if name != "compute"} | {"prefill": prefill}
        return f"TTFT is too long, as {_BOUND[max(times, key=lambda name: times[name])]}"
    if most == "compute":
        most = "decode" if decode > prefill else "prefill"
    return _BOUND[most]


def _misses(metrics: Mapping[str, Any], limits: Mapping[str, Any]) -> list[str]:
    # by the highest percentile that there are requests for
    tails = {name: [metrics.get(f"{name}_{q}_s") for q in ("p99", "p90", "p50")] for name in ("ttft", "tpot")}
    known = {name: next((value for value in tail if value is not None), 0.0) for name, tail in tails.items()}
    return [name for name, value in known.items() if value > limits.get(f"slo.{name}", math.inf)]


def _measured(run: Mapping[str, Any]) -> Iterator[str]:
    if not run["tables"]:
        named = [(name, metric["value"]) for name, metric in run["metrics"].items()]
        yield from (f"{name}: {cell(value)}" for name, value in named[:_MOST])
        left = len(named) - _MOST
    else:
        table = run["tables"][0]
        most = len(table["rows"]) if table["title"] == "Answer" else _MOST
        rows = [list(table["columns"]), *([cell(value) for value in row] for row in table["rows"][:most])]
        yield table["title"]
        yield from _aligned(rows, [True] * len(rows[0]))
        left = len(table["rows"]) - most
    if left > 0:
        yield f"... and {left} more: -v"


def _evidence(sources: Mapping[str, str], most: str, several: bool, where: str) -> str:
    # The parameter that is named is one that the phase which took *most* time depends on, if any, and of those one
    # that was measured elsewhere: it says the most. Between *several* nodes other costs decide than within one.
    kind, keys = list(evidence.kinds(sources).items())[-1]
    borrowed = [key for key in keys if sources[key].partition(": ")[2].startswith("measured on ")]
    begins = (*_RESTS_ON.get(most, ()), "compute", "backend.PATH", "backend")
    begins = tuple(begin.replace("PATH", "inter" if several else "intra") for begin in begins)
    key = next((key for begin in begins for key in (*borrowed, *keys) if key.startswith(begin)), keys[0])
    text = sources[key].partition(":")[2].strip()
    text = text.partition(": ")[0] if text.startswith("measured o") else text  # on what, and not by whom
    short = text if len(text) <= _LONGEST else f"{text[:_LONGEST].rstrip()}..."
    more = f"; {len(keys) - 1} {where}" if len(keys) > 1 else ""
    are = "are" if key.endswith("s") and "." not in key else "is"
    trust = _TRUST[kind]
    if sources.get("transfers", "").startswith("measured") and kind != "measured":
        trust = "transfers are measured, the rest is estimated"
    return f"evidence: {trust}: {key} {are} {kind} ({short}{more})"


def _next(run: Mapping[str, Any], folder: Path) -> list[str]:
    if run["experiment"].startswith("validate"):
        return [f"{program()} report {join([str(folder)])}"]
    first = "explain" if "ttft_p50_s" in run["metrics"] else "report"  # which is of requests
    options = [word for word in run.get("command", ()) if word.startswith("--config-")]
    words = [word for word in run.get("overrides", ()) if not word.startswith(("output=", "seed="))]
    sweep = [*options, *words, "seed=0,1,2"]
    return [f"{program()} {first} {join([str(folder)])}", f"{program()} sweep {join(sweep)}"]
