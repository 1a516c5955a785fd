"""What a user typed, on its way to Hydra and back: overrides made ready, Hydra's refusals in one line.

A value such as ``hw.nic.rate=400Gbps`` is handed to Hydra as ``++hw.nic.rate=400Gbps``: Hydra then takes any key, and
`pdsim.cli.typed` refuses the unknown ones in the same words wherever they come from.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pdsim import plugins
from pdsim.errors import ConfigError
from pdsim.guards import instead, near

__all__ = [
    "check_calibration",
    "describe",
    "explain",
    "groups",
    "instead",
    "leaves",
    "near",
    "options",
    "rewrite",
    "set_keys",
]

_FLAGS = {
    "--cfg": 1, "-c": 1, "--package": 1, "-p": 1, "--config-dir": 1, "-cd": 1, "--config-name": 1, "-cn": 1,
    "--config-path": 1, "-cp": 1, "--multirun": 0, "-m": 0, "--resolve": 0, "--info": 0, "-i": 0, "--run": 0, "-r": 0,
    "--hydra-help": 0,
}  # fmt: skip
"""Hydra's own, with how many words follow."""


_NOT_TEXT = re.compile(r"[-+]?[\d._]+(e[-+]?\d+)?|true|false|null|nan|[-+]?inf", re.IGNORECASE)


def conf() -> Path:
    """Return the folder of the configuration groups, without importing it."""
    spec = find_spec("conf")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def folders() -> dict[str, Path]:
    """Return the folders of configuration groups by package: pdsim's own, then those of other packages."""
    found = {"conf": conf()}
    for name in plugins.names(plugins.CONF):
        package = plugins.target(plugins.CONF, name)
        spec = find_spec(package)
        if spec is not None and spec.origin is not None:
            found[package] = Path(spec.origin).parent
    return found


def groups() -> list[str]:
    """Return the names of the configuration groups."""
    every = (path for folder in folders().values() for path in folder.iterdir())
    return sorted({path.name for path in every if path.is_dir() and any(path.glob("*.yaml"))})


def options(group: str) -> list[str]:
    """Return what can be chosen in *group*."""
    return sorted({path.stem for folder in folders().values() for path in (folder / group).glob("*.yaml")})


def describe(group: str, option: str) -> str:
    """Return what the file of *option* says of itself: its first comment that is not a directive."""
    files = [folder / group / f"{option}.yaml" for folder in folders().values()]
    lines = next(file for file in files if file.is_file()).read_text(encoding="utf-8").splitlines()
    comments = [line.lstrip("# ") for line in lines if line.startswith("#")]
    return next((comment for comment in comments if not comment.startswith("@")), "")


# --- to Hydra -------------------------------------------------------------------------------------------------------


def rewrite(words: Sequence[str]) -> list[str]:
    """Return the command line for Hydra, flags first, for it does not find overrides on both sides of a flag.

    Raise a `ConfigError` for what is neither an override nor a flag.
    """
    flags: list[str] = []
    ready: list[str] = []
    values = 0  # of the flag before
    for word in words:
        if values or word.startswith("-"):
            values = values - 1 if values else _values_of(word)
            flags.append(word)
        else:
            ready.append(_override(word))
    if values:
        raise ConfigError(f"{flags[-1]} needs a value after it; see pdsim run --help")
    return flags + ready


def set_keys(overrides: Iterable[str]) -> list[str]:
    """Return the dotted keys that *overrides* set, the choices of groups left out."""
    return [key for key in (text.partition("=")[0].lstrip("+~") for text in overrides) if "." in key]


def leaves(overrides: Iterable[str]) -> list[str]:
    """Return the dotted keys whose values *overrides* say, those within a mapping each: ``a={b: 1}`` sets ``a.b``."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    chosen, parser = set(groups()), OverridesParser.create()
    found: list[str] = []
    for text in overrides:
        key = text.partition("=")[0].lstrip("+~")
        value = parser.parse_override(text).value() if "={" in text else None
        found += _below(key, value) if isinstance(value, Mapping) else [key] if key not in chosen else []
    return found


def _below(key: str, value: Mapping[Any, Any]) -> Iterator[str]:
    for name, item in value.items():
        at = f"{key}.{getattr(name, 'text', name)}"  # a name in quotes is an object of Hydra's
        yield from _below(at, item) if isinstance(item, Mapping) else [at]


def _values_of(flag: str) -> int:
    name, equals, _ = flag.partition("=")
    if name not in _FLAGS:
        raise ConfigError(f"unknown option {name}; {near(name, _FLAGS)}see pdsim run --help")
    return 0 if equals else _FLAGS[name]


def _override(word: str) -> str:
    key, equals, value = word.partition("=")
    key = key.lstrip("+")
    if word.startswith("~") or key.startswith("hydra") or "@" in key:
        return word
    if not equals:
        raise ConfigError(_bare(word))
    if key not in groups():
        # Hydra takes letters of other alphabets only in quotes
        quoted = not value.isascii() and re.fullmatch(r"[^'\"\\()\[\]{},=]*", value)
        return f"++{key}='{value}'" if quoted else f"++{key}={value}"
    if value.startswith("["):
        one, *_ = value.strip("[]").split(",")
        raise ConfigError(
            f"{word} would mix several files into one; choose one, as in {key}={one}, or run each of them with "
            f"{key}={value.strip('[]')} -m"
        )
    if not value:
        raise ConfigError(f"{word} chooses nothing; there are {', '.join(options(key))}")
    # Hydra takes a bare 1 or true for a number or a truth value, which are the names of no file to it
    return f"{key}='{value}'" if _NOT_TEXT.fullmatch(value) else f"{key}={value}"


def _bare(word: str) -> str:
    for group in groups():
        if word in options(group):
            return f"{word!r} is not KEY=VALUE; did you mean {group}={word}?"
    if word in groups():
        return f"{word!r} is not KEY=VALUE; write {word}=NAME with one of {', '.join(options(word))}"
    return f"{word!r} is not KEY=VALUE, such as hw=8xh20 or workload.rate=2; see pdsim run --help"


def check_calibration(words: Iterable[str], composed: Mapping[str, object]) -> None:
    """Raise a `ConfigError` if *words* choose a calibration that there is none of: Hydra takes it for optional."""
    for name in (word.partition("=")[2].strip("'\"") for word in words if word.startswith("calibration=")):
        if not composed.get("calibration"):
            raise ConfigError(_missing(f"calibration/{name}", None))


# --- and back -------------------------------------------------------------------------------------------------------


def explain(error: BaseException) -> str | None:
    """Return what *error*, raised while Hydra composed a configuration, says to a user; None if it is no refusal."""
    from hydra.errors import HydraException, MissingConfigException, OverrideParseException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError  # type: ignore[import-untyped]  # comes with omegaconf, its stubs do not

    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        return _missing(error.missing_cfg_file, error.options)
    if isinstance(error, OverrideParseException):
        return (
            f"{error.override.lstrip('+')}: a value with blanks, commas, brackets, quotes or = needs quotes of its own "
            f"within those of the shell, as in 'key=\"a, b\"'"
        )
    if not isinstance(error, HydraException | OmegaConfBaseException | YAMLError):
        return None
    text = " ".join(str(error).split())
    if found := re.search(r"Ambiguous value for argument '(.*?)' 1\. To use", text):
        return f"{found[1].lstrip('+')} names several values; add -m to run one point for each"
    if isinstance(error, YAMLError):
        return f"a configuration file is not YAML: {text}; correct it"
    cause = " ".join(str(error.__cause__).split()) if error.__cause__ is not None else ""
    return f"{text.replace('++', '')}{f' ({cause})' if cause and cause not in text else ''}; see pdsim run --help"


def _missing(file: str, known: Sequence[str] | None) -> str:
    if "/" not in file:
        return f"--config-name {file} does not exist; leave it out, or name a file of --config-dir"
    group, _, name = file.rpartition("/")
    if group.startswith("hydra/"):
        plugin = f"install hydra-{name}-launcher, or " if group == "hydra/launcher" else ""
        hint = near(name, known or (), group + "={}") or plugin
        return f"{group}={name} is not installed; {hint}choose one of {', '.join(known or ())}"
    known = known or options(group)
    return f"{group}={name} does not exist; {instead(name, known, group + '={}')}"
