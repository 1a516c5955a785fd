"""From plain mappings, as YAML and the command line give them, to the frozen dataclasses of `pdsim.config`.

Every key is known, every value has the type and the unit of its field, or a `ConfigError` says in one line for each
mistake what was written, what the rule is and what to write instead.  Knows neither Hydra nor OmegaConf.
"""

from __future__ import annotations

import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, asdict, fields, is_dataclass, replace
from functools import cache
from typing import Any, TypeVar

from pdsim import plugins
from pdsim.calibration.definition import Calibration, applied, covers
from pdsim.calibration.host_factor import on_host
from pdsim.config import Config
from pdsim.costs import Collective, Engine, EngineModel
from pdsim.errors import ConfigError
from pdsim.guards import instead, near
from pdsim.hardware import EVIDENCE, Machine
from pdsim.kv.policy import Policy
from pdsim.serving.settings import Llm, ServingEngine

__all__ = ["build", "defaults", "experiments", "load", "numbers"]

T = TypeVar("T")
Lent = TypeVar("Lent", Engine, Collective, ServingEngine)
Sourced = TypeVar("Sourced", Machine, Engine, Llm, Collective, ServingEngine)

SOURCE, SOURCES, OTHERS = "source", "sources", "others"
"""In YAML a mapping has the sources of its own keys beside them, under `SOURCE`; `OTHERS` speaks for all else in it."""
ON_THE_COMMAND_LINE = "assumed: set on the command line"
_HOST = [f"backend.{at}.{name}" for at in ("intra", "inter") for name in ("call", "descriptor", "latency", "ramp")]
UNSAID = "assumed: the configuration does not say where it comes from"


def load(values: Mapping[str, Any], overridden: Iterable[str] = ()) -> Config:
    """Return the configuration in *values*; *overridden* are the dotted keys that were set on the command line.

    The options of the experiment are typed and completed by its own `Options`.  The source called ``"gpu"`` speaks for
    all numbers below ``gpu`` but those of a longer name, ``"nodes, gpus"`` for two; what was overridden is *assumed*.
    A calibration is laid over machine and engine, and under what was overridden.  Raise a `ConfigError`.
    """
    keys = tuple(overridden)
    values, policy = _without_policy(values)
    values, calibration, calibrated = _calibrated(values, keys)
    config = build(Config, values)
    backend, changed = _varied(config.backend, keys, config.target)
    backend = _on_hardware(backend, config.hw)
    if config.host_factor != 1.0 and config.target == "model":
        own = {key: f"assumed: times host_factor={config.host_factor:g}" for key in _HOST if not covers(keys, key)}
        backend, changed = on_host(backend, config.host_factor), changed | own
    new = calibrated | changed | dict.fromkeys(keys, ON_THE_COMMAND_LINE)
    if calibration is not None and changed:  # what the calibration says of these numbers is not so with these options
        spans = {key: span for key, span in calibration.intervals.items() if key not in changed}
        calibration = replace(calibration, intervals=spans)
    return replace(
        config,
        policy=build(Policy, policy, "backend.policy"),
        experiment=_experiment(config.experiment),
        host_factor=1.0,  # it is in the backend now: a run that is repeated changes nothing
        calibration=calibration,
        hw=_sourced(config.hw, "hw", new),
        backend=_sourced(_borrowed(backend, config.hw), "backend", new),
        model=_sourced(config.model, "model", new),
        engine=_sourced(_borrowed(config.engine, config.hw), "engine", new),
        collective=None
        if config.collective is None
        else _sourced(_borrowed(config.collective, config.hw), "collective", new),
    )


def build(cls: type[T], values: object, at: str = "") -> T:
    """Return a *cls*, a dataclass, from the mapping *values* found at the dotted key *at*.

    Raise a `ConfigError` with one line for every unknown key, missing key and value of a wrong type, unit or range.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{at} must have keys of its own ({', '.join(_names(cls))}), got {values!r}")
    hints = _hints(cls)  # type: ignore[arg-type]  # a class is hashable
    if SOURCES in hints:
        values = _with_sources(values)
    problems = [_unknown(str(key), hints, at) for key in values if key not in hints]
    found: dict[str, Any] = {}
    for field in fields(cls):  # type: ignore[arg-type]  # typing has no public name for a dataclass
        key = _join(at, field.name)
        if field.name in values:
            try:
                found[field.name] = _convert(hints[field.name], values[field.name], key)
            except ConfigError as error:
                problems.append(str(error))
        elif _required(field):
            problems.append(f"{key} is missing and has no default; set {key}=VALUE")
    if problems:
        raise ConfigError("\n".join(problems))
    try:
        return cls(**found)
    except ValueError as error:
        raise ConfigError(_located(str(error), cls, at)) from error


def defaults(cls: type = Config) -> dict[str, Any]:
    """Return the defaults of *cls* as plain data: what can be set, for a reader of the composed configuration."""
    plain: dict[str, Any] = {}
    for field in fields(cls):
        if field.name == "policy":
            plain["backend"] = {"policy": asdict(Policy())}
        elif not _required(field):
            make = typing.cast("Callable[[], Any]", field.default_factory)
            value = field.default if field.default is not MISSING else make()
            plain[field.name] = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    return plain


def experiments() -> list[str]:
    """Return the names of the experiments that are installed."""
    return list(plugins.names(plugins.EXPERIMENTS))


def numbers(instance: Any, at: str = "") -> Iterator[str]:
    """Yield the dotted key of every number in *instance*, a dataclass, and in the dataclasses that it holds."""
    for field in fields(instance):
        value, key = getattr(instance, field.name), _join(at, field.name)
        if is_dataclass(value):
            yield from numbers(value, key)
        elif isinstance(value, tuple) and any(is_dataclass(item) for item in value):
            yield key  # as one
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield key


def _without_policy(values: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return *values* without ``backend.policy``, and that: it is written with the engine, which need not know it."""
    if "policy" in values:
        raise ConfigError(f"unknown key policy; it belongs to the backend: set backend.policy={values['policy']!r}")
    found, backend = dict(values), values.get("backend")
    if not isinstance(backend, Mapping):
        return found, {}
    found["backend"] = {key: value for key, value in backend.items() if key != "policy"}
    return found, backend.get("policy", {})


# --- values ---------------------------------------------------------------------------------------------------------


def _convert(hint: Any, value: Any, at: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _parsed(arguments[1], value, at)
    if origin in (types.UnionType, typing.Union):
        inner = [argument for argument in arguments if argument is not type(None)]
        return None if value is None else _convert(inner[0], value, at)
    if origin is typing.Literal:
        if value not in arguments:
            raise ConfigError(f"{at} must be one of {', '.join(map(str, arguments))}, got {value!r}")
        return value
    if origin is tuple:
        return _tuple(arguments[0], value, at)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(arguments[1], value, at)
    if is_dataclass(hint):
        return build(typing.cast("type[Any]", hint), value, at)
    return value if hint is Any else _scalar(hint, value, at)


def _parsed(parse: Any, value: Any, at: str) -> Any:
    try:
        return parse(value)
    except ValueError as error:
        raise ConfigError(f"{at}: {error}") from error


def _tuple(hint: Any, value: Any, at: str) -> tuple[Any, ...]:
    # one value alone is a list of one, so that --multirun can sweep over what is otherwise a list
    values = value if isinstance(value, list | tuple) else [value]
    return tuple(_convert(hint, item, f"{at}[{index}]") for index, item in enumerate(values))


def _mapping(hint: Any, value: Any, at: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{at} must be a mapping of keys to values, got {value!r}; write {at}={{key: value}}")
    plain = {key: str(item).lower() if hint is str and isinstance(item, bool) else item for key, item in value.items()}
    return {str(key): _convert(hint, item, _join(at, str(key))) for key, item in plain.items()}


def _scalar(hint: type, value: Any, at: str) -> Any:
    if hint is bool and isinstance(value, bool):
        return value
    if hint is str and isinstance(value, str):
        return value
    if hint is str and isinstance(value, int) and not isinstance(value, bool):
        return str(value)  # YAML reads a name of digits as a number
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if is_number and (hint is float or (hint is int and float(value).is_integer())):
        return hint(value)
    rules = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text"}
    raise ConfigError(f"{at} must be {rules.get(hint, hint.__name__)}, got {value!r}")


# --- keys -----------------------------------------------------------------------------------------------------------


def _names(cls: type) -> list[str]:
    return [field.name for field in fields(cls)]


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


def _required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _join(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name


def _unknown(key: str, known: Iterable[str], at: str) -> str:
    names = list(known)
    hint = near(key, names, _join(at, "{}"))
    return f"unknown key {_join(at, key)}; {hint}{at or 'a configuration'} has {', '.join(names)}"


def _located(message: str, cls: type, at: str) -> str:
    """Return *message* of a `__post_init__` with the full key, of which it knows only the end, and the way out."""
    owner, _, rest = message.partition(" ")
    name = owner.rpartition(".")[2].partition("=")[0]
    if name not in _hints(cls):
        return f"{at}: {message}" if at else message
    key = _join(at, name)
    value = owner.partition("=")[1] + owner.partition("=")[2]
    return f"{key}{value} {rest}; leave {key} out to keep what the configuration has"


# --- the experiment and the evidence ---------------------------------------------------------------------------------


def _experiment(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the name and all options of an experiment, typed by its own `Options`."""
    given = dict(values)
    name = given.pop("name", None)
    if name not in experiments():
        raise ConfigError(f"experiment.name={name} does not exist; {instead(str(name), experiments())}")
    options = build(plugins.resolve(plugins.EXPERIMENTS, name).Options, given, "experiment")
    return {"name": name} | {field.name: getattr(options, field.name) for field in fields(options)}


def _alias(backend: Engine) -> Engine:
    """Return *backend*; ``mooncake_tcp`` is Mooncake that is told to use TCP, which has no device to choose."""
    if backend.name != "mooncake_tcp":
        return backend
    options = {name: value for name, value in backend.options.items() if name != "device"}
    return replace(backend, options={"MC_FORCE_TCP": "1", **options})


def _varied(backend: Engine, overridden: Iterable[str], target: str) -> tuple[Engine, dict[str, str]]:
    """Return *backend* with what its options change of its costs, and the sources of what they changed, by full key.

    What is *overridden* by hand stays as it is.  Raise a `ConfigError` if the model does not know these options.
    """
    sources: dict[str, str] = {}
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
    return backend, sources


def _with_sources(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return *part*, a group, with one mapping ``sources`` by dotted key in place of every ``source`` within it."""
    sources: dict[str, Any] = {}

    def without(values: Mapping[str, Any], at: str) -> dict[str, Any]:
        found = {}
        for key, value in values.items():
            if key == SOURCE:
                for names, text in value.items() if isinstance(value, Mapping) else ((OTHERS, value),):
                    keys = [at if name == OTHERS else _join(at, name) for name in _split(str(names))]
                    sources[", ".join(keys)] = text
            else:
                found[key] = without(value, _join(at, str(key))) if isinstance(value, Mapping) else value
        return found

    plain = without(part, "")
    return {**plain, SOURCES: {**part.get(SOURCES, {}), **sources}} if sources else plain


def _on_hardware(backend: Engine, hw: Machine) -> Engine:
    """Return *backend* with rates of NVLink as shares of the line rate of *hw*."""
    models = {name: getattr(backend, name) for name in ("intra", "inter")}
    moved = {
        name: model.on_line(hw.interconnect.rate) for name, model in models.items() if model and model.path == "nvlink"
    }
    return replace(backend, **{name: model for name, model in moved.items() if model is not models[name]})


def _borrowed(backend: Lent, hw: Machine) -> Lent:
    """Return *backend*, a collective or a serving engine; what was *measured* on other hardware is *assumed*."""
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


def _calibrated(
    values: dict[str, Any], overridden: tuple[str, ...]
) -> tuple[dict[str, Any], Calibration | None, dict[str, str]]:
    """Return *values* without their calibration but with its parameters, it, and the sources of what it set."""
    chosen = values.pop("calibration", None)
    if chosen is None or chosen == {"name": "none"}:
        return values, None, {}
    return applied(values, build(Calibration, chosen, "calibration"), overridden)


def _sourced(instance: Sourced, at: str, new: Mapping[str, str]) -> Sourced:
    """Return *instance* with sources that speak for all of its numbers; *new* ones, by full key, replace its own."""
    found = list(numbers(instance))
    named = {key.removeprefix(f"{at}."): text for key, text in new.items() if key.startswith(f"{at}.")}
    named = {key: text for key, text in named.items() if any(covers([key], number) for number in found)}
    sources: dict[str, str] = {}
    for keys, text in instance.sources.items():
        if text.partition(":")[0] not in EVIDENCE:
            raise ConfigError(f"{at}.sources.{keys}: {text!r} must begin with one of {', '.join(EVIDENCE)} and a colon")
        left = [key for key in _split(keys) if not covers(named, key)]
        sources |= {", ".join(left): text} if left else {}
    sources |= named
    said = [key for keys in sources for key in _split(keys)]
    sources |= {number: UNSAID for number in found if not covers(said, number)}
    return replace(instance, sources=sources)


def _split(keys: str) -> list[str]:
    return [key.strip() for key in keys.split(",")]
