# SPDX-License-Identifier: Apache-2.0
"""Every configuration key, as the schema has it: type, range, default, and the comment beside it as its meaning.

``pdsim help KEY``, the completion of the shell and docs/configuration.md are made of it.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from typing import Any

from pdsim.config import Config, ExperimentOptions, as_written, covers, hints_of, join, presets, quantities
from pdsim.core import plugins
from pdsim.core.errors import dataclasses_in
from pdsim.core.units import format_rate, format_size, format_time, is_number
from pdsim.kv.policy import Policy
from pdsim.serving.settings import NO_KEYS

_KINDS = {
    "Seconds": "time", "Size": "size", "Rate": "rate", "Flops": "FLOPS", "Count": "count", "Frequency": "per second",
    "str": "text",
}  # fmt: skip
_FORMATS: dict[str, Any] = {
    "time": format_time, "size": format_size, "rate": format_rate, "per second": "{:.12g} /s".format,
    "FLOPS": lambda value: f"{value / 1e12:.12g} TFLOPS",
}  # fmt: skip


@dataclass(frozen=True)
class Key:
    """One key: its dotted *name*, the *kind* and the *rule* of its values, its *default* and its *meaning*."""

    name: str
    kind: str
    rule: str
    default: str
    meaning: str

    def __str__(self) -> str:
        rule = f", {self.rule}" if self.rule else ""
        return f"{self.name}: {self.kind}{rule} (default: {self.default})\n  {self.meaning}".rstrip()


def known() -> Iterator[Key]:
    """Yield every key but those below ``experiment``."""
    yield from of(Config)
    yield from of(Policy, "backend.policy")


def named(text: str) -> list[Key]:
    """Return the key called *text*, those below it, and those of experiments, which are named if several."""
    own = dict.fromkeys(known(), "")
    if text.startswith("experiment"):
        for name in plugins.names(plugins.EXPERIMENTS):
            for key in of(ExperimentOptions.class_for({"name": name}), "experiment"):
                own[key] = f"{own[key]}, {name}" if key in own else name
    keys = {key: names for key, names in own.items() if f"{key.name}.".startswith(f"{text}.")}
    if len(keys) == 1:
        return [*keys]
    return [
        replace(key, meaning=f"{key.meaning} (experiment={names})".strip()) if names else key
        for key, names in keys.items()
    ]


def now(key: Key, config: Config, words: Sequence[str]) -> list[str]:
    """Return lines about *key* in *config*: its value and who set it, the source of that, and what can be written.

    *words* are the overrides that *config* was composed of.  There are no lines for a key that it has not, such as
    one of another experiment.
    """
    group, _, rest = key.name.partition(".")
    part: Any = getattr(config, group)
    value: Any = config
    for name in key.name.replace("backend.policy", "policy", 1).split("."):
        value = getattr(value, name, None)
    if value is None:
        return []
    text, typed = _text(value, key.kind), {word.partition("=")[0]: word for word in words}
    who = "the default" if text == key.default else f"{group}={getattr(part, 'name', 'NAME')}"
    if key.default == presets.AUTO:
        who = f"engine={config.engine.name} {config.engine.version}".strip()
    who = typed.get(key.name) or (who if text == key.default else typed.get(group, who))
    named = {name.strip(): text for names, text in getattr(part, "sources", {}).items() for name in names.split(",")}
    sources = sorted((name for name in named if not name or covers([name], rest)), key=len)
    choices = key.rule.removeprefix("one of ").split(", ") if key.rule.startswith("one of ") else []
    usual = quantities.usual(key.name, key.kind) or value
    example = "true" if key.kind == "bool" else (choices or [_text(usual, key.kind).replace(" ", "")])[-1]
    about = [f"  source: {named[sources[-1]]}"] if sources else []
    return [f"  now: {text} ({who})", *about, f"  write: {key.name}={example}"]


def annotated(config: Config) -> str:
    """Return *config* as YAML that gives it again, with a comment that has the unit of each time, size and rate."""
    from omegaconf import OmegaConf

    kinds = {key.name: key.kind for key in (*known(), *of(type(config.experiment), "experiment"))}
    lines = ["# a key is written in full, as hw.gpu.memory_rate=4.8TB/s; pdsim help KEY says what it means"]
    at: list[str] = []  # the names that the line is below
    for line in OmegaConf.to_yaml(OmegaConf.create(as_written(config))).splitlines():
        name, _, value = line.partition(":")
        at[(len(name) - len(name.lstrip())) // 2 :] = [name.strip()]
        kind = kinds.get(".".join(at), "")
        unit = f"  # {_text(float(value), kind)}" if kind in _FORMATS and is_number(value) and float(value) else ""
        lines.append(f"{line}{unit}")
    return "\n".join(lines) + "\n"


def of(cls: type, at: str = "", within: bool = True) -> Iterator[Key]:
    """Yield the keys of *cls*, a dataclass that stands at the dotted key *at*, and of those *within* it."""
    meanings, hints = _comments(cls), hints_of(cls)
    for field in fields(cls):
        key, hint = join(at, field.name), hints[field.name]
        if field.name in NO_KEYS:
            continue
        if inner := dataclasses_in(hint):
            for each in inner if within else ():
                yield from of(each, key)
        else:
            kind = _kind(field)
            default = presets.AUTO if key in presets.KEYS else _default(field, kind)
            yield Key(key, kind, _rule(hint), default, meanings.get(field.name, ""))


def type_of(field: Field[Any]) -> str:
    """Return the type of *field* as it is written, without its rule and None."""
    text = str(field.type).removesuffix(" | None")
    for _ in range(2):  # a list, and what is in it
        text = re.sub(r"Annotated\[(\w+|tuple\[[\w., ]+\]), [^\]]*\]", r"\1", text)
    text = re.sub(r"\b(Positive|NotNegative)Int\b", "int", text)
    return re.sub(r"\b(Positive|NotNegative|Share)\b", "float", text)


def _kind(field: Field[Any]) -> str:
    name = type_of(field)
    return {"tup": "list", "Map": "mapping"}.get(name[:3]) or _KINDS.get(name, name)


def _rule(hint: Any) -> str:
    # the rule of a rate, a time or a size that may be 0 is no news
    own = getattr(hint, "__metadata__", ())
    inner = next((rule for each in typing.get_args(hint)[:1] if (rule := _rule(each))), "")
    rule = next((each for each in reversed(own) if isinstance(each, str)), inner)
    return "" if rule == ">= 0" and any(map(callable, own)) else rule


def _default(field: Field[Any], kind: str) -> str:
    value = field.default_factory() if field.default_factory is not MISSING else field.default
    return "required" if value is MISSING else _text(value, kind)


def _text(value: Any, kind: str) -> str:
    if kind in _FORMATS and isinstance(value, int | float):
        return "unlimited" if value == float("inf") else str(_FORMATS[kind](value))
    if isinstance(value, tuple | dict):
        return f"[{','.join(map(str, value))}]" if value else "empty"
    if value is None or value == "":
        return "null" if value is None else '""'
    return str(value).lower() if isinstance(value, bool) else str(value)


def _comments(cls: type) -> dict[str, str]:
    # of each field, the comments on lines of their own above it, and those on its lines
    meanings: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        name, above = "", list[str]()
        for line in inspect.getsource(each).splitlines() if is_dataclass(each) else ():
            comment = match[1] if (match := re.search(r"(?:^|  )\s*# (.*)$", line)) else ""
            if field := re.match(r"    (\w+): ", line):
                name = field[1]
                meanings[name] = " ".join(filter(None, [*above, comment])) or meanings.get(name, "")
                above = []
            elif comment and line.lstrip().startswith("#"):
                above.append(comment)
            elif not line:
                name, above = "", []
            elif comment and name:  # the annotation goes on
                meanings[name] = f"{meanings[name]} {comment}".strip()
    return meanings
