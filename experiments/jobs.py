# SPDX-License-Identifier: Apache-2.0
"""What experiments share: refusals, starts that fail, outcomes of several jobs as one, tables, parts."""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import fsum
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from pdsim.config import Config
from pdsim.core.errors import BackendUnavailable, ConfigError, TransferError
from pdsim.results.record import Metric, Result, Table, percentile
from pdsim.transfer import TransferRecord
from pdsim.transfer.job import Outcome, RankResult, RankSpec, Target

Row = TypeVar("Row")
Columns = Mapping[str, tuple[str, Callable[[Row], Any]]]
"""Definition and value of each heading."""


def refuse(problems: Iterable[str]) -> None:
    """Raise a `ConfigError` of *problems*, each once and on a line of its own, if there are any."""
    if lines := list(dict.fromkeys(problems)):
        raise ConfigError("\n".join(lines))


def attempt(target: Target, ranks: Sequence[RankSpec], name: str, *, first: bool) -> Outcome:
    """Run *ranks* on *target*; a job that cannot be started is the outcome of a rank *name* with its error.

    Raise a `BackendUnavailable` if it is the *first* job and the engine does not work here at all.
    """
    try:
        return target.run(ranks)
    except TransferError as error:
        if first and isinstance(error, BackendUnavailable):
            raise
        return Outcome({name: RankResult(name, error=f"{type(error).__name__}: {error}")}, seconds=0.0)


def ended_by(outcome: Outcome) -> str:
    """Return the class of the error that ended *outcome*, or nothing.

    A rank that was killed cannot say why, so a `PeerLost`, which others saw, comes before the rest.
    """
    errors = [rank.error.partition(":")[0] for rank in outcome.ranks.values() if rank.error]
    return "PeerLost" if "PeerLost" in errors else next(iter(errors), "")


def combined(
    outcomes: Mapping[str, Outcome],
    summary: Sequence[Metric],
    tables: Sequence[Table],
    failures: Iterable[str],
    notes: Sequence[str],
    transfers: Sequence[TransferRecord] | None = None,
) -> Result:
    """Return the result of several jobs, whose ranks, links and pools are named with their job.

    Errors of ranks come before the *failures*; *transfers* are by default those of all ranks.
    """
    whole = _merged(outcomes)
    errors = [f"{name}: {rank.error}" for name, rank in whole.ranks.items() if rank.error]
    if transfers is None:
        transfers = [record for rank in whole.ranks.values() for record in rank.transfers]
    return Result(summary, tables, transfers=transfers, failures=[*errors, *failures], notes=notes, outcome=whole)


def _merged(outcomes: Mapping[str, Outcome]) -> Outcome:
    def of_all(part: str) -> dict[str, Any]:
        items = [(job, getattr(outcome, part)) for job, outcome in outcomes.items()]
        return {f"{job} {name}".strip(): value for job, values in items for name, value in values.items()}

    seconds = fsum(each.seconds for each in outcomes.values())
    events = sum(each.events for each in outcomes.values())
    return Outcome(of_all("ranks"), seconds, of_all("links"), of_all("pools"), events)


def microseconds(seconds: Sequence[float], q: float) -> float | None:
    """Return percentile *q* of *seconds* in us, or None if there are too few."""
    value = percentile(seconds, q)
    return None if value is None else value * 1e6


def tabulated(title: str, columns: Columns[Row], rows: Iterable[Row]) -> Table:
    """Return the table of *rows* with a cell for each of *columns*."""
    cells = [[of(row) for _, of in columns.values()] for row in rows]
    return Table(title, {heading: definition for heading, (definition, _) in columns.items()}, cells)


def unverified(config: Config) -> list[str]:
    """Return a note if the memory of *config* has no contents that could be compared."""
    if config.target == "model" and config.memory == "timing":
        return ["no bytes were verified: the model keeps sizes only; set memory=tracked to check contents"]
    return []


Part = TypeVar("Part", bound=tuple[Any, ...])


class Parts(Generic[Part]):
    """The tuples of *kind*, called *what*, that *path* keeps, by their first field.

    A file of JSON lines: *head* is the first and says what they are of, each other line is one.  Raise a
    `ConfigError` if the file is of another kind or of another *head*.  A last line that was cut short when a run was
    ended by force is dropped.
    """

    def __init__(self, path: Path, head: Mapping[str, Any], kind: type[Part], what: str) -> None:
        self.kept: dict[Any, Part] = {}
        self._path = path
        head = json.loads(json.dumps(head))
        try:
            if not path.exists() or not path.stat().st_size:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(head) + "\n", encoding="utf-8")
            first, *lines = path.read_bytes().splitlines(keepends=True)
            header = json.loads(first)
            for key, value in head.items():
                if header[key] != value:
                    raise ConfigError(
                        f"experiment.parts={path} keeps {what} of {key}={header[key]}, these are of {value}: "
                        "they do not add up; name another file"
                    )
            if lines and not lines[-1].endswith(b"\n"):
                torn = lines.pop()
                os.truncate(path, path.stat().st_size - len(torn))
            self.kept = {each[0]: each for each in (msgspec.json.decode(line, type=kind) for line in lines)}
        except OSError as error:
            raise ConfigError(
                f"experiment.parts={path}: {error.strerror}; name a file that can be written"
            ) from error
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"experiment.parts={path} does not keep {what}: {error}; name another file") from error

    def add(self, part: Part) -> None:
        """Keep *part*; it is in the file when this returns."""
        self.kept[part[0]] = part
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(part) + b"\n")
