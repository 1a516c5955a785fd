# SPDX-License-Identifier: Apache-2.0
"""Where each number of a configuration comes from: the sources beside it in YAML, and what replaces them.

A source begins with one of `pdsim.hardware.machine.EVIDENCE`: measured, datasheet or assumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from pdsim.calibration.definition import covers
from pdsim.core.errors import ConfigError
from pdsim.hardware.costs import Collective, Engine
from pdsim.hardware.machine import EVIDENCE, Machine
from pdsim.models.llm import Llm
from pdsim.serving.settings import ServingEngine

__all__ = ["ON_THE_COMMAND_LINE", "SOURCES", "UNSAID", "borrowed", "gathered", "join", "numbers", "sourced"]

Lent = TypeVar("Lent", Engine, Collective, ServingEngine)
Sourced = TypeVar("Sourced", Machine, Engine, Llm, Collective, ServingEngine)

SOURCE, SOURCES, OTHERS = "source", "sources", "others"
"""In YAML a mapping has the sources of its own keys beside them, under `SOURCE`; `OTHERS` speaks for all else in
it."""
ON_THE_COMMAND_LINE = "assumed: set on the command line"
UNSAID = "assumed: the configuration does not say where it comes from"


def join(at: str, name: str) -> str:
    """Return the dotted key of *name* below *at*, which is empty at the top.

    >>> join("hw", "gpu"), join("", "hw")
    ('hw.gpu', 'hw')
    """
    return f"{at}.{name}" if at else name


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
                    keys = [at if name == OTHERS else join(at, name) for name in _split(str(names))]
                    sources[", ".join(keys)] = text
            else:
                found[key] = without(value, join(at, str(key))) if isinstance(value, Mapping) else value
        return found

    plain = without(part, "")
    return {**plain, SOURCES: {**part.get(SOURCES, {}), **sources}} if sources else plain


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
    found: Sourced = last[2]
    return found


_last: dict[str, tuple[Any, dict[str, str], Any]] = {}
"""By key, what `sourced` was asked last, and its answer: in a sweep most parts are what they were."""


def _sourced(instance: Sourced, at: str, named: dict[str, str]) -> Sourced:
    found = list(numbers(instance))
    named = {key: text for key, text in named.items() if any(covers([key], number) for number in found)}
    sources: dict[str, str] = {}
    for keys, text in instance.sources.items():
        if text.partition(":")[0] not in EVIDENCE:
            raise ConfigError(
                f"{at}.sources.{keys}: {text!r} must begin with one of {', '.join(EVIDENCE)} and a colon"
            )
        left = [key for key in _split(keys) if not covers(named, key)]
        sources |= {", ".join(left): text} if left else {}
    sources |= named
    said = [key for keys in sources for key in _split(keys)]
    sources |= {number: UNSAID for number in found if not covers(said, number)}
    return replace(instance, sources=sources)


def _split(keys: str) -> list[str]:
    return [key.strip() for key in keys.split(",")]
