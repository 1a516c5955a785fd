# SPDX-License-Identifier: Apache-2.0
"""The whole `pdsim.config.Config` from the mapping that YAML and the command line compose.

Beside typing it (`pdsim.config.typed`), this lays a calibration over machine and engine, applies what the options of
an engine change of its costs, and says of each number where it comes from (`pdsim.config.sources`).
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass, replace
from typing import Any

from pdsim.calibration.definition import Calibration, applied, covers
from pdsim.calibration.host_factor import drawn, on_host
from pdsim.config import Config
from pdsim.config.sources import ON_THE_COMMAND_LINE, borrowed, sourced
from pdsim.config.typed import Known, build, required
from pdsim.core.errors import ConfigError
from pdsim.core.units import parse_time
from pdsim.hardware.costs import Engine, EngineModel, OptionCosts
from pdsim.hardware.machine import Machine
from pdsim.kv.policy import Policy

__all__ = ["defaults", "load"]

_HOST = [f"backend.{at}.{name}" for at in ("intra", "inter") for name in ("call", "descriptor", "latency", "ramp")]

_known: Known = {}
"""The parts of the configuration that was loaded last: frozen, so that the next may have them, too."""


def load(values: Mapping[str, Any], overridden: Iterable[str] = ()) -> Config:
    """Return the configuration in *values*; *overridden* are the dotted keys that were set on the command line.

    What is below ``experiment`` becomes the options of that experiment.  The source called ``"gpu"`` speaks for all
    numbers below ``gpu`` but those of a longer name, ``"nodes, gpus"`` for two; what was overridden is *assumed*.
    A calibration is laid over machine and engine, and under what was overridden.  Raise a `ConfigError`.

    *values* is not changed.  The order matters and is this: the policy is taken out, the calibration laid under,
    everything typed, the costs of the chosen options applied, rates scaled to the hardware, and the sources brought
    up to date.
    """
    keys = tuple(overridden)
    values, policy = _without_policy(values)
    values, calibration, calibrated = _calibrated(values, keys)
    config = build(Config, values, known=_known)
    backend, changed, spans, errors = _varied(config.backend, keys, config.target)
    backend = _on_hardware(backend, config.hw)
    factor, why = _host(config, calibration)
    if factor != 1.0:
        own = {key: f"assumed: times host_factor={factor:g}{why}" for key in _HOST if not covers(keys, key)}
        backend, changed = on_host(backend, factor), changed | own
    if calibration is not None and (factor != 1.0 or "host_factor" in keys):
        calibration = replace(calibration, host=factor)
    new = calibrated | changed | dict.fromkeys(keys, ON_THE_COMMAND_LINE)
    # what the calibration says of these numbers is not so with these options
    if calibration is not None and changed:
        known = {key: span for key, span in calibration.intervals.items() if key not in changed}
        calibration = replace(calibration, intervals=known | {key: spans[key] for key in changed if key in spans})
    if calibration is not None and errors:
        for part in ("held_out", "held_out_reads"):
            if (held := getattr(calibration, part)) is not None:
                how = f"{held.how}; with these options, errors of those who measured them"
                held = replace(held, how=how, floor=None, floor_p95=None, **errors)
                calibration = replace(calibration, **{part: held})
    return replace(
        config,
        policy=build(Policy, policy, "backend.policy"),
        host_factor=1.0,  # it is in the backend now: a run that is repeated changes nothing
        draw_host=False,
        calibration=calibration,
        hw=sourced(config.hw, "hw", new),
        backend=sourced(borrowed(backend, config.hw), "backend", new),
        model=sourced(config.model, "model", new),
        engine=sourced(borrowed(config.engine, config.hw), "engine", new),
        collective=None
        if config.collective is None
        else sourced(borrowed(config.collective, config.hw), "collective", new),
    )


def _host(config: Config, calibration: Calibration | None) -> tuple[float, str]:
    """Return the `Config.host_factor` of *config*, or the one that is drawn, and how it came to be.

    Raise a `ConfigError` where there is nothing to draw from.
    """
    if config.target != "model":
        return 1.0, ""
    if not config.draw_host:
        return config.host_factor, ""
    if calibration is None or len(calibration.hosts) < 2:
        name = "none" if calibration is None else calibration.name
        raise ConfigError(
            f"draw_host=true needs a calibration of several hosts, and calibration={name} knows none; "
            "set host_factor="
        )
    (factor,) = drawn(calibration.hosts, config.seed, 1)
    return factor, f", drawn from seed={config.seed} as {len(calibration.hosts)} hosts differ"


def defaults(cls: type = Config) -> dict[str, Any]:
    """Return the defaults of *cls* as plain data: what can be set, for a reader of the composed configuration.

    Fields without a default are left out.  *policy* stands below ``backend``, where it is written.
    """
    plain: dict[str, Any] = {}
    for field in fields(cls):
        if field.name == "policy":
            plain["backend"] = {"policy": asdict(Policy())}
        elif not required(field):
            make = typing.cast("Callable[[], Any]", field.default_factory)
            value = field.default if field.default is not MISSING else make()
            plain[field.name] = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    return plain


def _without_policy(values: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return *values* without ``backend.policy``, and that.

    It is written with the engine, which need not know it.
    """
    if "policy" in values:
        raise ConfigError(f"unknown key policy; it belongs to the backend: set backend.policy={values['policy']!r}")
    found, backend = dict(values), values.get("backend")
    if not isinstance(backend, Mapping):
        return found, {}
    found["backend"] = {key: value for key, value in backend.items() if key != "policy"}
    return found, backend.get("policy", {})


def _varied(
    backend: Engine, overridden: Iterable[str], target: str
) -> tuple[Engine, dict[str, str], dict[str, tuple[str, ...]], dict[str, float]]:
    """Return *backend* with what its options change of its costs, and sources and intervals by key, and errors.

    What is *overridden* by hand stays as it is.  Raise a `ConfigError` if the model does not know these options.

    The first of *by_option* that fits ``backend.options`` counts.  With a target other than the model an unknown
    option is allowed, since the engine itself decides.
    """
    sources: dict[str, str] = {}
    spans: dict[str, tuple[str, ...]] = {}
    errors: dict[str, float] = {}
    by_hand = tuple(overridden)
    for at in ("intra", "inter"):
        model: EngineModel | None = getattr(backend, at)
        if model is None or not model.by_option:
            continue
        chosen = next((item for item in model.by_option if item.chosen(backend.options)), None)
        if chosen is None and target == "model":
            known = "; ".join(" ".join(f"{k}={v}" for k, v in item.options.items()) for item in model.by_option)
            raise ConfigError(
                f"backend.options={dict(backend.options)} has no costs in the model of backend={backend.name}; "
                f"there are {known}"
            )
        varied = replace(model, by_option=()) if chosen is None else model.varied(chosen)
        names = [field.name for field in fields(model) if getattr(varied, field.name) != getattr(model, field.name)]
        kept = {name: getattr(model, name) for name in names if covers(by_hand, f"backend.{at}.{name}")}
        known_options = {name for item in model.by_option for name in item.options} | set(backend.modelled)
        moved: dict[str, Any] = {at: replace(varied, **kept), "modelled": tuple(sorted(known_options))}
        backend = replace(backend, **moved)
        if chosen is not None:
            told = dict.fromkeys((name for name in names if name not in kept), chosen.evidence)
            sources |= {f"backend.{at}.{name}": text for name, text in told.items() if name != "by_option"}
            errors |= chosen.errors
            spans |= {
                f"backend.{at}.{name}": _span(model, chosen, name) for name in chosen.intervals if name in told
            }
    return backend, sources, spans, errors


def _span(model: EngineModel, costs: OptionCosts, name: str) -> tuple[str, ...]:
    """Return the interval of *name*, of *model* with *costs*, as a calibration writes it."""
    value, ends = getattr(model, name), costs.intervals[name]
    if name == "rate":
        return tuple(f"{value * float(end):.6g}B/s" for end in ends)
    return tuple(f"{value + parse_time(end):.6g}s" for end in ends)


def _on_hardware(backend: Engine, hw: Machine) -> Engine:
    """Return *backend* with rates of NVLink as shares of the line rate of *hw*."""
    models = {name: getattr(backend, name) for name in ("intra", "inter")}
    moved = {
        name: model.on_line(hw.interconnect.rate)
        for name, model in models.items()
        if model and model.path == "nvlink"
    }
    return replace(backend, **{name: model for name, model in moved.items() if model is not models[name]})


def _calibrated(
    values: dict[str, Any], overridden: tuple[str, ...]
) -> tuple[dict[str, Any], Calibration | None, dict[str, str]]:
    """Return *values* without their calibration but with its parameters, it, and the sources of what it set."""
    chosen = values.pop("calibration", None)
    if chosen is None or chosen == {"name": "none"}:
        return values, None, {}
    return applied(values, build(Calibration, chosen, "calibration"), overridden)
