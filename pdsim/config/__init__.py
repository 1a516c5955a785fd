# SPDX-License-Identifier: Apache-2.0
"""The schema: the whole configuration of a run as frozen dataclasses, and what makes them of plain mappings.

`build` takes YAML's and the command line's values: every key is known, every value has the type, the unit and the
range of its field, or a `ConfigError` says in one line for each mistake what was written, what the rule is and what
to write instead.  `pdsim.config.loading.load` makes a `Config` of what was composed, once; from there to the rank
programs it stays what it is.  Nothing here knows Hydra or OmegaConf.

Not msgspec's `convert`: it stops at the first mistake, and has no keys for a message with the way out, no subclass
by its values and no `source`.
"""

from __future__ import annotations

import marshal
import operator
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cache
from ipaddress import ip_address
from typing import Annotated, Any, Self, TypeVar

from pdsim.calibration.definition import Calibration
from pdsim.compute.forward import Compute
from pdsim.core import plugins
from pdsim.core.errors import ConfigError, instead, near
from pdsim.core.units import Seconds
from pdsim.hardware.costs import Collective, Engine, Jitter
from pdsim.hardware.machine import Machine
from pdsim.kv.policy import Policy
from pdsim.models.llm import Llm
from pdsim.models.parallel import Parallel
from pdsim.serving.settings import Cache, Kv, Live, SchedulerLimits, ServingEngine, Slo, Workload

__all__ = [
    "OTHERS",
    "SOURCE",
    "SOURCES",
    "Check",
    "Config",
    "ExperimentOptions",
    "Launch",
    "Simulate",
    "build",
    "gathered",
    "join",
    "required",
    "split_keys",
]


def _address(text: object) -> str:
    try:
        return str(ip_address(str(text)))
    except ValueError:
        raise ValueError(f"{text!r} is not an IP address such as 127.0.0.1") from None


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How ``target=real`` runs the processes of its ranks.

    Only with ``target=real``.
    """

    # the address that ranks and their engines listen on; any but loopback can be reached
    bind: Annotated[str, _address] = "127.0.0.1"
    silence: Seconds = 0.0  # of a rank, after which it is ended; 0: experiment.deadline, 300 s where there is none


@dataclass(frozen=True, kw_only=True)
class Check:
    """Which guards there are beside those that cannot be done without."""

    plausible: bool = True  # refuse quantities that nothing has: `pdsim.config.rules.BOUNDS`


@dataclass(frozen=True, kw_only=True)
class ExperimentOptions:
    """The options of one experiment; each experiment's module extends it with a frozen dataclass.

    Its fields are the keys below ``experiment`` of the configuration: their annotations give type and
    unit, their defaults are the only ones there are, and ``__post_init__`` raises a `ValueError` that begins with
    ``experiment.KEY`` for what no annotation can say.  ``name`` has the name that the module is registered under
    as its default.  A field ``deadline``, in seconds, is also the silence after which ``target=real`` ends a rank.

    >>> @dataclass(frozen=True, kw_only=True)
    ... class OneWriteOptions(ExperimentOptions):
    ...     name: str = "one_write"
    ...     size: int = 1 << 20
    ...     operation: Annotated[str, "one of write, read"] = "write"
    >>> OneWriteOptions(size=4096)
    OneWriteOptions(name='one_write', size=4096, operation='write')
    """

    name: str  # of the experiment, as it is registered

    @classmethod
    def of(cls, config: Config) -> Self:
        """Return the options of *config*, which are of this class; raise a `ConfigError` if they are another's."""
        if not isinstance(config.experiment, cls):
            raise ConfigError(
                f"experiment={config.experiment.name} has options of its own, not those of {cls.__module__}; set "
                f"experiment={vars(cls)['name']}"
            )
        return config.experiment

    @property
    def silence(self) -> float | None:
        """Seconds of silence after which a rank counts as gone; None if the experiment does not say."""
        return getattr(self, "deadline", None)

    @staticmethod
    def class_for(values: Mapping[str, Any]) -> type[ExperimentOptions]:
        """Return the class of the options in *values*, by the name in them.

        Raise a `ConfigError` if no package registers that name, or if what it registers declares no such options.
        """
        name, known = values.get("name"), plugins.names(plugins.EXPERIMENTS)
        if name not in known:
            raise ConfigError(f"experiment.name={name} does not exist; {instead(str(name), known)}")
        module = plugins.resolve(plugins.EXPERIMENTS, name)
        classes = (each for each in vars(module).values() if isinstance(each, type))
        options = next(
            (c for c in classes if issubclass(c, ExperimentOptions) and vars(c).get("name") == name), None
        )
        if options is None:
            raise ConfigError(
                f"experiment={name}: {plugins.target(plugins.EXPERIMENTS, name)} declares no options of that name; "
                f"give it a frozen dataclass that extends pdsim.config.ExperimentOptions, with "
                f"name: str = {name!r}"
            )
        return options


@dataclass(frozen=True, kw_only=True)
class Simulate:
    """How ``target=model`` simulates; no choice here changes a result."""

    fold: Annotated[str, "one of auto, off"] = "auto"  # deprecated, without effect: every rank is simulated


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run: what to run (*experiment*), on what (*hw*, *backend*, *target*), and everything that it depends on.

    It is immutable; a variant is `dataclasses.replace`.  Numbers are in SI units.  *hw*, *backend*, *model*,
    *engine* and *collective* keep the source of each of their numbers.
    """

    target: Annotated[str, "one of model, real, live"]
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
    check: Check = field(default_factory=Check)
    live: Live = field(default_factory=Live)  # the servers of target=live
    # of the model: the host's part of a transfer, as a multiple of the calibrated one's
    host_factor: Annotated[float, ">= 0.1 and <= 10"] = 1.0
    draw_host: bool = False  # of the model: draw `host_factor` from the seed, as the calibration's hosts differ
    jitter: Jitter = field(default_factory=Jitter)  # of the model
    simulate: Simulate = field(default_factory=Simulate)  # how the model does it
    # of the model: "timing" keeps sizes only, "tracked" also bytes
    memory: Annotated[str, "one of timing, tracked"] = "timing"
    # of the model: at how many instants, at least, the use of links and memories is kept; 0: never
    samples: Annotated[int, ">= 0 and <= 100000"] = 0
    # of the laws of simulation, in docs/reliability.md: "on" watches the run and fails it
    checks: Annotated[str, "one of on, off"] = "off"
    seed: Annotated[int, ">= 0 and < 9223372036854775808"] = 0
    output: str = "results"


# --- from plain mappings -------------------------------------------------------------------------------------------

SOURCE, SOURCES, OTHERS = "source", "sources", "others"
"""In YAML a mapping has the sources of its own keys beside them, under `SOURCE`; `OTHERS` speaks for all else in
it."""

T = TypeVar("T")
Known = dict[str, tuple[bytes, Any]]
"""By key, what a value was when it was converted last, and what came of it: `build`."""


def build(cls: type[T], values: object, at: str = "", known: Known | None = None) -> T:
    """Return a *cls*, a dataclass, from the mapping *values* found at the dotted key *at*.

    Raise a `ConfigError` with one line for every unknown key, missing key and value of a wrong type, unit or range.

    Keys are checked against the annotations of *cls*: plain types, `Annotated` with a parser and a rule, `Literal`,
    tuples, mappings, unions with None and nested dataclasses.  A rule is what a message says after "must be",
    ``"> 0 and <= 1"`` or ``"one of a, b"``; the last one counts.  A dataclass with a static method
    ``class_for`` chooses its subclass from the values.  A class with a field ``sources`` may have a ``source`` in
    any mapping below it.

    With *known*, a field whose value is what it was in the last call is what that call made of it: a sweep changes a
    key or two of some hundred.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{at} must have keys of its own ({', '.join(_names(cls))}), got {values!r}")
    hints = _hints(cls)  # type: ignore[arg-type]  # a class is hashable
    if SOURCES in hints:
        values = gathered(values)
    problems = [_unknown(str(key), hints, at) for key in values if key not in hints]
    made: dict[str, Any] = {}
    missing: list[str] = []
    for each in fields(cls):  # type: ignore[arg-type]  # typing has no public name for a dataclass
        key = join(at, each.name)
        if each.name in values:
            try:
                made[each.name] = _made(hints[each.name], values[each.name], key, known)
            except ConfigError as error:
                problems.append(str(error))
        elif required(each):
            missing.append(key)
    if len(missing) > 1:  # as of a file that is empty
        problems.append(f"{', '.join(missing)} are missing and have no default; begin with a file that has them")
    elif missing:
        problems.append(f"{missing[0]} is missing and has no default; set {missing[0]}=VALUE")
    if problems:
        raise ConfigError("\n".join(problems))
    try:
        return cls(**made)
    except ValueError as error:
        raise ConfigError(_located(str(error), cls, at)) from error


# --- values --------------------------------------------------------------------------------------------------------


def _made(hint: Any, value: Any, at: str, known: Known | None) -> Any:
    if known is None:
        return _convert(hint, value, at)
    try:
        content = marshal.dumps(value, 2)  # which tells 1 from True and from 1.0, as == does not
    except ValueError:
        return _convert(hint, value, at)
    if at not in known or known[at][0] != content:
        known[at] = content, _convert(hint, value, at)
    return known[at][1]


def _convert(hint: Any, value: Any, at: str) -> Any:
    # Of a union only the first member other than None is tried.
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        parsers, rules = _annotated(hint)
        made = _parsed(parsers[0], value, at) if parsers else _convert(arguments[0], value, at)
        if rules and not _holds(rules[-1], made):
            raise ConfigError(
                f"{at} must be {rules[-1]}, got {made!r}; leave {at} out to keep what the configuration has"
            )
        return made
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
        class_for = getattr(hint, "class_for", None)  # of a dataclass whose subclass depends on the values
        hint = class_for(value) if class_for and isinstance(value, Mapping) else hint
        return build(typing.cast("type[Any]", hint), value, at)
    return value if hint is Any else _scalar(hint, value, at)


@cache
def _annotated(hint: Any) -> tuple[list[Any], list[str]]:
    kinds = typing.get_args(hint)[1:]
    return [each for each in kinds if callable(each)], [each for each in kinds if isinstance(each, str)]


_COMPARED = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}


def _holds(rule: str, value: Any) -> bool:
    if rule.startswith("one of "):
        return value in rule.removeprefix("one of ").replace("''", "").split(", ")
    bounds = (part.split() for part in rule.split(" and "))
    return all(_COMPARED[sign](value, type(value)(bound)) for sign, bound in bounds)


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
    plain = {
        key: str(item).lower() if hint is str and isinstance(item, bool) else item for key, item in value.items()
    }
    return {str(key): _convert(hint, item, join(at, str(key))) for key, item in plain.items()}


def _scalar(hint: type, value: Any, at: str) -> Any:
    # Whole floats pass as integers, integers as floats and as text; nothing else is converted.
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


# --- keys ----------------------------------------------------------------------------------------------------------


def _names(cls: type) -> list[str]:
    return [field.name for field in fields(cls)]


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


def required(field: Field[Any]) -> bool:
    """Return whether *field* of a dataclass has no default."""
    return field.default is MISSING and field.default_factory is MISSING


def _unknown(key: str, known: Iterable[str], at: str) -> str:
    names = list(known)
    hint = near(key, names, join(at, "{}"))
    return f"unknown key {join(at, key)}; {hint}{at or 'a configuration'} has {', '.join(names)}"


def _located(message: str, cls: type, at: str) -> str:
    owner, _, rest = message.partition(" ")
    name = owner.rpartition(".")[2].partition("=")[0]
    if name not in _hints(cls):
        return f"{at}: {message}" if at else message
    key = join(at, name)
    value = owner.partition("=")[1] + owner.partition("=")[2]
    return f"{key}{value} {rest}; leave {key} out to keep what the configuration has"


# --- sources -------------------------------------------------------------------------------------------------------


def join(at: str, name: str) -> str:
    """Return the dotted key of *name* below *at*, which is empty at the top.

    >>> join("hw", "gpu"), join("", "hw")
    ('hw.gpu', 'hw')
    """
    return f"{at}.{name}" if at else name


def gathered(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return *part*, a group, with one mapping ``sources`` by dotted key in place of every ``source`` within it.

    >>> gathered({"rate": 1, "source": {"rate": "assumed: no data"}})
    {'rate': 1, 'sources': {'rate': 'assumed: no data'}}
    """
    sources: dict[str, Any] = {}

    def without(values: Mapping[str, Any], at: str) -> dict[str, Any]:
        kept = {}
        for key, value in values.items():
            if key == SOURCE:
                for names, text in value.items() if isinstance(value, Mapping) else ((OTHERS, value),):
                    keys = [at if name == OTHERS else join(at, name) for name in split_keys(str(names))]
                    sources[", ".join(keys)] = text
            else:
                kept[key] = without(value, join(at, str(key))) if isinstance(value, Mapping) else value
        return kept

    plain = without(part, "")
    return {**plain, SOURCES: {**part.get(SOURCES, {}), **sources}} if sources else plain


def split_keys(keys: str) -> list[str]:
    """Return the keys in *keys*, which commas divide."""
    return [key.strip() for key in keys.split(",")]
