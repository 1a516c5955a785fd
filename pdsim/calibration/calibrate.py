# SPDX-License-Identifier: Apache-2.0
"""From samples to a calibration: the fit, its parameters as a configuration has them, its files, and its tables.

`pdsim calibrate` and `pdsim refit` both end here, so that a shipped number is made by the code that users run.  The
form of the model (`pdsim.calibration.transfers`) is chosen by the samples, anew in each fold, so that the error on
what was left out contains the choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pdsim.calibration import samples as points
from pdsim.calibration import transfers
from pdsim.calibration.definition import Calibration, HeldOut
from pdsim.calibration.robust import Floats
from pdsim.calibration.samples import Sample, Samples
from pdsim.calibration.transfers import FORMS, OF_READS, Fit, points_of
from pdsim.core.errors import ConfigError
from pdsim.core.units import parse_time
from pdsim.hardware.costs import Engine, EngineModel
from pdsim.hardware.machine import Machine
from pdsim.results.record import Table, commit

__all__ = [
    "Fitted",
    "base_of",
    "fitted",
    "job_spread",
    "key_of",
    "link_of",
    "parameter_table",
    "save",
    "table",
    "text_of",
]

DRAWN = "drawn at random, and held out from the start"

ALONE = 40
"""Up to so many samples, each is left out in turn; more are left out in ten folds."""


@dataclass(frozen=True)
class Fitted:
    """A *calibration*, and all *samples* that were given for it, those held out included.

    *fit* is the fit itself; *errors* are relative, at what was left out, by decade of the bytes of a transfer.
    """

    calibration: Calibration
    samples: Samples
    fit: Fit
    errors: Mapping[str, Floats]


def fitted(
    samples: Samples, hw: Machine, backend: Engine, operation: str, at: str, name: str, command: str
) -> Fitted:
    """Return the calibration of the model *at* ("intra" or "inter") of *backend* on *hw*, fitted to *samples*.

    Only pairs are fitted, of *operation*, "write" or "read", one transfer at a time where there are such; then what
    several in flight tell, and what reads cost beyond writes.  What flows do to each other is the machine's.  Raise
    a `ConfigError` if there is no such model, or too few samples.

    Samples whose field *held* is set are never fitted to; the errors are those at them.  Where there are none,
    errors are from leaving samples out in turn.  *operation* "read" fits the reads as if they were writes and sets
    the additional costs of reads to zero.  *command* is kept in the provenance.  A machine whose link is slower than
    the engine limits the start of the search to that link.
    """
    base = base_of(backend, at)
    base = replace(base, rate=min(base.rate, link_of(hw, base.path)[1]))
    every = sorted((row for row in samples.rows if (row.pattern, row.schedule) == ("pair", "free")), key=_place)
    pairs = [row for row in every if row.operation == operation]
    if not pairs:
        raise ConfigError(
            f"the file has no {operation} of a pair; set experiment.operation to what it has: "
            f"{', '.join(sorted({row.operation for row in samples.rows}))}"
        )
    isolated, crowds = _isolated([row for row in pairs if not row.held])
    seen = points_of(isolated)
    chosen = transfers.choose(seen, base)
    one, spans = transfers.identifiable(chosen, seen)
    held_out, errors = _errors(one, chosen, isolated, [row for row in pairs if row.held])
    one, spans = transfers.with_concurrency(one, spans, points_of(crowds))
    parameters, intervals = _parameters(one, spans, hw, f"backend.{at}")
    unidentified, of_reads = one.unidentified, None
    if operation == "read":  # the samples contain what reads cost beyond writes
        parameters |= {f"backend.{at}.{each}": "0s" for each in OF_READS[:2] if getattr(base, each)}
    elif more := transfers.read_overhead(one, [row for row in every if not row.held]):
        reads, read_spans = more
        left = [row for row in every if row.held and row.operation == "read"]
        of_reads = _summary(transfers.errors(reads, points_of(left, read=True)), left, DRAWN) if left else None
        known = {each: reads.at[each] for each in OF_READS if each not in reads.unidentified}
        parameters |= {f"backend.{at}.{each}": text_of(each, value) for each, value in known.items()
                       if math.isfinite(value)}  # fmt: skip  # a rate that limits nothing is left out
        intervals |= {f"backend.{at}.{each}": _span(each, span) for each, span in read_spans.items()}
        unidentified = (*unidentified, *reads.unidentified)
    nbytes = [row.blocks * row.size for row in pairs]
    about = samples.about
    calibration = Calibration(
        name=name,
        kind=about.get("kind", "published"),
        hw=(hw.name,),
        backend=(backend.name,),
        form=one.form.name,
        date=about.get("date", datetime.now(UTC).strftime("%Y-%m-%d")),
        source=about.get("source", "not said"),
        parameters=parameters,
        intervals=intervals,
        descriptors=(min(row.blocks for row in pairs), max(row.blocks for row in pairs)),
        bytes=(min(nbytes), max(nbytes)),
        gpus=(2, 2) if hw.gpus else (),  # of a pair
        turn=parse_time(about.get("turn", "0s")),
        # without those within a key that has an interval, as of a ramp of which one step is known
        unidentified=tuple(dict.fromkeys(
            key for each in unidentified if (key := key_of(f"backend.{at}", each)) not in intervals
        )),
        held_out=held_out,
        held_out_reads=of_reads,
        provenance={key: value for key, value in about.items() if key not in ("kind", "source", "date", "turn")}
        | {"fit": command, "commit": commit()},
    )  # fmt: skip
    return Fitted(calibration, samples, one, errors)


def base_of(backend: Engine, at: str) -> EngineModel:
    """Return the model of *backend* that is called *at*, "intra" or "inter"; a `ConfigError` if it has none."""
    model: EngineModel | None = getattr(backend, at, None)
    if model is None:
        raise ConfigError(f"backend={backend.name} has no {at}; set --path to the one that the samples are about")
    return model


def _place(row: Sample) -> tuple[Any, ...]:
    # The order of a file decides nothing: folds, and what a bootstrap draws, are chosen by the place of a sample.
    where = row.blocks > 1, row.size, row.blocks, row.concurrency, row.operation
    return *where, row.layout, row.queues, row.held, row.seconds


def _isolated(rows: Sequence[Sample]) -> tuple[Sequence[Sample], list[Sample]]:
    alone = [row for row in rows if row.concurrency == 1]
    if len(alone) < transfers.LEAST:
        return rows, []
    return alone, [row for row in rows if row.concurrency > 1]


def _errors(
    one: Fit, chosen: Fit, isolated: Sequence[Sample], left: Sequence[Sample]
) -> tuple[HeldOut, dict[str, Floats]]:
    if left:
        errors, rows, how = transfers.errors(one, points_of(left)), left, DRAWN
    else:
        forms = FORMS if one.form == chosen.form else (one.form,)
        parts = 0 if len(isolated) <= ALONE else 10
        errors, rows = transfers.held_out(points_of(isolated), one.base, forms, parts), isolated
        how = f"left out in {parts} folds" if parts else "each left out in turn"
        how += ", the form chosen anew" if len(forms) > 1 else ", the form given"
    decades = [10 ** (len(str(row.blocks * row.size)) - 1) for row in rows]
    by_decade = {f"{decade:.0e} B": errors[[each == decade for each in decades]] for decade in sorted(set(decades))}
    return _summary(errors, rows, how), by_decade


def _summary(errors: Floats, rows: Sequence[Sample], how: str) -> HeldOut:
    floor = points.floor(row.per_job for row in rows)
    known: dict[str, Any] = (
        {} if floor is None else {"jobs": floor.jobs, "floor": floor.median, "floor_p95": floor.p95}
    )
    return replace(transfers.summary(errors, how), **known)


# --- parameters of a configuration ---------------------------------------------------------------------------------

_LINKS = {
    "nvlink": ("interconnect", "rate", 1.0),
    "rdma": ("nic", "rate", 1.0),
    "tcp": ("host", "tcp_rate", 1.0),
    "shm": ("host", "memory_rate", 2.0),  # read and written
}
_OF_RAMPS = ("extra1", "first1", "extra2", "first2")


def link_of(machine: Machine, path: str) -> tuple[str, float]:
    """Return the key of the link that narrows *path* on *machine*, and the bytes per second that it lets through.

    *path* is that of an `EngineModel`: "nvlink", "rdma", "tcp" or "shm".  Host memory lets through half its rate,
    because a copy through it reads and writes each byte.
    """
    owner, name, passes = _LINKS[path]
    return f"hw.{owner}.{name}", getattr(getattr(machine, owner), name) / passes


def _parameters(
    one: Fit, spans: Mapping[str, tuple[float, float]], machine: Machine, at: str
) -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
    # Texts with units, by full key below *at*, and their intervals.  Beside what was fitted there are zeros for
    # constants that the form does not have, *overlap* and *pipelined*, which say its stages, and the whole ramp as
    # one list.  *queue_rate* is that of one queue.  A link of the machine that is slower than the fitted engine is
    # made as fast: it let those bytes through.
    model, free = one.model, [name for name in one.form.free if name not in _OF_RAMPS]
    values = {**one.at, "queue_rate": model.queue_rate}
    chosen: dict[str, Any] = {name: text_of(name, values[name]) for name in free}
    chosen |= {name: "0s" for name in ("call", "latency") if name not in free}
    chosen |= {name: "0s" for name in ("descriptor", "wire_descriptor") if not getattr(model, name)}
    chosen |= {"overlap": model.overlap, "pipelined": model.pipelined}
    chosen["ramp"] = [{"first": round(step.first), "extra": text_of("extra", step.extra)} for step in model.ramp]
    parameters = {key_of(at, name): value for name, value in chosen.items()}
    queues = {"queue_rate": one.base.queues}
    intervals = {
        key_of(at, name): _span(name, (low / queues.get(name, 1), high / queues.get(name, 1)))
        for name, (low, high) in spans.items()
        if name not in _OF_RAMPS
    }
    if any(name in spans for name in ("first1", "extra1")):
        intervals[f"{at}.ramp"] = tuple(_ramp(one, spans, which) for which in (0, 1))
    key, rate = link_of(machine, model.path)
    fastest = max((one.at[name] for name in ("rate", "queue_rate") if name in free), default=0.0)
    if fastest > rate * (1.0 + transfers.NEGLIGIBLE):  # one fitted to the link's own is as often above as below it
        parameters[key] = text_of("rate", fastest * _LINKS[model.path][2])
    return parameters, intervals


def _ramp(one: Fit, spans: Mapping[str, tuple[float, float]], which: int) -> str:
    # *which* is 0 for the lower end and 1 for the upper one
    ends = {name: spans[name][which] if name in spans else value for name, value in one.at.items()}
    steps = [index for index in range(1, transfers.RAMPS + 1) if one.at[f"extra{index}"] > 0.0]
    return " and ".join(f"{ends[f'first{i}']:.0f} x {text_of('extra', ends[f'extra{i}'])}" for i in steps)


def key_of(at: str, name: str) -> str:
    """Return the key below *at* of the field that the parameter *name* of a form belongs to.

    >>> key_of("backend.intra", "extra2"), key_of("backend.intra", "saving"), key_of("backend.intra", "call")
    ('backend.intra.ramp', 'backend.intra.small.saving', 'backend.intra.call')
    """
    return f"{at}.{'ramp' if name in _OF_RAMPS else 'small.saving' if name == 'saving' else name}"


def text_of(name: str, value: float) -> str:
    """Return *value* of the parameter *name* with its unit and five digits: ``"5.6813us"``, ``"49.557GB/s"``.

    >>> text_of("call", 5.68131e-6), text_of("rate", 49.557e9), text_of("latency", 0.0)
    ('5.6813us', '49.557GB/s', '0s')
    """
    if name.endswith("rate"):
        return f"{value / 1e9:.5g}GB/s"
    return f"{value * 1e6:.5g}us" if value else "0s"


def _span(name: str, ends: tuple[float, float]) -> tuple[str, ...]:
    return tuple(text_of(name, value) for value in ends)


# --- files ---------------------------------------------------------------------------------------------------------


def save(folder: Path, calibration: Calibration, samples: Samples, title: str) -> Path:
    """Write both files of *calibration* into *folder*, its name being theirs, and return the YAML file."""
    import yaml  # type: ignore[import-untyped]  # comes with omegaconf, its stubs do not

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]  # as above
        """Writes lists of plain values in one line, everything else as blocks."""

    def listed(dumper: Any, value: list[Any]) -> Any:
        return dumper.represent_sequence("tag:yaml.org,2002:seq", value, not any(isinstance(v, dict) for v in value))

    Dumper.add_representer(list, listed)
    plain = {item.name: _plain(getattr(calibration, item.name)) for item in fields(Calibration)}
    kept = {name: value for name, value in plain.items() if value}
    text = yaml.dump(kept, Dumper=Dumper, default_flow_style=False, width=116, sort_keys=False)
    points.write(folder / f"{calibration.name}.csv", samples)
    path = folder / f"{calibration.name}.yaml"
    temporary = path.with_name(f"{path.name}.part")
    temporary.write_text(f"# {title}\n{text}", encoding="utf-8")
    return temporary.replace(path)


def _plain(value: Any) -> Any:
    # Floats have four digits, and fields of dataclasses that are None are left out.
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, HeldOut):
        return {key: _plain(item) for key, item in asdict(value).items() if item is not None}
    return float(f"{value:.4g}") if isinstance(value, float) else value


# --- tables --------------------------------------------------------------------------------------------------------


def parameter_table(done: Fitted) -> Table:
    """Return what was fitted, and what the samples do not tell, which comes last.

    Three columns: the dotted key, the value, and its 95 % interval or the reason why it has none.
    """
    calibration = done.calibration

    def why(key: str) -> str:
        if key.rpartition(".")[2] in OF_READS:
            return "reads cost no more, as far as they tell"
        return "as fast as the engine was" if key.startswith("hw.") else "follows from the form"

    def shown(value: Any) -> str:
        if isinstance(value, list):
            return " and ".join(f"{step['first']} x {step['extra']}" for step in value) or "none"
        return str(value)

    rows: list[list[Any]] = [
        [key, shown(value), " to ".join(calibration.intervals.get(key, (why(key),)))]
        for key, value in calibration.parameters.items()
        if key not in calibration.unidentified
    ]
    rows += [[key, "not identified by these samples", "-"] for key in dict.fromkeys(calibration.unidentified)]
    heads = {"parameter": "", "value": "", "95 %": "interval of a bootstrap over configurations"}
    return Table(f"{calibration.name}: {calibration.form}", heads, rows)


def job_spread(samples: Samples) -> str:
    """Return how far the jobs of *samples* are apart, in a line for people; nothing if there was one only."""
    floor = points.floor(row.per_job for row in samples.rows)
    if floor is None:
        return ""
    return (
        f"jobs differ by {floor.apart:.1%} in the median: the mean of {floor.jobs} is off by {floor.median:.1%}, "
        f"and by {floor.p95:.1%} at the 95th percentile, whatever the model"
    )


def table(every: Sequence[Fitted]) -> Table:
    """Return how far each of *every* is from what it has not seen, in all and by the bytes of a transfer."""
    columns = {
        "calibration": "",
        "of": "transfers of so many bytes or up to ten times as many",
        "points": "left out of the fit",
        "mean %": "mean absolute error of the modelled time there",
        "median %": "median of that",
        "p95 %": "95th percentile of that",
        "bias %": "mean signed error, model minus sample",
        "floor %": "median error that is left to a model that knows what every point takes: its jobs differ so much",
        "floor p95 %": "95th percentile of that",
        "how": "what was left out",
    }
    return Table("Held-out error", columns, [row for done in every for row in _rows(done)])


def _rows(done: Fitted) -> Iterator[list[Any]]:
    calibration = done.calibration
    assert calibration.held_out is not None
    parts = {"all": calibration.held_out}
    if len(done.errors) > 1:
        parts |= {name: transfers.summary(errors, "") for name, errors in done.errors.items()}
    if calibration.held_out_reads is not None:
        parts["reads"] = calibration.held_out_reads
    for name, one in parts.items():
        figures = [getattr(one, key) for key in ("mean", "median", "p95", "bias", "floor", "floor_p95")]
        numbers = [None if value is None else value * 100 for value in figures]
        yield [calibration.name, name, one.points, *numbers, one.how]
