# SPDX-License-Identifier: Apache-2.0
"""The files of a calibration: ``<name>.yaml``, as `conf/calibration` has it, and every sample in ``<name>.csv``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from pdsim.calibration import samples as points
from pdsim.calibration.definition import Calibration
from pdsim.calibration.fit import NEGLIGIBLE, Fit
from pdsim.calibration.forms import RAMPS, model_of
from pdsim.calibration.read_overhead import FREE
from pdsim.calibration.samples import Samples
from pdsim.hardware.costs import EngineModel
from pdsim.hardware.machine import Machine

__all__ = ["beyond", "key_of", "link_of", "parameters", "save", "text_of"]

_LINKS = {
    "nvlink": (("interconnect", "rate"), 1.0),
    "rdma": (("nic", "rate"), 1.0),
    "tcp": (("host", "tcp_rate"), 1.0),
    "shm": (("host", "memory_rate"), 2.0),  # read and written
}
_RATES = ("rate", "queue_rate")
_IN_BYTES = (*_RATES, "read_rate")


def link_of(machine: Machine, path: str) -> tuple[str, float]:
    """Return the key of the link that narrows *path* on *machine*, and the bytes per second that it lets through.

    *path* is that of an `EngineModel`: "nvlink", "rdma", "tcp" or "shm".  Host memory lets through half its rate,
    because a copy through it reads and writes each byte.
    """
    (owner, name), passes = _LINKS[path]
    return f"hw.{owner}.{name}", getattr(getattr(machine, owner), name) / passes


def parameters(
    found: Fit, spans: Mapping[str, tuple[float, float]], base: EngineModel, machine: Machine, at: str
) -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
    """Return the parameters of *found* by full key below *at*, such as ``"backend.intra"``, and their intervals.

    A link of the machine that is slower than the engine was found to be is made as fast: it let those bytes through.

    Values and interval ends are text with units, as YAML has them.  Beside what was fitted there are: zeros for
    constants that the form does not have, *overlap* and *pipelined*, which say its stages, and the whole ramp as one
    list. *queue_rate* is written for one queue, while forms know that of all queues together.
    """
    free = found.form.free
    given = {
        name: text_of(name, _per_queue(name, found.at[name], base)) for name in free if name[:-1] not in _OF_RAMPS
    }
    given |= {name: "0s" for name in ("call", "latency") if name not in free}
    given |= {
        name: "0s" for name in ("descriptor", "wire_descriptor") if not getattr(model_of(*_with(found, base)), name)
    }
    model = model_of(*_with(found, base))
    stages: dict[str, Any] = {"overlap": model.overlap, "pipelined": model.pipelined}
    ramps = [{"first": ramp.first, "extra": text_of("extra", ramp.extra)} for ramp in model.ramp]
    chosen = {key_of(at, name): value for name, value in {**given, **stages, "ramp": ramps}.items()}
    told = {
        key_of(at, name): tuple(text_of(name, _per_queue(name, value, base)) for value in span)
        for name, span in spans.items()
        if name[:-1] not in _OF_RAMPS
    }
    if any(name in spans for name in ("first1", "extra1")):
        told[f"{at}.ramp"] = tuple(_ramp(found, spans, which) for which in (0, 1))
    key, rate = link_of(machine, model.path)
    fastest = max((found.at[name] for name in _RATES if name in free), default=0.0)
    if fastest > rate * (1.0 + NEGLIGIBLE):  # a rate that was fitted to the link's own is as often above as below it
        chosen[key] = text_of("rate", fastest * _LINKS[model.path][1])
    return chosen, told


def beyond(
    found: Fit, spans: Mapping[str, tuple[float, float]], at: str
) -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
    """Return what reads cost beyond writes, as *found* by `pdsim.calibration.read_overhead`, and its intervals.

    A parameter that the reads do not tell is left out, and so is a rate that limits nothing.  Keys and values are as
    in `parameters`.
    """
    known = {name: found.at[name] for name in FREE if name not in found.unidentified}
    known = {name: value for name, value in known.items() if math.isfinite(value)}  # a rate that does not limit
    told = {f"{at}.{name}": tuple(text_of(name, value) for value in span) for name, span in spans.items()}
    return {f"{at}.{name}": text_of(name, value) for name, value in known.items()}, told


_OF_RAMPS = ("extra", "first")


def key_of(at: str, name: str) -> str:
    """Return the key below *at* of the field that the parameter *name* of a form belongs to.

    >>> key_of("backend.intra", "extra2"), key_of("backend.intra", "saving"), key_of("backend.intra", "call")
    ('backend.intra.ramp', 'backend.intra.small.saving', 'backend.intra.call')
    """
    owner = {"saving": "small.saving"} | dict.fromkeys(
        (f"{of}{i + 1}" for of in _OF_RAMPS for i in range(RAMPS)), "ramp"
    )
    return f"{at}.{owner.get(name, name)}"


def _with(found: Fit, base: EngineModel) -> tuple[Any, Mapping[str, float], EngineModel]:
    return found.form, found.at, base


def _per_queue(name: str, value: float, base: EngineModel) -> float:
    return value / base.queues if name == "queue_rate" else value


def _ramp(found: Fit, spans: Mapping[str, tuple[float, float]], which: int) -> str:
    # *which* is 0 for the lower end and 1 for the upper one.
    def value(name: str) -> float:
        return spans[name][which] if name in spans else found.at[name]

    steps = [index for index in range(1, RAMPS + 1) if found.at[f"extra{index}"] > 0.0]
    return " and ".join(f"{value(f'first{i}'):.0f} x {text_of('extra', value(f'extra{i}'))}" for i in steps)


def text_of(name: str, value: float) -> str:
    """Return *value* of the parameter *name* with its unit and five digits: ``"5.6813us"``, ``"49.557GB/s"``.

    >>> text_of("call", 5.68131e-6), text_of("rate", 49.557e9), text_of("latency", 0.0)
    ('5.6813us', '49.557GB/s', '0s')
    """
    if name in _IN_BYTES:
        return f"{value / 1e9:.5g}GB/s"
    return f"{value * 1e6:.5g}us" if value else "0s"


def save(folder: Path, calibration: Calibration, samples: Samples, title: str) -> Path:
    """Write both files of *calibration* into *folder*, its name being theirs, and return the YAML file.

    *title* is the comment that says what it is.

    The YAML file is written beside its place and then moved there, so a reader never sees half of it; the samples
    come first.  Fields that are empty or zero are left out.  *folder* must exist.
    """
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
    if hasattr(value, "__dataclass_fields__"):
        plain = {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
        return {name: item for name, item in plain.items() if item is not None}
    return float(f"{value:.4g}") if isinstance(value, float) else value
