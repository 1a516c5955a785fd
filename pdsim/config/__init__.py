# SPDX-License-Identifier: Apache-2.0
"""The schema: the whole configuration of a run as frozen dataclasses, made of plain mappings, and written again.

`build` types any dataclass, `load` what was composed, `config_yaml` writes it; unchanged parts stay between calls.
"""

from __future__ import annotations

import json
import marshal
import math
import operator
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, is_dataclass, replace
from functools import cache, cached_property, partial
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

import msgspec

from pdsim.calibration.definition import Calibration, drawn, of_usual_host, on_host
from pdsim.compute.forward import Compute
from pdsim.config import presets
from pdsim.core import plugins
from pdsim.core.errors import ConfigError, instead, near, within
from pdsim.core.units import Seconds, instead_of, is_number, parse_time
from pdsim.hardware.costs import Collective, Engine, EngineModel, Jitter, OptionCosts
from pdsim.hardware.machine import EVIDENCE, Machine
from pdsim.kv.policy import Policy
from pdsim.models.llm import Llm, Parallel
from pdsim.serving.autoscale import Autoscale
from pdsim.serving.failures import Failures
from pdsim.serving.settings import ELSEWHERE, NO_KEYS, Cache, Kv, Live, SchedulerLimits, ServingEngine, Slo, Workload


def _address(text: object) -> str:
    try:
        return str(ip_address(str(text)))
    except ValueError:
        raise ValueError(f"{text!r} is not an IP address such as 127.0.0.1") from None


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How ``target=real`` runs the processes of its ranks."""

    bind: Annotated[str, _address] = "127.0.0.1"  # that ranks and engines listen on; any but loopback can be reached
    silence: Seconds = 0.0  # of a rank, after which it is ended; 0: experiment.deadline, 300 s where there is none
    share_gpus: bool = False  # ranks of the GPUs of `hw` share those of this machine, which has fewer


@dataclass(frozen=True, kw_only=True)
class Check:
    """Checks that can be turned off."""

    plausible: bool = True  # refuse quantities that nothing has: `pdsim.config.quantities.BOUNDS`


@dataclass(frozen=True, kw_only=True)
class ExperimentOptions:
    """The options of one experiment, whose module extends it with a frozen dataclass.

    Its fields are the keys below ``experiment``: annotations give type, unit and range; what several keys may not be
    together, the module's function ``check`` says.  The default of ``name`` is the name that the module is
    registered under.
    """

    name: str  # of the experiment, as it is registered

    @classmethod
    def of(cls, config: Config) -> Self:
        """Return the options of *config*, of this class; raise a `ConfigError` if they are of another one."""
        if not isinstance(config.experiment, cls):
            raise ConfigError(
                f"experiment={config.experiment.name} has options of its own, not those of {cls.__module__}; set "
                f"experiment={vars(cls)['name']}"
            )
        return config.experiment

    @property
    def silence(self) -> float | None:
        """Seconds after which ``target=real`` ends a silent rank: the field ``deadline``; None without one."""
        return getattr(self, "deadline", None)

    @staticmethod
    def class_for(values: Mapping[str, Any]) -> type[ExperimentOptions]:
        """Return the class of the options in *values*, by the name in them; raise a `ConfigError` without one."""
        name, known = values.get("name"), plugins.names(plugins.EXPERIMENTS)
        if name not in known:
            raise ConfigError(f"experiment.name={name} does not exist; {instead(str(name), known)}")
        for each in vars(plugins.resolve(plugins.EXPERIMENTS, name)).values():
            if isinstance(each, type) and issubclass(each, ExperimentOptions) and vars(each).get("name") == name:
                return each
        raise ConfigError(
            f"experiment={name}: {plugins.target(plugins.EXPERIMENTS, name)} declares no options of that name; "
            f"give it a frozen dataclass that extends pdsim.config.ExperimentOptions, with name: str = {name!r}"
        )


@dataclass(frozen=True, kw_only=True)
class Simulate:
    """How ``target=model`` simulates; no choice here changes a result."""

    fold: Annotated[str, "one of auto, off"] = "auto"  # of ranks that do the same, two for all; off: every rank


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run: what to run (*experiment*), on what (*hw*, *backend*, *target*), and everything that it depends on.

    Numbers are in SI units.  *hw*, *backend*, *model*, *engine* and *collective* keep the source of each of theirs.
    """

    target: Annotated[str, "one of model, real, live"]  # the simulation, transfer engines, serving deployments
    experiment: ExperimentOptions  # the options of the experiment that is run, with its name
    hw: Machine
    backend: Engine
    model: Llm
    parallel: Parallel
    # what it set is in hw and backend already; the rest says how good that is
    calibration: Calibration | None = None
    workload: Workload = field(default_factory=Workload)
    kv: Kv = field(default_factory=Kv)
    cache: Cache = field(default_factory=Cache)  # of prefixes
    policy: Policy = field(default_factory=Policy)  # of the backend, under whose key it is written
    scheduler: SchedulerLimits = field(default_factory=SchedulerLimits)
    engine: ServingEngine = field(default_factory=ServingEngine)
    compute: Compute = field(default_factory=Compute)
    collective: Collective | None = None  # what groups of ranks gather with
    launch: Launch = field(default_factory=Launch)
    slo: Slo = field(default_factory=Slo)
    failures: Failures = field(default_factory=Failures)
    autoscale: Autoscale = field(default_factory=Autoscale)
    check: Check = field(default_factory=Check)
    live: Live = field(default_factory=Live)  # the servers of target=live
    # of the model: the host's part of a transfer, as a multiple of the calibrated one's; 0: the median of its hosts
    host_factor: Annotated[float, ">= 0 and <= 10"] = 0.0
    draw_host: bool = False  # of the model: draw `host_factor` from the seed, as the calibration's hosts differ
    jitter: Jitter = field(default_factory=Jitter)  # of the model
    simulate: Simulate = field(default_factory=Simulate)  # how the model does it
    # of the model: "timing" keeps sizes only, "tracked" also bytes
    memory: Annotated[str, "one of timing, tracked"] = "timing"
    # of the model: at how many instants, at least, the use of links and memories is kept; 0: never
    samples: Annotated[int, ">= 0 and <= 100000"] = 0
    # of the laws of simulation, in docs/reliability.md: "on" watches the run and fails it
    checks: Annotated[str, "one of on, off"] = "off"
    seed: Annotated[int, ">= 0 and < 9223372036854775808"] = 0  # the same one repeats a run of the model bit for bit
    output: str = "results"  # the folder that gets a folder for each run


# --- from plain mappings -------------------------------------------------------------------------------------------

T = TypeVar("T")
Known = dict[str, tuple[bytes, Any]]


def build(cls: type[T], values: object, at: str = "", known: Known | None = None) -> T:
    """Return a *cls*, a dataclass, from the mapping *values* found at the dotted key *at*.

    Raise a `ConfigError` with one line for every unknown key, missing key and value of a wrong type, unit or range.

    Annotations are plain types, `Annotated` with a parser and a rule, `Literal`, tuples, mappings, unions with None
    and dataclasses.  A rule is what a message says after "must be", ``"> 0 and <= 1"``, ``"one of a, b"`` or, of a
    list, ``"non-empty"``; the last one counts.  A dataclass with a static method ``class_for`` chooses its subclass.
    A class with a field ``sources`` may have a ``source`` in any mapping below it.  With *known*, fields that have
    not changed since the last call are not made again.
    """
    if not isinstance(values, Mapping):
        names = ", ".join(each.name for each in fields(cls))  # type: ignore[arg-type]  # typing cannot name them
        way = f"; set one of them, as {at}.{fields(cls)[0].name}=VALUE"  # type: ignore[arg-type]
        raise ConfigError(f"{at} must have keys of its own ({names}), got {values!r}{way}")
    hints = hints_of(cls)  # type: ignore[arg-type]  # a class is hashable
    if "sources" in hints:
        values = _gathered(values)
    problems = [_unknown(str(key), cls, at) for key in values if key not in hints]
    made, missing = dict[str, Any](), list[str]()
    for each in fields(cls):  # type: ignore[arg-type]  # typing has no public name for a dataclass
        key = join(at, each.name)
        if each.name in values:
            try:
                made[each.name] = _made(hints[each.name], values[each.name], key, known)
            except ConfigError as error:
                problems.append(str(error))
        elif required(each):
            missing.append(key)
    if missing:  # several, as of a file that is empty
        one = f"is missing and has no default; set {missing[0]}=VALUE"
        several = "are missing and have no default; begin with a file that has them"
        problems.append(f"{', '.join(missing)} {several if missing[1:] else one}")
    if problems:
        raise ConfigError("\n".join(problems))
    try:
        return cls(**made)
    except ValueError as error:
        raise ConfigError(_located(str(error), cls, at)) from error


def _made(hint: Any, value: Any, at: str, known: Known | None) -> Any:
    if known is None:
        return convert(hint, value, at)
    try:
        content = marshal.dumps(value, 2)  # which tells 1 from True and from 1.0, as == does not
    except ValueError:
        return convert(hint, value, at)
    if at not in known or known[at][0] != content:
        known[at] = content, convert(hint, value, at)
    return known[at][1]


def convert(hint: Any, value: Any, at: str) -> Any:
    """Return the plain *value* found at the dotted key *at* as the annotation *hint* has it, as `build` does.

    Of a union only the first member other than None is tried.  Raise a `ConfigError` as `build` does.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        parsers, rules = _annotated(hint)
        try:
            made = parsers[0](value) if parsers else convert(arguments[0], value, at)
        except ValueError as error:
            raise ConfigError(f"{at}: {error}") from error
        if rules and not _holds(rules[-1], made):
            hint = near(str(value), rules[-1].removeprefix("one of ").split(", ")).strip() or _LEAVE_OUT.format(at)
            raise ConfigError(f"{at} must be {rules[-1]}, got {value!r}; {hint}")
        return made
    if origin in (types.UnionType, typing.Union):
        inner = [argument for argument in arguments if argument is not type(None)]
        return None if value is None else convert(inner[0], value, at)
    if origin is typing.Literal:
        if value not in arguments:
            raise ConfigError(f"{at} must be one of {', '.join(map(str, arguments))}, got {value!r}")
        return value
    if origin is tuple:
        # one value alone is a list of one, so that --multirun can sweep over what is otherwise a list
        values = value if isinstance(value, list | tuple) else [value]
        return tuple(convert(arguments[0], item, f"{at}[{index}]") for index, item in enumerate(values))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(arguments[0], arguments[1], value, at)
    if is_dataclass(hint):
        class_for = getattr(hint, "class_for", None)  # of a dataclass whose subclass depends on the values
        hint = class_for(value) if class_for and isinstance(value, Mapping) else hint
        return build(typing.cast("type[Any]", hint), value, at)
    return value if hint is Any else _scalar(hint, value, at)


@cache
def _annotated(hint: Any) -> tuple[list[Any], list[str]]:
    kinds = typing.get_args(hint)[1:]
    return [*filter(callable, kinds)], [each for each in kinds if isinstance(each, str)]


_LEAVE_OUT = "leave {} out to keep what the configuration has"
_COMPARED = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}


def _holds(rule: str, value: Any) -> bool:
    if rule == "non-empty":
        return len(value) > 0
    if rule.startswith("one of "):
        return value in rule.removeprefix("one of ").replace("''", "").split(", ")
    bounds = (part.split() for part in rule.split(" and "))
    return all(_COMPARED[sign](value, type(value)(bound)) for sign, bound in bounds)


def _mapping(name: Any, hint: Any, value: Any, at: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{at} must be a mapping of keys to values, got {value!r}; write {at}={{key: value}}")
    made = {}
    for key, item in value.items():
        plain = str(item).lower() if hint is str and isinstance(item, bool) else item
        kind = int if hint is Any and type(item) is int else hint  # which are bounded
        made[convert(name, str(key), at)] = convert(kind, plain, join(at, str(key)))
    return made


def _scalar(hint: type, value: Any, at: str) -> Any:
    # Whole floats pass as integers, integers as floats and as text; nothing else is converted.
    most = sys.float_info.max if hint is float else 2**63 - 1
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= most
    if (hint is bool and isinstance(value, bool)) or (hint is str and isinstance(value, str)):
        return value
    if hint is str and number and isinstance(value, int):
        return str(value)  # YAML reads a name of digits as a number
    if number and (hint is float or (hint is int and float(value).is_integer())):
        return hint(value)
    rules = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text"}
    meant = instead_of(value, whole=hint is int) if hint in (int, float) and isinstance(value, str) else ""
    raise ConfigError(f"{at} must be {rules.get(hint, hint.__name__)}, got {value!r}{meant}")


@cache
def hints_of(cls: type) -> dict[str, Any]:
    """Return the annotations of *cls* by name, with parsers and rules."""
    return typing.get_type_hints(cls, include_extras=True)


def required(field: Field[Any]) -> bool:
    """Return whether *field* of a dataclass has no default."""
    return field.default is MISSING and field.default_factory is MISSING


def _unknown(key: str, cls: type, at: str) -> str:
    name, names, full = ELSEWHERE.get(key, key), list(hints_of(cls)), join(at, "{}")
    hint = near(name, names, full, 0.85) or within(name, Config, NO_KEYS) or near(name, names, full)
    schema = "; all keys: pdsim list hw --schema" if at.partition(".")[0] == "hw" else ""
    return f"unknown key {join(at, key)}; {hint}{at or 'a configuration'} has {', '.join(names)}{schema}"


def _located(message: str, cls: type, at: str) -> str:
    owner, _, rest = message.partition(" ")
    name = owner.rpartition(".")[2].partition("=")[0]
    if name not in hints_of(cls):
        return f"{at}: {message}" if at else message
    key = join(at, name)
    value = owner.partition("=")[1] + owner.partition("=")[2]
    return f"{key}{value} {rest}; {_LEAVE_OUT.format(key)}"


def join(at: str, name: str) -> str:
    """Return the dotted key of *name* below *at*, which is empty at the top."""
    return f"{at}.{name}" if at else name


def _gathered(part: Mapping[str, Any]) -> Mapping[str, Any]:
    # one mapping ``sources`` by dotted key in place of every ``source`` within *part*
    sources: dict[str, Any] = {}

    def without(values: Mapping[str, Any], at: str) -> dict[str, Any]:
        kept = {}
        for key, value in values.items():
            if key == "source":
                for names, text in value.items() if isinstance(value, Mapping) else (("others", value),):
                    keys = [at if name == "others" else join(at, name) for name in _split_keys(str(names))]
                    sources[", ".join(keys)] = text
            else:
                kept[key] = without(value, join(at, str(key))) if isinstance(value, Mapping) else value
        return kept

    rest, own = without(part, ""), part.get("sources", {})
    return {**rest, "sources": {**own, **sources}} if sources and isinstance(own, Mapping) else rest


def _split_keys(keys: str) -> list[str]:
    return [key.strip() for key in keys.split(",")]


# --- the whole configuration ---------------------------------------------------------------------------------------

_HOST = [f"backend.{at}.{name}" for at in ("intra", "inter") for name in ("call", "descriptor", "latency", "ramp")]

_known: Known = {}  # by key, what a value was when it was loaded last, and what came of it


def load(values: Mapping[str, Any], overridden: Iterable[str] = (), folders: Sequence[Path] = ()) -> Config:
    """Return the configuration in *values*; *overridden* are the dotted keys that were set on the command line.

    A calibration is laid over machine and engine, options of the engine change its costs, and each number has its
    source, of `pdsim.hardware.machine.EVIDENCE`.  What was overridden is *assumed*, and no calibration replaces it.
    Profiles of one's own *folders* come first.  *values* is not changed.  Raise a `ConfigError`.
    """
    keys = tuple(overridden)
    if "policy" in values:
        raise ConfigError("unknown key policy; it belongs to the backend: write backend.policy.KEY=VALUE")
    (values, open_keys), policy = presets.opened(values), dict[str, Any]()
    if isinstance(values.get("backend"), Mapping):
        values["backend"] = dict(values["backend"])
        policy = values["backend"].pop("policy", {})
    named, calibration, new = values.pop("calibration", None), None, dict[str, str]()
    if named is not None and named != {"name": "none"}:
        whole, one = build(Calibration, named, "calibration"), values.get("host_factor") or values.get("draw_host")
        calibration = whole if one else of_usual_host(whole)
        values, new = _calibrated(values, calibration, keys)
        spans = {key: span for key, span in calibration.intervals.items() if not covers(keys, key)}
        # no parameters any more, for they are in the values: a run that is repeated changes nothing
        calibration = replace(calibration, parameters={}, intervals=spans)
    config, preset = presets.filled(build(Config, values, known=_known), open_keys)
    if config.compute.name in (presets.AUTO, presets.OPERATORS):
        made = partial(build, Compute, at="compute", known=_known)
        chosen = presets.computing(config, values["compute"], keys, folders, made)
        graphs = config.compute.graph_tokens if "compute.graph_tokens" in open_keys else chosen.graph_tokens
        config = replace(config, compute=replace(chosen, graph_tokens=graphs))
    config, slowed = presets.on_host(config)
    backend, changed, of_options, errors = _with_options(config.backend, keys, config.target)
    backend = _on_hardware(backend, config.hw)
    factor, why = _host(config, calibration)
    if factor != 1.0:
        own = {key: f"assumed: times host_factor={factor:g}{why}" for key in _HOST if not covers(keys, key)}
        backend, changed = on_host(backend, factor), changed | own
    if calibration is not None:
        # what the calibration says of changed numbers is not so any more
        spans = {key: span for key, span in calibration.intervals.items() if key not in changed}
        spans |= {key: span for key, span in of_options.items() if key in changed}
        host = factor if config.host_factor or config.draw_host else calibration.host
        calibration = replace(calibration, host=host, intervals=spans)
        for part in ("held_out", "held_out_reads") if errors else ():
            if (held := getattr(calibration, part)) is not None:
                how = f"{held.how}; with these options, errors of those who measured them"
                own_errors = replace(held, how=how, floor=None, floor_p95=None, **errors)
                calibration = replace(calibration, **{part: own_errors})
    new |= changed | slowed | dict.fromkeys(keys, ON_THE_COMMAND_LINE)
    parts = {name: getattr(config, name) for name in ("hw", "model", "engine", "collective")} | {"backend": backend}
    return replace(
        config,
        policy=build(Policy, policy | preset if isinstance(policy, Mapping) else policy, "backend.policy"),
        host_factor=0.0,  # it is in the backend now: a run that is repeated changes nothing
        draw_host=False,
        calibration=calibration,
        **{name: part and _sourced(_borrowed(part, config.hw), name, new) for name, part in parts.items()},
    )


def covers(keys: Iterable[str], number: str) -> bool:
    """Return whether one of the dotted *keys* is *number* or stands above it.

    >>> covers(["backend.intra"], "backend.intra.call"), covers(["backend.intra"], "backend.intranode")
    (True, False)
    """
    return any(f"{number}.".startswith(f"{key}.") for key in keys)


def _calibrated(
    values: dict[str, Any], calibration: Calibration, by_hand: Sequence[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    # *values* with the parameters of *calibration* that were not set *by_hand*, and their sources.
    for group in ("hw", "backend"):
        name = values[group].get("name") if isinstance(values.get(group), Mapping) else None
        if name not in (known := getattr(calibration, group)):
            raise ConfigError(
                f"calibration={calibration.name} is for {group}={' or '.join(known)}, not for {group}={name}; leave "
                f"calibration out for the one of this pair, if there is one, or set calibration=none"
            )
    sources = {key: calibration.evidence(key) for key in calibration.parameters if not covers(by_hand, key)}
    for key in sources:
        *path, last = key.split(".")
        if path[:1] not in (["hw"], ["backend"]):
            raise ConfigError(f"calibration.parameters.{key} must begin with one of hw, backend")
        below = values
        for name in path:  # the caller's mappings stay as they are
            if not isinstance(below.get(name), Mapping):
                lack = f"this configuration has no {name} that it could belong to"
                raise ConfigError(f"calibration.parameters.{key}: {lack}")
            below[name] = below = dict(below[name])
        below[last] = calibration.parameters[key]
    return values, sources


def _host(config: Config, calibration: Calibration | None) -> tuple[float, str]:
    if config.target != "model":
        return 1.0, ""
    if config.draw_host and config.host_factor:
        raise ConfigError(
            f"draw_host=true draws the host_factor; leave out draw_host or host_factor={config.host_factor:g}"
        )
    if not config.draw_host:
        return config.host_factor or 1.0, ""
    if calibration is None or len(calibration.hosts) < 2:
        name = "none" if calibration is None else calibration.name
        lack = f"calibration={name} knows none; set host_factor="
        raise ConfigError(f"draw_host=true needs a calibration of several hosts, and {lack}")
    (factor,) = drawn(calibration.hosts, config.seed, 1)
    return factor, f", drawn from seed={config.seed} as {len(calibration.hosts)} hosts differ"


def defaults() -> dict[str, Any]:
    """Return the defaults of a `Config` as plain data, `presets.KEYS` as ``auto``, *policy* below ``backend``."""
    values: dict[str, Any] = {"backend": {"policy": asdict(Policy())}}
    for each in fields(Config):
        if not required(each) and each.name != "policy":
            value = each.default if each.default_factory is MISSING else each.default_factory()
            values[each.name] = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    return presets.left_open(values)


def _with_options(
    backend: Engine, by_hand: Sequence[str], target: str
) -> tuple[Engine, dict[str, str], dict[str, tuple[str, ...]], dict[str, float]]:
    # The backend with the costs of its options, the first of *by_option* that fits, but for what was set *by_hand*;
    # their sources, intervals and errors.  A real engine decides itself which options there are.
    sources: dict[str, str] = {}
    spans: dict[str, tuple[str, ...]] = {}
    errors: dict[str, float] = {}
    for at in ("intra", "inter"):
        model: EngineModel | None = getattr(backend, at)
        if model is None or not model.by_option:
            continue
        costs = next((item for item in model.by_option if item.chosen(backend.options)), None)
        if costs is None and target == "model":
            known = "; ".join(" ".join(f"{k}={v}" for k, v in item.options.items()) for item in model.by_option)
            raise ConfigError(
                f"backend.options={dict(backend.options)} has no costs in the model of backend={backend.name}; "
                f"there are {known}"
            )
        varied = replace(model, by_option=()) if costs is None else model.with_options(costs)
        names = [field.name for field in fields(model) if getattr(varied, field.name) != getattr(model, field.name)]
        changed = {name: getattr(varied, name) for name in names if not covers(by_hand, f"backend.{at}.{name}")}
        options = {name for item in model.by_option for name in item.options} | set(backend.modelled)
        moved: dict[str, Any] = {at: replace(model, **changed), "modelled": tuple(sorted(options))}
        backend = replace(backend, **moved)
        if costs is not None:
            if costs.errors and set(costs.errors) != {"mean", "median", "p95"}:
                wrong = dict(costs.errors)
                raise ConfigError(f"backend.{at}.by_option.errors must be mean, median and p95, got {wrong}")
            errors |= costs.errors
            sources |= {f"backend.{at}.{name}": costs.evidence for name in changed if name != "by_option"}
            spans |= {
                f"backend.{at}.{name}": _span(model, costs, name) for name in costs.intervals if name in changed
            }
    return backend, sources, spans, errors


def costs_on(backend: Engine, hw: Machine) -> Engine:
    """Return *backend* with the costs of its options, and rates that are shares of the line rate of *hw*.

    So has `load` made `Config.backend`.  Raise a `ConfigError` if its options have no costs.
    """
    return _on_hardware(_with_options(backend, (), "model")[0], hw)


def _span(model: EngineModel, costs: OptionCosts, name: str) -> tuple[str, ...]:
    value, ends = getattr(model, name), costs.intervals[name]
    if name == "rate":
        return tuple(f"{value * float(end):.6g}B/s" for end in ends)
    return tuple(f"{value + parse_time(end):.6g}s" for end in ends)


def _on_hardware(backend: Engine, hw: Machine) -> Engine:
    for name in ("intra", "inter"):
        model: EngineModel | None = getattr(backend, name)
        if model and model.path == "nvlink" and (moved := model.on_line(hw.interconnect.rate)) is not model:
            backend = replace(backend, intra=moved) if name == "intra" else replace(backend, inter=moved)
    return backend


# --- where numbers come from ---------------------------------------------------------------------------------------


ON_THE_COMMAND_LINE = "assumed: set on the command line"
UNSAID = "assumed: the configuration does not say where it comes from"


def numbers(instance: Any, at: str = "") -> Iterator[str]:
    """Yield the dotted key of every number in *instance*, a dataclass; a tuple of dataclasses counts as one."""
    for each in fields(instance):
        value, key = getattr(instance, each.name), join(at, each.name)
        if is_dataclass(value):
            yield from numbers(value, key)
        elif any(map(is_dataclass, value)) if isinstance(value, tuple) else type(value) in (int, float):
            yield key


def _borrowed(part: Any, hw: Machine) -> Any:
    # what was *measured* on other hardware is *assumed*
    there = getattr(part, "measured_on", ())
    if not there or hw.name in there:
        return part
    elsewhere = f"assumed: measured on {there[0]}, not on {hw.name}:"
    of = {
        keys: text.replace("measured:", elsewhere, 1)
        for keys, text in part.sources.items()
        if text[:9] == "measured:"
    }
    return replace(part, sources={**part.sources, **of})


_last: dict[str, tuple[Any, dict[str, str], Any]] = {}
"""By key, what `_sourced` was asked last, and its answer: in a sweep most parts are what they were."""


def _sourced(part: Any, at: str, new: Mapping[str, str]) -> Any:
    # With sources that speak for all of its numbers; *new* ones, by full key, replace its own.
    own = {key.removeprefix(f"{at}."): text for key, text in new.items() if key.startswith(f"{at}.")}
    last = _last.get(at)
    if last is not None and last[0] == part and last[1] == own:
        return last[2]
    every = list(numbers(part))
    named = {key: text for key, text in own.items() if any(covers([key], number) for number in every)}
    sources: dict[str, str] = {}
    for keys, text in part.sources.items():
        if text.partition(":")[0] not in EVIDENCE:
            raise ConfigError(
                f"{at}.sources.{keys}: {text!r} must begin with one of {', '.join(EVIDENCE)} and a colon"
            )
        left = [key for key in _split_keys(keys) if not covers(named, key)]
        sources |= {", ".join(left): text} if left else {}
    sources |= named
    said = [key for keys in sources for key in _split_keys(keys)]
    sources |= {number: UNSAID for number in every if not covers(said, number)}
    _last[at] = part, own, replace(part, sources=sources)
    return _last[at][2]


# --- as it is written ----------------------------------------------------------------------------------------------


# what makes the file a primary configuration of Hydra's, and keeps Hydra from writing files of its own
_HYDRA = """\
# A run, complete; to repeat it: pdsim run --config-path FOLDER --config-name config, FOLDER being this file's,
# absolute
defaults: [_self_, {override hydra/hydra_logging: none}, {override hydra/job_logging: none}]
hydra: {output_subdir: null, run: {dir: .}}
"""
_TRUTH = ("y", "yes", "n", "no", "true", "false", "on", "off")  # to YAML, unless it is quoted


@dataclass
class _Part:
    key: str
    value: Any  # a frozen dataclass or a plain value, and with the backend its policy
    content: bytes

    @cached_property
    def plain(self) -> Any:  # never changed, for others have it, too
        own = plain(self.value)
        return own if self.key != "backend" else {**own[0], "policy": own[1]}

    @cached_property
    def yaml(self) -> str:
        return _yaml({self.key: self.plain})

    @cached_property
    def json(self) -> str:
        return json.dumps(self.plain, sort_keys=True, ensure_ascii=True)


_written: dict[str, _Part] = {}
"""The part of each key that was written last."""


def _parts(config: Config) -> Iterator[_Part]:
    for each in fields(config):
        key, value = each.name, getattr(config, each.name)
        if key == "policy":
            continue
        if key == "backend":
            value = value, config.policy
        content = msgspec.msgpack.encode(value, enc_hook=plain)  # tells 0 from 0.0, as == does not
        if key not in _written or _written[key].content != content:
            _written[key] = _Part(key, value, content)
        yield _written[key]


def as_written(config: Config) -> dict[str, Any]:
    """Return *config* as `load` takes it; values below the top level are shared with later answers."""
    return {part.key: part.plain for part in _parts(config)}


def config_yaml(config: Config) -> str:
    """Return *config* as YAML that gives it again, also as the primary configuration of `pdsim run`."""
    return "".join([_HYDRA, *(part.yaml for part in _parts(config))])


def canonical(config: Config, *without: str) -> str:
    """Return *config* without the top-level keys *without* as JSON, the same for equal ones in every process."""
    texts = sorted(f'"{part.key}": {part.json}' for part in _parts(config) if part.key not in without)
    return f"{{{', '.join(texts)}}}"


def plain(value: Any) -> Any:
    """Return *value* as JSON and YAML can hold it: None for numbers that are not finite, without infinite fields."""
    kind = type(value)
    if kind in (str, int, bool, type(None)):
        return value
    if kind is float:
        return value if math.isfinite(value) else None
    if is_dataclass(value) and not isinstance(value, type):
        every = {each.name: getattr(value, each.name) for each in fields(value)}
        return {name: plain(item) for name, item in every.items() if item != math.inf}
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
