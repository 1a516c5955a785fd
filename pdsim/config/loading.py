# SPDX-License-Identifier: Apache-2.0
"""The whole `pdsim.config.Config` from plain data, and as plain data again.

`load` makes it of the mapping that YAML and the command line compose: typed (`pdsim.config`), with a
calibration laid over machine and engine, with what the options of an engine change of its costs, and with the source
of each number.  A source begins with one of `pdsim.hardware.machine.EVIDENCE`: measured, datasheet or assumed.

`config_yaml` writes the ``config.yaml`` of a run, `canonical` the text of its name.  A sweep writes thousands of
configurations that differ in a key or two, so each top-level part is written again only when it has changed: that
saves nine tenths of the time.
"""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pdsim.calibration.definition import Calibration, applied, covers, drawn, on_host
from pdsim.config import Config, Known, build, join, required, split_keys
from pdsim.config.computing import AUTO, chosen
from pdsim.core.errors import ConfigError
from pdsim.core.units import is_number, parse_time
from pdsim.hardware.costs import Collective, Engine, EngineModel, OptionCosts
from pdsim.hardware.machine import EVIDENCE, Machine
from pdsim.kv.policy import Policy
from pdsim.models.llm import Llm
from pdsim.serving.settings import ServingEngine

__all__ = [
    "ON_THE_COMMAND_LINE",
    "UNSAID",
    "as_written",
    "borrowed",
    "canonical",
    "config_yaml",
    "defaults",
    "load",
    "numbers",
    "plain",
    "sourced",
]

_HOST = [f"backend.{at}.{name}" for at in ("intra", "inter") for name in ("call", "descriptor", "latency", "ramp")]

_known: Known = {}
"""The parts of the configuration that was loaded last: frozen, so that the next may have them, too."""


def load(values: Mapping[str, Any], overridden: Iterable[str] = (), folders: Sequence[Path] = ()) -> Config:
    """Return the configuration in *values*; *overridden* are the dotted keys that were set on the command line.

    *folders* are one's own with configuration groups, whose profiles ``compute=auto`` takes first.

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
    if config.compute.name == AUTO:
        config = replace(config, compute=chosen(config, values["compute"], keys, folders))
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
    # Raise a `ConfigError` where there is nothing to draw from.
    if config.target != "model":
        return 1.0, ""
    if config.draw_host and config.host_factor != 1.0:
        raise ConfigError(
            f"draw_host=true draws the host_factor; leave out draw_host or host_factor={config.host_factor:g}"
        )
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
    # It is written with the engine, which need not know it.
    if "policy" in values:
        raise ConfigError(f"unknown key policy; it belongs to the backend: set backend.policy={values['policy']!r}")
    rest, backend = dict(values), values.get("backend")
    if not isinstance(backend, Mapping):
        return rest, {}
    rest["backend"] = {key: value for key, value in backend.items() if key != "policy"}
    return rest, backend.get("policy", {})


def _varied(
    backend: Engine, overridden: Iterable[str], target: str
) -> tuple[Engine, dict[str, str], dict[str, tuple[str, ...]], dict[str, float]]:
    # What is *overridden* by hand stays as it is.  Raise a `ConfigError` if the model does not know these options.
    #
    # The first of *by_option* that fits ``backend.options`` counts.  With a target other than the model an unknown
    # option is allowed, since the engine itself decides.
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
        varied = replace(model, by_option=()) if chosen is None else model.with_options(chosen)
        names = [field.name for field in fields(model) if getattr(varied, field.name) != getattr(model, field.name)]
        kept = {name: getattr(model, name) for name in names if covers(by_hand, f"backend.{at}.{name}")}
        known_options = {name for item in model.by_option for name in item.options} | set(backend.modelled)
        moved: dict[str, Any] = {at: replace(varied, **kept), "modelled": tuple(sorted(known_options))}
        backend = replace(backend, **moved)
        if chosen is not None:
            evidence = dict.fromkeys((name for name in names if name not in kept), chosen.evidence)
            sources |= {f"backend.{at}.{name}": text for name, text in evidence.items() if name != "by_option"}
            errors |= chosen.errors
            spans |= {
                f"backend.{at}.{name}": _span(model, chosen, name) for name in chosen.intervals if name in evidence
            }
    return backend, sources, spans, errors


def _span(model: EngineModel, costs: OptionCosts, name: str) -> tuple[str, ...]:
    value, ends = getattr(model, name), costs.intervals[name]
    if name == "rate":
        return tuple(f"{value * float(end):.6g}B/s" for end in ends)
    return tuple(f"{value + parse_time(end):.6g}s" for end in ends)


def _on_hardware(backend: Engine, hw: Machine) -> Engine:
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
    chosen = values.pop("calibration", None)
    if chosen is None or chosen == {"name": "none"}:
        return values, None, {}
    return applied(values, build(Calibration, chosen, "calibration"), overridden)


# --- where numbers come from ---------------------------------------------------------------------------------------


Lent = TypeVar("Lent", Engine, Collective, ServingEngine)
Sourced = TypeVar("Sourced", Machine, Engine, Llm, Collective, ServingEngine)

ON_THE_COMMAND_LINE = "assumed: set on the command line"
UNSAID = "assumed: the configuration does not say where it comes from"


def numbers(instance: Any, at: str = "") -> Iterator[str]:
    """Yield the dotted key of every number in *instance*, a dataclass, and in the dataclasses that it holds.

    Booleans are not numbers here.  A tuple of dataclasses, such as a ramp, counts as one.
    """
    for field in fields(instance):
        value, key = getattr(instance, field.name), join(at, field.name)
        if is_dataclass(value):
            yield from numbers(value, key)
        elif isinstance(value, tuple) and any(is_dataclass(item) for item in value):
            yield key  # as one
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield key


def borrowed(backend: Lent, hw: Machine) -> Lent:
    """Return *backend*, a collective or a serving engine; what was *measured* on other hardware is *assumed*.

    What has no *measured_on* is left as it is, and so are sources of other kinds than *measured*.
    """
    if not backend.measured_on or hw.name in backend.measured_on:
        return backend
    there = backend.measured_on[0]
    sources = {
        keys: f"assumed: measured on {there}, not on {hw.name}: {text.partition(':')[2].strip()}"
        if text.startswith("measured:")
        else text
        for keys, text in backend.sources.items()
    }
    return replace(backend, sources=sources)


def sourced(instance: Sourced, at: str, new: Mapping[str, str]) -> Sourced:
    """Return *instance* with sources that speak for all of its numbers; *new* ones, by full key, replace its own.

    Keys of *sources* may name several numbers, divided by commas, or a group of them.  A number that nothing speaks
    for is `UNSAID`.  Raise a `ConfigError` for a source that begins with no known kind of evidence.
    """
    named = {key.removeprefix(f"{at}."): text for key, text in new.items() if key.startswith(f"{at}.")}
    last = _last.get(at)
    if last is None or last[0] != instance or last[1] != named:
        last = _last[at] = instance, named, _sourced(instance, at, dict(named))
    same: Sourced = last[2]
    return same


_last: dict[str, tuple[Any, dict[str, str], Any]] = {}
"""By key, what `sourced` was asked last, and its answer: in a sweep most parts are what they were."""


def _sourced(instance: Sourced, at: str, named: dict[str, str]) -> Sourced:
    every = list(numbers(instance))
    named = {key: text for key, text in named.items() if any(covers([key], number) for number in every)}
    sources: dict[str, str] = {}
    for keys, text in instance.sources.items():
        if text.partition(":")[0] not in EVIDENCE:
            raise ConfigError(
                f"{at}.sources.{keys}: {text!r} must begin with one of {', '.join(EVIDENCE)} and a colon"
            )
        left = [key for key in split_keys(keys) if not covers(named, key)]
        sources |= {", ".join(left): text} if left else {}
    sources |= named
    said = [key for keys in sources for key in split_keys(keys)]
    sources |= {number: UNSAID for number in every if not covers(said, number)}
    return replace(instance, sources=sources)


# --- as it is written ----------------------------------------------------------------------------------------------


_HYDRA = """\
# A run, complete; to repeat it: pdsim run --config-path FOLDER --config-name config, FOLDER being this file's,
# absolute
defaults: [_self_, {override hydra/hydra_logging: none}, {override hydra/job_logging: none}]
hydra: {output_subdir: null, run: {dir: .}}
"""
"""What makes the file a primary configuration of Hydra's, and keeps Hydra from writing files of its own."""

_TRUTH = ("y", "yes", "n", "no", "true", "false", "on", "off")
"""What YAML takes for a truth value, unless it is quoted."""

_PLAIN = frozenset((str, int, bool, type(None)))


@dataclass
class _Part:
    """A top-level part of a configuration, and what it is written as; texts are made when they are asked for."""

    value: Any  # a frozen dataclass or a plain value, and with the backend its policy
    plain: Any  # what JSON and YAML can hold: never changed, for others have it, too
    yaml: str = ""
    json: str = ""


_written: dict[str, _Part] = {}
"""The part of each key that was written last."""


def _parts(config: Config) -> dict[str, _Part]:
    parts: dict[str, _Part] = {}
    for field in dataclasses.fields(config):
        key, value = field.name, getattr(config, field.name)
        if key == "policy" or value == math.inf:
            continue
        if key == "backend":
            value = value, config.policy
        known = _written.get(key)
        if known is None or not (known.value is value or _alike(known.value, value)):
            data = plain(value) if key != "backend" else {**plain(value[0]), "policy": plain(value[1])}
            known = _written[key] = _Part(value, data)
        parts[key] = known
    return parts


def _alike(one: Any, other: Any) -> bool:
    return bool(one == other) and repr(one) == repr(other)


def as_written(config: Config) -> dict[str, Any]:
    """Return *config* as `pdsim.config.loading.load` takes it: with the policy under the key of the backend.

    What is below the top level is shared with later answers, and not to be changed.
    """
    return {key: part.plain for key, part in _parts(config).items()}


def config_yaml(config: Config) -> str:
    """Return *config* as YAML that gives the same `Config` again.

    It does so alone, or as the primary configuration of `pdsim run`.

    An infinite rate is left out: it is the default, and no quantity that a configuration could state.
    """
    texts = [_HYDRA]
    for key, part in _parts(config).items():
        part.yaml = part.yaml or _yaml({key: part.plain})
        texts.append(part.yaml)
    return "".join(texts)


def canonical(config: Config, *without: str) -> str:
    """Return all that *config* says but the top-level keys *without*, as JSON whose keys are sorted.

    Equal configurations give equal texts, in every process: a sweep names its points by a hash of
    it.
    """
    parts = _parts(config)
    texts = []
    for key in sorted(parts.keys() - set(without)):
        part = parts[key]
        part.json = part.json or json.dumps(part.plain, sort_keys=True, ensure_ascii=True)
        texts.append(f'"{key}": {part.json}')
    return f"{{{', '.join(texts)}}}"


def plain(value: Any) -> Any:
    """Return *value* in what JSON and YAML can hold; a number that is not finite becomes None.

    Dataclasses and mappings become dictionaries with texts as keys, tuples lists, NumPy's scalars
    plain ones, and what is none of those its text.  Fields that are infinite are left out.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is float:
        return value if math.isfinite(value) else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {name: plain(item) for name, item in fields.items() if item != math.inf}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "item"):  # a numpy scalar
        return plain(value.item())
    return value if isinstance(value, int | float | str) else str(value)


def _yaml(values: Mapping[str, Any]) -> str:
    import yaml  # type: ignore[import-untyped]  # comes with OmegaConf, its stubs do not

    text: str = yaml.dump(values, Dumper=_dumper(), default_flow_style=False, allow_unicode=True, sort_keys=False)
    return text


@cache
def _dumper() -> Any:
    import yaml

    base: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

    def text(dumper: Any, value: str) -> Any:
        quoted = value.lower() in _TRUTH or is_number(value)
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="'" if quoted else None)

    dumper: Any = type("Dumper", (base,), {"ignore_aliases": lambda *_: True})
    dumper.add_representer(str, text)
    return dumper
