# SPDX-License-Identifier: Apache-2.0
"""The typed configuration that overrides ask for: composed by Hydra, typed, checked.

`compose` does all of it; its steps are `initialized`, `plain` and `load`.  ``hw.nic.rate=400Gbps`` goes to
Hydra as ``++hw.nic.rate=400Gbps``: Hydra then takes any key, and `pdsim.config` refuses the unknown ones in the same
words wherever they come from.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from hashlib import sha256
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pdsim.core import plugins
from pdsim.core.errors import ConfigError, instead
from pdsim.core.files import shown, yaml_text

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from pdsim.config import Config


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """A typed command line: overrides, and the places of the configuration."""

    words: tuple[str, ...] = ()  # KEY=VALUE, as typed
    folder: str = ""  # of more configuration files
    path: str = ""  # of the primary configuration, instead of pdsim's own folder
    name: str = "config"  # of the primary configuration

    @classmethod
    def of(cls, words: Sequence[str], options: Mapping[str, Any]) -> CommandLine:
        """Return the command line of *words* and *options*, by their long names; the folders they name exist."""
        for name in ("--config-dir", "--config-path"):
            if name in options and not Path(options[name]).is_dir():
                raise ConfigError(f"{name} {options[name]} is not a folder; name one that has configuration files")
        folder, path = (str(options.get(name, "")) for name in ("--config-dir", "--config-path"))
        return cls(words=tuple(words), folder=folder, path=path, name=options.get("--config-name", "config"))

    @property
    def folders(self) -> tuple[Path, ...]:
        """The user's folders of configuration groups."""
        return (Path(self.folder),) if self.folder else ()

    @property
    def home(self) -> Path | None:
        """The folder of the primary configuration; None: pdsim's own."""
        named = self.name != "config" and self.folder and (Path(self.folder) / f"{self.name}.yaml").is_file()
        place = self.path or (self.folder if named else "")
        return Path(place).resolve() if place else None


def compose(words: Sequence[str]) -> Config:
    """Return the typed and checked configuration that *words*, overrides only, ask for, or raise a `ConfigError`."""
    if flags := [word for word in words if word.startswith("-")]:
        raise ConfigError(f"{flags[0]} is no KEY=VALUE and no option of this command; see pdsim --help")
    return composed(CommandLine(words=tuple(words)))


def composed(line: CommandLine) -> Config:
    """Return the typed configuration that *line* asks for.  Raise a `ConfigError`, also for what Hydra refuses."""
    _forget(line)
    with _explained():
        return load(plain(line, line.words), line.words, line.folders)


def typed(values: DictConfig) -> Config:
    """Return the typed configuration of *values*, which Hydra composed for a user's application.

    The keys ``hydra`` and ``app`` are the application's.  Numbers that differ from what machine, backend, model and
    others are by name count as set by hand.  Raise a `ConfigError`.
    """
    with _explained():
        own = {key: value for key, value in resolved(values).items() if key not in ("hydra", "app")}
        groups = ("hw", "backend", "model", "engine", "collective", "experiment")
        names = {group: part.get("name") for group in groups if isinstance(part := own.get(group), Mapping)}
        chosen = [f"{group}={name}" for group, name in names.items() if name in plugins.options(group)]
        with initialized(line := CommandLine()):
            base = plain(line, chosen)
        changed = [key for group in groups for key in _changed(base.get(group), own.get(group), group)]
        return load(own, [f"{key}=" for key in changed])


def _changed(base: Any, own: Any, at: str) -> list[str]:
    if isinstance(base, Mapping) and isinstance(own, Mapping):
        return [key for name in own for key in _changed(base.get(name), own[name], f"{at}.{name}")]
    return [] if base == own or at.endswith((".source", ".sources")) else [at]


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if (refusal := explain(error)) is None:
            raise
        raise ConfigError(refusal) from error


@contextmanager
def initialized(line: CommandLine) -> Iterator[None]:
    """Tell Hydra where the configuration of *line* is, for all compositions within the block."""
    _forget(line)
    with _hydra(line):
        yield


def _forget(line: CommandLine) -> None:
    if line.folder or line.path:
        _composed.clear()  # files of one's own may have changed


def version_base() -> dict[str, Any]:
    """Return the arguments by which Hydra 1.3 behaves as later versions do, which warn of them."""
    from hydra import __version__

    return {"version_base": "1.3"} if __version__.startswith("1.3.") else {}


@contextmanager
def _hydra(line: CommandLine) -> Iterator[None]:
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    import conf  # noqa: F401  has the defaults of all keys, also for a primary configuration from elsewhere

    _bound_files()
    here = GlobalHydra.instance()
    outer, here.hydra = here.hydra, None  # of an application of Hydra's, within whose job this may be
    try:
        with (
            hydra.initialize_config_dir(str(line.home), **version_base())
            if line.home
            else hydra.initialize_config_module("conf", **version_base())
        ):
            yield
    finally:
        here.hydra = outer


@cache
def _bound_files() -> None:
    # What Hydra opens by the path is of a folder of one's own, or of a stranger's; pdsim's files come from packages.
    from hydra._internal.core_plugins.file_config_source import FileConfigSource
    from hydra._internal.sources_registry import SourcesRegistry
    from hydra.core.plugins import Plugins
    from yaml import YAMLError  # type: ignore[import-untyped]  # comes with omegaconf, its stubs do not

    class BoundedSource(FileConfigSource):
        def load_config(self, config_path: str) -> Any:
            path = Path(self.path) / self._normalize_file_name(config_path)
            try:
                yaml_text(path)
                return super().load_config(config_path)
            except UnicodeDecodeError as error:
                raise ConfigError(f"{path} is not text in UTF-8: {error}; save it as such") from error
            except YAMLError as error:
                text = " ".join(str(error).split()).replace('in "<unicode string>",', "at")
                raise ConfigError(f"{path} is not YAML: {text}; correct it") from error

    Plugins.instance()  # it registers Hydra's own sources, once
    SourcesRegistry.instance().types["file"] = BoundedSource


_composed: dict[tuple[CommandLine, tuple[str, ...]], dict[str, Any] | None] = {}
_SETTING = re.compile(r"\+\+((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)=([^{}$?]*)")  # not of a mapping, or an item of a list
_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_DECIMAL = re.compile(r"-?[0-9]+\.[0-9]+")
_NAME = re.compile(r"(?!(?:true|false|null|nan|inf)$)[a-z/][a-z0-9_./-]*", re.IGNORECASE | re.ASCII)


def plain(line: CommandLine, words: Sequence[str]) -> dict[str, Any]:
    """Return the composition of *words*, overrides as typed, as plain data, interpolations resolved.

    Hydra composes each choice of groups once (`_remembered`), and values are set in that.  Where overrides are
    within or refer to one another Hydra composes all.  Parts of the answer are shared with later ones.
    """
    every = ready(words, line.folders)
    settings = [setting for word in every if (setting := _setting(word))]
    others = tuple(word for word in every if not _setting(word))
    own = {f"{key}." for key, _ in settings}
    own_of_others = (f"{word.partition('=')[0].lstrip('+~')}." for word in others if word[0] in "+~" or "={" in word)
    within = any(inner.startswith(outer) for outer, inner in pairwise(sorted([*own, *own_of_others])))
    values = None if within else _base(replace(line, words=()), others)
    if values is None:
        return resolved(_raw(line, every))
    for key, value in settings:
        values = _with(values, key.split("."), value)
    return values


def _base(line: CommandLine, words: tuple[str, ...]) -> dict[str, Any] | None:
    # None if values refer to others, or are to be set
    if (line, words) not in _composed:
        kept = _remembered(words) if line == CommandLine() else None
        if kept is None or (values := _read(kept)) is None:
            composition = _raw(line, words)
            open_ended = any(mark in str(composition) for mark in ("${", "???"))
            values = None if open_ended else resolved(composition)
            if kept is not None and values is not None:
                _keep(kept, values)
        _composed[line, words] = values
    return _composed[line, words]


def _remembered(words: tuple[str, ...]) -> tuple[Path, str] | None:
    # The file that has, or is to have, the composition of *words*, and a mark of all that it is made of: groups,
    # defaults and Hydra.  A third of the time of a short run is spent without it.
    from pdsim.config import defaults

    digest = sha256(repr(defaults()).encode())
    spec = find_spec("hydra")
    sources = [Path(spec.origin)] if spec is not None and spec.origin else []  # it says its version
    for folder in plugins.folders().values():
        for place, below, names in os.walk(folder):
            below.sort()
            sources += [Path(place, name) for name in sorted(names) if name.endswith(".yaml")]
    for source in sources:
        digest.update(f"{source}\n".encode() + source.read_bytes())
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a home
        return None
    name = sha256("\n".join((str(plugins.conf()), *words)).encode()).hexdigest()[:16]
    return home / "pdsim" / f"{name}.composed", digest.hexdigest()


def _read(kept: tuple[Path, str]) -> dict[str, Any] | None:
    try:
        mark, values = msgspec.msgpack.decode(kept[0].read_bytes(), type=tuple[str, dict[str, Any]])
    except (OSError, msgspec.MsgspecError):
        return None
    return values if mark == kept[1] else None


def _keep(kept: tuple[Path, str], values: dict[str, Any]) -> None:
    # Where the folder cannot be written to, nothing is kept.
    place, mark = kept
    part = place.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(msgspec.msgpack.encode((mark, values)))
        part.replace(place)


@lru_cache(10_000)
def _setting(word: str) -> tuple[str, Any] | None:
    # the key and the value of an override that sets one value, None for another; of the simplest as Hydra reads them
    if (match := _SETTING.fullmatch(word)) is None:
        return None
    key, text = match.groups()
    if _INTEGER.fullmatch(text):
        return key, int(text)
    if _DECIMAL.fullmatch(text):
        return key, float(text)
    if _NAME.fullmatch(text):
        return key, text
    from hydra.core.override_parser.overrides_parser import OverridesParser

    (parsed,) = OverridesParser.create().parse_overrides([word])
    return None if parsed.is_sweep_override() else (key, parsed.value())


def _with(values: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    head, *rest = path
    below = values.get(head)
    return {**values, head: _with(below if isinstance(below, Mapping) else {}, rest, value) if rest else value}


def _raw(line: CommandLine, words: Sequence[str]) -> DictConfig:
    import hydra

    with _hydra(line):
        return hydra.compose(line.name, [*places(line), *words])


def places(line: CommandLine) -> list[str]:
    """Return the override that names Hydra further places of groups; [] if there are none."""
    urls = [f"file://{folder.resolve()}" for folder in line.folders if folder.resolve() != line.home]
    urls += [
        f"pkg://{package}" for package in plugins.folders() if package != "conf" or (line.home and not line.path)
    ]
    quoted = ("'{}'".format(place.replace("\\", "\\\\").replace("'", "\\'")) for place in urls)
    return [f"hydra.searchpath=[{','.join(quoted)}]"] if urls else []


def resolved(values: DictConfig) -> dict[str, Any]:
    """Return *values* as plain data, interpolations resolved."""
    from omegaconf import OmegaConf

    container: Any = OmegaConf.to_container(values, resolve=True, throw_on_missing=True)
    return {str(key): value for key, value in container.items()}


def load(values: dict[str, Any], words: Sequence[str], folders: Sequence[Path] = ()) -> Config:
    """Return *values*, composed of *words* and the user's *folders*, typed and checked.

    Raise a `ConfigError` with a line for each mistake.
    """
    from pdsim import config as schema
    from pdsim.config import quantities, rules

    for word in words:
        key, _, name = word.partition("=")
        if key == "calibration" and not values.get(key):
            raise ConfigError(_missing(f"calibration/{name.strip(chr(39) + chr(34))}", None))
    model = values.get("model")
    if isinstance(model, Mapping) and {"id", "path"} & set(model):
        from pdsim.models import huggingface

        values = {**values, "model": huggingface.expanded(model)}
    config = schema.load(values, set_keys([word.lstrip("+") for word in words]), folders)
    quantities.check(config, values, leaves(ready(words)))
    config = _on_shared_gpus(config)
    rules.check(config)
    return config


CONTEXT = 1 << 30
"""Bytes of a GPU that a process takes beside what it allocates: CUDA's context and the kernels of libraries."""


def _on_shared_gpus(config: Config) -> Config:
    # each GPU of the machine that is asked for is a share of one that is here
    hw = config.hw
    if config.target != "real" or not config.launch.share_gpus or hw.gpu is None:
        return config
    from backends.diagnosis import gpu_count, gpu_memory

    if not (here := gpu_count()):
        return config
    share = gpu_memory() // -(-hw.gpus // here) - CONTEXT
    return replace(config, hw=replace(hw, gpu=replace(hw.gpu, memory=min(hw.gpu.memory, share))))


def ready(words: Sequence[str], own: Sequence[Path] = ()) -> list[str]:
    """Return *words*, overrides as typed, as Hydra takes them; choices of a group may be those of the folders *own*.

    Raise a `ConfigError` for an argument that is not an override, with a suggestion.
    """
    known = {group: plugins.options(group, own) for group in plugins.groups(own)} if own else _installed()
    return [each for word in words for each in _expanded(word, known)]


def _expanded(word: str, known: Mapping[str, Sequence[str]]) -> list[str]:
    # model=Qwen/Qwen3-8B or model=./folder, where no file of the group has this name
    key, _, name = word.partition("=")
    if key == "model" and "/" in name and "," not in name and name not in known["model"]:
        return ["model=hf", f"++model.{'path' if name[0] in './~' or Path(name).exists() else 'id'}='{name}'"]
    return [_override(word, known)]


@cache
def _installed() -> Mapping[str, Sequence[str]]:
    return {group: plugins.options(group) for group in plugins.groups()}


_NOT_TEXT = re.compile(r"[-+]?[\d._]+(e[-+]?\d+)?|true|false|null|nan|[-+]?inf", re.IGNORECASE)


def set_keys(overrides: Iterable[str]) -> list[str]:
    """Return the dotted keys that *overrides* set, the choices of groups left out.

    >>> set_keys(["hw=8xh20", "hw.nic.rate=400Gbps", "++kv.pool=1GiB"])
    ['hw.nic.rate', 'kv.pool']
    """
    return [key for key in (text.partition("=")[0].lstrip("+~") for text in overrides) if "." in key]


def leaves(overrides: Iterable[str]) -> list[str]:
    """Return the dotted keys that *overrides* give values: ``a={b: 1}`` sets ``a.b``."""
    keys: list[str] = []
    for text in overrides:
        key, value = text.partition("=")[0].lstrip("+~"), None
        if "={" in text:
            from hydra.core.override_parser.overrides_parser import OverridesParser

            value = OverridesParser.create().parse_override(text).value()
        keys += _below(key, value) if isinstance(value, Mapping) else [key] if key not in _installed() else []
    return keys


def _below(key: str, value: Mapping[Any, Any]) -> Iterator[str]:
    for name, item in value.items():
        at = f"{key}.{getattr(name, 'text', name)}"  # a name in quotes is an object of Hydra's
        yield from _below(at, item) if isinstance(item, Mapping) else [at]


def _override(word: str, known: Mapping[str, Sequence[str]]) -> str:
    key, equals, value = word.partition("=")
    key = key.lstrip("+")
    if value.startswith("~/"):
        value = str(Path(value).expanduser())  # no shell does it after KEY=
    if key.lstrip("~").startswith("hydra"):
        raise ConfigError(f"{word} is for pdsim run, which then is a job of Hydra's; leave it out")
    if word.startswith("~") and (group := key[1:]) in known:
        raise ConfigError(f"{word} would leave a run without {group}; choose one, as in {group}=NAME")
    if word.startswith("~") or "@" in key:
        return word
    if not (key and equals):
        raise ConfigError(f"{word!r} is not KEY=VALUE{_hint(word, known)}")
    if key not in known:
        # Hydra takes letters of other alphabets only in quotes
        quoted = not value.isascii() and re.fullmatch(r"[^'\"\\()\[\]{},=]*", value)
        return f"++{key}='{value}'" if quoted else f"++{key}={value}"
    if (several := value.strip("[]")) != value and several:
        one, each = shown(f"{key}={several.partition(',')[0]}"), shown(f"{key}={several}")
        ways = f"choose one, as in {one}, or run each with pdsim sweep {each}"
        raise ConfigError(f"{shown(word)} would mix several files into one; {ways}")
    if not several:
        raise ConfigError(f"{shown(word)} chooses nothing; there are {', '.join(known[key])}")
    # Hydra takes a bare 1 or true for a number or a truth value, which are the names of no file to it
    return f"{key}='{value}'" if _NOT_TEXT.fullmatch(value) else f"{key}={value}"


def _hint(word: str, known: Mapping[str, Sequence[str]]) -> str:
    if groups := [group for group, names in known.items() if word in names]:
        return f"; did you mean {groups[0]}={word}?"
    if word in known:
        return f"; write {word}=NAME with one of {', '.join(known[word])}"
    return ", such as hw=8xh20 or workload.rate=2; see pdsim run --help"


def explain(error: BaseException) -> str | None:
    """Return a user's message for *error*, which Hydra raised in a composition; None if it is no refusal."""
    from hydra.errors import HydraException, MissingConfigException, OverrideParseException
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        return _missing(error.missing_cfg_file, error.options)
    if isinstance(error, OverrideParseException):
        needs = (
            "a value with blanks, commas, brackets, quotes or = needs quotes of its own within those of the shell"
        )
        return f"{error.override.lstrip('+')}: {needs}, as in 'key=\"a, b\"'"
    if not isinstance(error, HydraException | OmegaConfBaseException):
        return None
    text = " ".join(str(error).split())
    if match := re.search(r"Ambiguous value for argument '(.*?)' 1\. To use", text):
        return f"{match[1].lstrip('+')} names several values; pdsim sweep runs one point for each"
    if match := re.fullmatch(r"(.*?) full_key: (\S+) object_type=\w+", text):  # of OmegaConf
        what = "it has no value yet" if isinstance(error, MissingMandatoryValue) else match[1]
        return f"{match[2]}: {what}; write {match[2]}=VALUE, or name another key in full, as ${{kv.page_size}}"
    cause = " ".join(str(error.__cause__).split()) if error.__cause__ is not None else ""
    return f"{text.replace('++', '')}{f' ({cause})' if cause and cause not in text else ''}; see pdsim run --help"


def _missing(file: str, known: Sequence[str] | None) -> str:
    group, slash, name = file.rpartition("/")
    if not slash:
        return f"--config-name {file} does not exist; leave it out, or name a file of --config-dir"
    names = known or plugins.options(group)
    choices, more = instead(name, names, group + "={}"), ""
    if group == "model":
        from pdsim.models.huggingface import SHIPPED

        if same := SHIPPED.get(name.lower()):
            choices = f"did you mean model={same}, of the same shape? There are {', '.join(names)}"
        more = "; or model=ORGANISATION/NAME of the Hugging Face Hub, or model=./FOLDER"
    more += f"; a file of yours: DIR/{group}/{name}.yaml, with --config-dir DIR"
    return f"{group}={name} does not exist; {choices}{more}"
