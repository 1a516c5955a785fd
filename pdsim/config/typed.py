# SPDX-License-Identifier: Apache-2.0
"""One dataclass from one plain mapping, as YAML and the command line give it.

Every key is known, every value has the type and the unit of its field, or a `ConfigError` says in one line for each
mistake what was written, what the rule is and what to write instead.  Knows neither Hydra nor OmegaConf, and no
particular dataclass; `pdsim.config.loading` builds the whole `pdsim.config.Config` with it.

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
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

from pdsim.core.errors import ConfigError, near

__all__ = ["OTHERS", "SOURCE", "SOURCES", "build", "gathered", "join", "required", "split_keys"]

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
    found: dict[str, Any] = {}
    missing: list[str] = []
    for field in fields(cls):  # type: ignore[arg-type]  # typing has no public name for a dataclass
        key = join(at, field.name)
        if field.name in values:
            try:
                found[field.name] = _made(hints[field.name], values[field.name], key, known)
            except ConfigError as error:
                problems.append(str(error))
        elif required(field):
            missing.append(key)
    if len(missing) > 1:  # as of a file that is empty
        problems.append(f"{', '.join(missing)} are missing and have no default; begin with a file that has them")
    elif missing:
        problems.append(f"{missing[0]} is missing and has no default; set {missing[0]}=VALUE")
    if problems:
        raise ConfigError("\n".join(problems))
    try:
        return cls(**found)
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
        found = {}
        for key, value in values.items():
            if key == SOURCE:
                for names, text in value.items() if isinstance(value, Mapping) else ((OTHERS, value),):
                    keys = [at if name == OTHERS else join(at, name) for name in split_keys(str(names))]
                    sources[", ".join(keys)] = text
            else:
                found[key] = without(value, join(at, str(key))) if isinstance(value, Mapping) else value
        return found

    plain = without(part, "")
    return {**plain, SOURCES: {**part.get(SOURCES, {}), **sources}} if sources else plain


def split_keys(keys: str) -> list[str]:
    """Return the keys in *keys*, which commas divide."""
    return [key.strip() for key in keys.split(",")]
