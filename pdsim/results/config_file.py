# SPDX-License-Identifier: Apache-2.0
"""A configuration as it is written: as plain data, as the ``config.yaml`` of a run, and as the text of its name.

A sweep writes thousands of configurations that differ in a key or two.  So what each top-level part was written as
is kept, one value of each, and written again only when the part is another one: that is nine tenths of the time.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pdsim.config import Config
from pdsim.core.units import is_number

__all__ = ["as_written", "canonical", "config_yaml", "plain"]

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
    """Return the parts of *config* by their keys, in the order of its fields."""
    found: dict[str, _Part] = {}
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
        found[key] = known
    return found


def _alike(one: Any, other: Any) -> bool:
    """Return whether both are written alike: 0 and 0.0 are equal, and are not."""
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
    """Return *values* as YAML in block style, keys in their order."""
    import yaml  # type: ignore[import-untyped]  # comes with OmegaConf, its stubs do not

    text: str = yaml.dump(values, Dumper=_dumper(), default_flow_style=False, allow_unicode=True, sort_keys=False)
    return text


@cache
def _dumper() -> Any:
    """Return what writes YAML as OmegaConf does, a twentieth of the time: by libyaml, where PyYAML has it."""
    import yaml

    base: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

    def text(dumper: Any, value: str) -> Any:
        quoted = value.lower() in _TRUTH or is_number(value)
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="'" if quoted else None)

    dumper: Any = type("Dumper", (base,), {"ignore_aliases": lambda *_: True})
    dumper.add_representer(str, text)
    return dumper
