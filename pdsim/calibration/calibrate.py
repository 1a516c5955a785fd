# SPDX-License-Identifier: Apache-2.0
"""From samples to a calibration: the fit, its parameters as a configuration has them, its files, and its tables.

`pdsim calibrate` and `pdsim refit` both end here, so that a shipped number is made by the code that users run.  The
form is chosen anew in each fold, so that the error on what was left out contains the choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from pdsim.calibration import samples as points
from pdsim.calibration import transfers
from pdsim.calibration.definition import Calibration, HeldOut, on_host
from pdsim.calibration.robust import Floats, robust_fit
from pdsim.calibration.samples import Sample, Samples
from pdsim.calibration.transfers import FORMS, OF_READS, Fit, points_of
from pdsim.core import files
from pdsim.core.errors import ConfigError
from pdsim.core.progress import ShowProgress, silent, within
from pdsim.core.units import parse_time
from pdsim.hardware.costs import Engine, EngineModel
from pdsim.hardware.machine import Machine
from pdsim.results.record import Table, commit

_DRAWN = "drawn at random, and held out from the start"
_ALONE = 40  # up to so many samples, each is left out in turn; more are left out in ten folds


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
    samples: Samples,
    hw: Machine,
    backend: Engine,
    operation: str,
    at: str,
    name: str,
    command: str,
    progress: ShowProgress = silent,
) -> Fitted:
    """Return the calibration of the model *at* ("intra" or "inter") of *backend* on *hw*, fitted to *samples*.

    Only pairs of *operation*, "write" or "read", are fitted, one transfer at a time where there are such; then what
    several in flight tell, and what reads cost beyond writes. "read" fits reads as if they were writes. Samples
    whose field *held* is set are never fitted to, and errors are those at them; without any, samples are left out
    in turn. *command* is kept in the provenance; *progress* is shown how far the intervals are. Raise a
    `ConfigError` without such a model or enough samples.
    """
    base = base_of(backend, at)
    base = replace(base, rate=min(base.rate, link_of(hw, base.path)[1]))
    # the order of a file decides nothing: folds, and what a bootstrap draws, go by the place of a sample
    every = sorted((row for row in samples.rows if (row.pattern, row.schedule) == ("pair", "free")), key=_place)
    pairs = [row for row in every if row.operation == operation]
    if not pairs:
        raise ConfigError(
            f"the file has no {operation} of a pair; set experiment.operation to what it has: "
            f"{', '.join(sorted({row.operation for row in samples.rows}))}"
        )
    isolated = [row for row in pairs if not row.held and row.concurrency == 1]
    crowds = [row for row in pairs if not row.held and row.concurrency > 1]
    if len(isolated) < transfers.LEAST:
        isolated, crowds = [row for row in pairs if not row.held], []
    chosen = transfers.choose(points_of(isolated), base)
    one = transfers.identifiable(chosen, points_of(isolated), within(progress, 0.0, 0.8))
    held_out, errors = _errors(one, chosen, isolated, [row for row in pairs if row.held])
    one = transfers.with_concurrency(one, points_of(crowds))
    parameters, intervals = _parameters(one, hw, f"backend.{at}")
    unidentified, of_reads = one.unidentified, None
    if operation == "read":  # the samples contain what reads cost beyond writes
        parameters |= {f"backend.{at}.{each}": "0s" for each in OF_READS[:2] if getattr(base, each)}
    elif reads := transfers.read_overhead(one, [row for row in every if not row.held], within(progress, 0.8, 1.0)):
        if left := [row for row in every if row.held and row.operation == "read"]:
            of_reads = _summary(transfers.errors(reads, points_of(left, read=True)), left, _DRAWN)
        told = [each for each in OF_READS if each not in reads.unidentified and math.isfinite(reads.at[each])]
        parameters |= {f"backend.{at}.{each}": text_of(each, reads.at[each]) for each in told}
        intervals |= {f"backend.{at}.{each}": _span(each, ends) for each, ends in reads.intervals.items()}
        unidentified = (*unidentified, *reads.unidentified)
    nbytes = [row.blocks * row.size for row in pairs]
    about = dict(samples.about)
    calibration = Calibration(
        name=name,
        kind=about.pop("kind", "published"),
        hw=(hw.name,),
        backend=(backend.name,),
        form=one.form.name,
        date=about.pop("date", datetime.now(UTC).strftime("%Y-%m-%d")),
        source=about.pop("source", "not said"),
        parameters=parameters,
        intervals=intervals,
        descriptors=(min(row.blocks for row in pairs), max(row.blocks for row in pairs)),
        bytes=(min(nbytes), max(nbytes)),
        gpus=(2, 2) if hw.gpus else (),  # of a pair
        turn=parse_time(about.pop("turn", "0s")),
        # without those within a key that has an interval, as of a ramp of which one step is known
        unidentified=tuple(
            key
            for key in dict.fromkeys(_key_of(f"backend.{at}", each) for each in unidentified)
            if key not in intervals
        ),
        held_out=held_out,
        held_out_reads=of_reads,
        provenance=about | {"fit": command, "commit": commit()},
    )
    return Fitted(calibration, samples, one, errors)


@dataclass(frozen=True)
class OfHost:
    """The *factor* of a host's part of transfers (`Config.host_factor`), of all jobs and of *each*, lowest first.

    *before* and *after* are the absolute errors of the times with a factor of 1 and with this one.
    """

    factor: float
    each: Sequence[float]
    before: Floats
    after: Floats


def of_host(samples: Samples, hw: Machine, backend: Engine, at: str) -> OfHost:
    """Return the host factor of the host of *samples* (pairs), from the model *at* of *backend* on *hw*.

    One number is fitted: rates and the wire stay (`definition.on_host`).  Raise a `ConfigError` without such a model
    or for fewer than three transfers that were alone.
    """
    rows = [row for row in samples.rows if (row.pattern, row.schedule, row.concurrency) == ("pair", "free", 1)]
    line = link_of(hw, base_of(backend, at).path)[1]
    if len(rows) < transfers.LEAST:
        raise ConfigError(f"{len(rows)} pairs are too few to tell a host; measure {transfers.LEAST} or more")
    rows.sort(key=lambda row: row.operation)  # reads first
    parts = [
        points_of([row for row in rows if row.operation == way], read=way == "read") for way in ("read", "write")
    ]

    def seconds(factor: float) -> Floats:
        model = base_of(on_host(backend, factor), at)
        return np.concatenate([model.isolated_time(of.blocks, of.nbytes, line, read=of.read) for of in parts])

    def fitted_to(measured: Sequence[float]) -> float:
        best = robust_fit(lambda by: seconds(by["host"]), measured, {"host": 1.0}, scale=transfers.SCALE)
        return best.values["host"]

    measured = [row.seconds for row in rows]
    factor = fitted_to(measured)
    jobs = [fitted_to(of) for of in zip(*(row.per_job for row in rows), strict=False)]
    before, after = (np.abs(seconds(by) / measured - 1.0) for by in (1.0, factor))
    return OfHost(factor, sorted(jobs) or [factor], before, after)


def base_of(backend: Engine, at: str) -> EngineModel:
    """Return the model of *backend* that is called *at*, "intra" or "inter"; a `ConfigError` if it has none."""
    model: EngineModel | None = getattr(backend, at, None)
    if model is None:
        raise ConfigError(f"backend={backend.name} has no {at}; set --path to the one that the samples are about")
    return model


def _place(row: Sample) -> tuple[Any, ...]:
    where = row.blocks > 1, row.size, row.blocks, row.concurrency, row.operation
    return *where, row.layout, row.queues, row.held, row.seconds


def _errors(
    one: Fit, chosen: Fit, isolated: Sequence[Sample], left: Sequence[Sample]
) -> tuple[HeldOut, dict[str, Floats]]:
    if left:
        errors, rows, how = transfers.errors(one, points_of(left)), left, _DRAWN
    else:
        forms = FORMS if one.form == chosen.form else (one.form,)
        parts = 0 if len(isolated) <= _ALONE else 10
        errors, rows = transfers.held_out(points_of(isolated), one.base, forms, parts), isolated
        how = f"left out in {parts} folds" if parts else "each left out in turn"
        how += ", the form chosen anew" if len(forms) > 1 else ", the form given"
    decades = [10 ** (len(str(row.blocks * row.size)) - 1) for row in rows]
    by_decade = {f"{decade:.0e} B": errors[[each == decade for each in decades]] for decade in sorted(set(decades))}
    return _summary(errors, rows, how), by_decade


def _summary(errors: Floats, rows: Sequence[Sample], how: str) -> HeldOut:
    summary, floor = transfers.summary(errors, how), points.floor(row.per_job for row in rows)
    return summary if floor is None else replace(summary, jobs=floor.jobs, floor=floor.median, floor_p95=floor.p95)


_LINKS = {
    "nvlink": ("interconnect", "rate", 1.0),
    "rdma": ("nic", "rate", 1.0),
    "tcp": ("host", "tcp_rate", 1.0),
    "shm": ("host", "memory_rate", 2.0),  # read and written
}
_OF_RAMPS = ("extra1", "first1", "extra2", "first2")


def link_of(machine: Machine, path: str) -> tuple[str, float]:
    """Return the key of the narrowest link of *path* on *machine*, and its bytes/s.

    *path* is that of an `EngineModel`: "nvlink", "rdma", "tcp" or "shm".  Host memory lets through half its rate,
    because a copy through it reads and writes each byte.
    """
    owner, name, passes = _LINKS[path]
    return f"hw.{owner}.{name}", getattr(getattr(machine, owner), name) / passes


def _parameters(one: Fit, machine: Machine, at: str) -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
    # Texts with units, by full key below *at*, and their intervals: what was fitted, zeros for constants that the
    # form does not have, its stages, and the whole ramp as one list.  *queue_rate* is that of one queue.  A link of
    # the machine that is slower than the fitted engine is made as fast: it let those bytes through.
    model, free = one.model, [name for name in one.form.free if name not in _OF_RAMPS]
    values = {**one.at, "queue_rate": model.queue_rate}
    chosen: dict[str, Any] = {name: text_of(name, values[name]) for name in free}
    chosen |= {name: "0s" for name in ("call", "latency") if name not in free}
    chosen |= {name: "0s" for name in ("descriptor", "wire_descriptor") if not getattr(model, name)}
    chosen |= {"overlap": model.overlap, "pipelined": model.pipelined}
    chosen["ramp"] = [{"first": round(step.first), "extra": text_of("extra", step.extra)} for step in model.ramp]
    parameters = {_key_of(at, name): value for name, value in chosen.items()}
    spans = dict(one.intervals)
    if "queue_rate" in spans:
        low, high = spans["queue_rate"]
        spans["queue_rate"] = low / one.base.queues, high / one.base.queues
    intervals = {_key_of(at, name): _span(name, ends) for name, ends in spans.items() if name not in _OF_RAMPS}
    if spans.keys() & {"first1", "extra1"}:
        intervals[f"{at}.ramp"] = tuple(_ramp(one, which) for which in (0, 1))
    key, rate = link_of(machine, model.path)
    fastest = max((one.at[name] for name in ("rate", "queue_rate") if name in free), default=0.0)
    if fastest > rate * (1.0 + transfers.NEGLIGIBLE):  # one fitted to the link's own is as often above as below it
        parameters[key] = text_of("rate", fastest * _LINKS[model.path][2])
    return parameters, intervals


def _ramp(one: Fit, which: int) -> str:
    # *which* is 0 for the lower end and 1 for the upper one
    ends = {name: one.intervals.get(name, (value, value))[which] for name, value in one.at.items()}
    steps = [index for index in range(1, transfers.RAMPS + 1) if one.at[f"extra{index}"] > 0.0]
    return " and ".join(f"{ends[f'first{i}']:.0f} x {text_of('extra', ends[f'extra{i}'])}" for i in steps)


def _key_of(at: str, name: str) -> str:
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


def save(folder: Path, calibration: Calibration, samples: Samples, title: str) -> Path:
    """Write both files of *calibration* into *folder*, its name being theirs, and return the YAML file."""
    import yaml  # type: ignore[import-untyped]  # comes with omegaconf, its stubs do not

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]  # as above
        """Writes lists of plain values in one line, everything else as blocks."""

    def listed(dumper: Any, value: list[Any]) -> Any:
        return dumper.represent_sequence("tag:yaml.org,2002:seq", value, not any(isinstance(v, dict) for v in value))

    Dumper.add_representer(list, listed)
    kept = {name: value for name, value in _plain(asdict(calibration)).items() if value}
    text = yaml.dump(kept, Dumper=Dumper, default_flow_style=False, width=116, sort_keys=False)
    points.write(folder / f"{calibration.name}.csv", samples)
    path = folder / f"{calibration.name}.yaml"
    with files.whole_file(path, "--to") as file:
        file.write(f"# {title}\n{text}".encode())
    return path


def _plain(value: Any) -> Any:
    # floats have four digits, and what is None is left out
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def parameter_table(done: Fitted) -> Table:
    """Return the fitted parameters, then those that the samples do not determine.

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
    rows += [[key, "not identified by these samples", "-"] for key in calibration.unidentified]
    heads = {"parameter": "", "value": "", "95 %": "interval of a bootstrap over configurations"}
    return Table(f"{calibration.name}: {calibration.form}", heads, rows)


def job_spread(samples: Samples) -> str:
    """Return a line about how the jobs of *samples* differ; nothing of a single job."""
    floor = points.floor(row.per_job for row in samples.rows)
    if floor is None:
        return ""
    return (
        f"jobs differ by {floor.apart:.1%} in the median: the mean of {floor.jobs} is off by {floor.median:.1%}, "
        f"and by {floor.p95:.1%} at the 95th percentile, whatever the model"
    )


def table(every: Sequence[Fitted]) -> Table:
    """Return the held-out errors of each of *every*, in all and by the bytes of a transfer."""
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
    parts = {"all": calibration.held_out}
    if len(done.errors) > 1:
        parts |= {name: transfers.summary(errors, "") for name, errors in done.errors.items()}
    for name, one in (parts | {"reads": calibration.held_out_reads}).items():
        if one is not None:
            figures = (one.mean, one.median, one.p95, one.bias, one.floor, one.floor_p95)
            numbers = [None if value is None else value * 100 for value in figures]
            yield [calibration.name, name, one.points, *numbers, one.how]
