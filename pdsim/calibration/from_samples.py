# SPDX-License-Identifier: Apache-2.0
"""From samples to a calibration: which are fitted, what is held out, and what is said of the fit.

`pdsim calibrate` and `pdsim refit` both end here, so that a shipped number is made by the code that
users run.  The form of the model (`pdsim.calibration.forms`) is chosen by the samples, anew in each
fold, so that the error on what was left out contains the choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from pdsim.calibration import concurrency, files, fit, noise_floor, read_overhead
from pdsim.calibration.definition import Calibration, HeldOut
from pdsim.calibration.fit import Fit
from pdsim.calibration.forms import FORMS, points_of
from pdsim.calibration.samples import Sample, Samples
from pdsim.core.errors import ConfigError
from pdsim.core.units import parse_time
from pdsim.hardware.costs import Engine, EngineModel
from pdsim.hardware.machine import Machine
from pdsim.results.environment import commit

__all__ = ["Fitted", "base_of", "fitted"]

DRAWN = "drawn at random, and held out from the start"

ALONE = 40
"""Up to so many samples, each is left out in turn; more are left out in ten folds."""


@dataclass(frozen=True)
class Fitted:
    """A calibration and the samples that it was fitted to.

    Attributes:
        calibration: As it is written down.
        samples: All that were given, those held out included.
        found: The fit itself, with its intervals.
        errors: Relative errors at what was left out, by decade of the bytes of a transfer.
    """

    calibration: Calibration
    samples: Samples
    found: Fit
    errors: Mapping[str, np.ndarray[Any, np.dtype[np.float64]]]  # at what was left out, by decade of bytes


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
    _, link = files.link_of(hw, base.path)
    base = replace(base, rate=min(base.rate, link))
    every = sorted((row for row in samples.rows if (row.pattern, row.schedule) == ("pair", "free")), key=_place)
    pairs = [row for row in every if row.operation == operation]
    if not pairs:
        raise ConfigError(
            f"the file has no {operation} of a pair; set experiment.operation to what it has: "
            f"{', '.join(sorted({row.operation for row in samples.rows}))}"
        )
    left = [row for row in pairs if row.held]
    kept, together = _apart([row for row in pairs if not row.held])
    seen = points_of(kept)
    chosen = fit.choose(seen, base)
    found, spans = fit.told(chosen, seen, base)
    held_out, errors = _errors(found, chosen, kept, left, base)
    found, spans = concurrency.shared(found, spans, points_of(together), base)
    chosen_parameters, told = files.parameters(found, spans, base, hw, f"backend.{at}")
    of_reads = _beyond(found, every, base, f"backend.{at}", operation)
    calibration = Calibration(
        name=name,
        kind=samples.about.get("kind", "published"),
        hw=(hw.name,),
        backend=(backend.name,),
        form=found.form.name,
        date=samples.about.get("date", datetime.now(UTC).strftime("%Y-%m-%d")),
        source=samples.about.get("source", "not said"),
        parameters={**chosen_parameters, **of_reads.parameters},
        intervals={**told, **of_reads.intervals},
        descriptors=(min(row.blocks for row in pairs), max(row.blocks for row in pairs)),
        bytes=(min(_nbytes(row) for row in pairs), max(_nbytes(row) for row in pairs)),
        gpus=(2, 2) if hw.gpus else (),  # of a pair
        turn=parse_time(samples.about.get("turn", "0s")),
        unidentified=_unidentified((*found.unidentified, *of_reads.unidentified), f"backend.{at}", told),
        held_out=held_out,
        held_out_reads=of_reads.held_out,
        provenance=_provenance(samples.about, command),
    )
    return Fitted(calibration, samples, found, errors)


def _nbytes(row: Sample) -> int:
    return row.blocks * row.size


def _place(row: Sample) -> tuple[Any, ...]:
    # So the order of a file decides nothing.
    #
    # Folds, and the samples that a bootstrap draws, are chosen by their place.
    where = row.blocks > 1, row.size, row.blocks, row.concurrency, row.operation
    return *where, row.layout, row.queues, row.held, row.seconds


def _apart(rows: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    alone = [row for row in rows if row.concurrency == 1]
    if len(alone) < fit.LEAST:
        return list(rows), []
    return alone, [row for row in rows if row.concurrency > 1]


def base_of(backend: Engine, at: str) -> EngineModel:
    """Return the model of *backend* that is called *at*, "intra" or "inter"; a `ConfigError` if it has none."""
    found: EngineModel | None = getattr(backend, at, None)
    if found is None:
        raise ConfigError(f"backend={backend.name} has no {at}; set --path to the one that the samples are about")
    return found


@dataclass(frozen=True)
class _OfReads:
    """What a calibration says of reads."""

    parameters: Mapping[str, Any]
    intervals: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unidentified: tuple[str, ...] = ()
    held_out: HeldOut | None = None


def _beyond(found: Fit, every: Sequence[Sample], base: EngineModel, at: str, operation: str) -> _OfReads:
    # The held-out reads judge it.  A parameter of *base* that says what reads cost more is set to zero for a
    # calibration of reads, since its samples contain that cost already.
    if operation == "read":
        return _OfReads({f"{at}.{name}": "0s" for name in read_overhead.FREE[:2] if getattr(base, name)})
    more = read_overhead.beyond(found, [row for row in every if not row.held], base)
    if more is None:
        return _OfReads({})
    fitted_reads, spans = more
    left = [row for row in every if row.held and row.operation == "read"]
    held_out = _summary(fit.errors(fitted_reads, points_of(left)), left, DRAWN) if left else None
    return _OfReads(*files.beyond(fitted_reads, spans, at), fitted_reads.unidentified, held_out)


def _unidentified(parameters: Sequence[str], at: str, told: Mapping[str, Any]) -> tuple[str, ...]:
    # Those within a key that has one are left out, too, as of a ramp of which one step is known.
    return tuple(dict.fromkeys(key for name in parameters if (key := files.key_of(at, name)) not in told))


def _errors(
    found: Fit, chosen: Fit, kept: Sequence[Sample], left: Sequence[Sample], base: EngineModel
) -> tuple[HeldOut, dict[str, Any]]:
    if left:
        errors, rows, how = fit.errors(found, points_of(left)), left, DRAWN
    else:
        forms = FORMS if found.form == chosen.form else (found.form,)
        parts = 0 if len(kept) <= ALONE else 10
        errors, rows = fit.held_out(points_of(kept), base, forms, parts), kept
        how = "each left out in turn" if not parts else f"left out in {parts} folds"
        how += ", the form chosen anew" if len(forms) > 1 else ", the form given"
    return _summary(errors, rows, how), _by_decade(rows, errors)


def _summary(errors: Any, rows: Sequence[Sample], how: str) -> HeldOut:
    least = noise_floor.floor(row.per_job for row in rows)
    found = fit.summary(errors, how)
    if least is None:
        return found
    return replace(found, jobs=least.jobs, floor=least.median, floor_p95=least.p95)


def _by_decade(rows: Sequence[Sample], errors: Any) -> dict[str, Any]:
    found: dict[str, list[float]] = {}
    for row, error in sorted(zip(rows, errors, strict=True), key=lambda pair: pair[0].blocks * pair[0].size):
        decade = 10 ** (len(str(row.blocks * row.size)) - 1)
        found.setdefault(f"{decade:.0e} B", []).append(float(error))
    return {name: np.array(values) for name, values in found.items()}


def _provenance(about: Mapping[str, str], command: str) -> dict[str, str]:
    found = {key: value for key, value in about.items() if key not in ("kind", "source", "date", "turn")}
    return found | {"fit": command, "commit": commit()}
