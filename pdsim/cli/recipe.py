# SPDX-License-Identifier: Apache-2.0
"""`pdsim recipe`: the commands or YAML of a deployment become a configuration, and a kept run launch commands."""

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pdsim.cli.help import parse
from pdsim.core import files
from pdsim.core.errors import ConfigError
from pdsim.core.files import printable
from pdsim.recipes import Recipe, translated
from pdsim.recipes.commands import servers
from pdsim.results.record import Table
from pdsim.results.terminal import program, show_lines, show_table


def recipe(words: Sequence[str]) -> int:
    """Print the configuration of the deployment that *words* name, or run it; return the exit status.

    Raise a `ConfigError` for a text without servers, for an unknown flag, and for what cannot be composed.
    """
    rest, asked = parse("recipe", words)
    if "--to" in asked:
        return _commands(asked["--to"], rest)
    set_first = re.compile(r"[A-Z_][A-Z0-9_]*=\S* ")  # a variable of a command line, as UCX_TLS=tcp
    own = [
        word for word in rest if "=" in word.split(" ")[0] and not set_first.match(word) and not Path(word).exists()
    ]
    if lost := [word for word in rest if word not in own and " " not in word and not Path(word).is_file()]:
        raise ConfigError(
            f"{lost[0]} is not a file; name one, or write a command line in quotes: 'vllm serve MODEL'"
        )
    texts = [
        files.given(Path(word), "name a text file") if Path(word).is_file() else word
        for word in rest
        if word not in own
    ]
    if not texts:
        raise ConfigError("recipe needs a command line in quotes, or a file; see pdsim recipe --help")
    deployed = [server for text in texts for server in servers(text)]
    made = translated(deployed, ignore_unknown="--ignore-unknown" in asked)
    # the parallel of a machine may have more instances than the recipe
    chosen = {word.partition("=")[0]: word for word in ("parallel=tp1", *made.words, *own)}
    command = list(chosen.values())
    _show(made)
    if path := asked.get("--output"):
        with files.whole_file(path) as file:
            file.write(_yaml(command).encode())
        show_lines(f"written: {path}; pdsim run --config-dir {path.parent} --config-name {path.stem}")
    if "--run" not in asked:
        from pdsim.config.compose import compose

        compose(command)  # what does not fit is said here, not when it is run
        show_lines(f"next:\n  {program()} run {shlex.join(command)}")
        return 0
    from pdsim.cli.main import main

    return main(["run", *command])


def _show(made: Recipe) -> None:
    columns = {"of": "the servers", "flag": "as written", "means": "the key and its value"}
    show_table(Table("What decides", columns, [list(row) for row in made.taken]), definitions=False)
    for what, flags in (
        ("no effect on times", made.timeless),
        ("not modelled", made.unmodelled),
        ("unknown, ignored", made.unknown),
    ):
        if flags:
            show_lines(f"{what}: {', '.join(flags)}")


def _yaml(words: Sequence[str]) -> str:
    # a primary configuration: groups in its defaults list, keys below
    import yaml  # type: ignore[import-untyped]  # comes with omegaconf, its stubs do not

    from pdsim.config import compose
    from pdsim.core import plugins

    ready = [word.lstrip("+").replace("'", "").partition("=") for word in compose.ready(words)]
    groups = {key: value for key, _, value in ready if key in plugins.groups()}
    own: dict[str, object] = {}
    for key, _, value in ready:
        *parts, last = key.split(".")
        inner = own
        if key not in groups:
            for part in parts:
                inner = inner.setdefault(part, {})  # type: ignore[assignment]  # made here alone
            inner[last] = yaml.safe_load(value)
    defaults = ["config", *({f"override {group}": name} for group, name in groups.items()), "_self_"]
    return str(yaml.safe_dump({"defaults": defaults, **own}, sort_keys=False))


def _commands(engine: str, folders: Sequence[str]) -> int:
    from backends.live.commands import MODULES, launches, refusals, router
    from pdsim.config import load, presets
    from pdsim.results import schema

    if engine not in MODULES:
        raise ConfigError(f"--to {engine} is not known; write --to {' or --to '.join(MODULES)}")
    if len(folders) != 1 or not Path(folders[0]).is_dir():
        raise ConfigError(f"--to {engine} needs the folder of one run, got {' '.join(folders) or 'none'}; name one")
    values = schema.read_nested(Path(folders[0]) / "config.yaml")
    config = load({key: value for key, value in values.items() if key not in ("defaults", "hydra")})
    if getattr(config.experiment, "deployment", "") == "colocated":
        config = replace(config, live=replace(config.live, layout="colocated"))
    if presets.family(config.engine.name) != engine:  # whose fraction is of other bytes
        newest = list(presets.RELEASES[engine])[-1]
        value = presets.settings(engine, newest)["scheduler.memory_fraction"].value
        fraction = value(config) if callable(value) else value
        config = replace(config, scheduler=replace(config.scheduler, memory_fraction=fraction))
    named = re.search(r"config\.json of (\S+/\S+)", " ".join(config.model.sources.values()))
    model = Path(named[1] if named else config.model.name)
    if problems := list(refusals(config, engine)):
        raise ConfigError("\n".join(problems))
    started = launches(config, engine, model)
    for server in started:
        variables = [f"{name}={value}" for name, value in server.environment.items()]
        command = shlex.join([*variables, "python", *server.command[1:]])
        command = re.sub(" --load-format dummy| --skip-tokenizer-init", "", command)  # of pdsim's own measurements
        sys.stdout.write(printable(f"# {server.name}\n{command}\n"))
    if command := router(config, engine, started):
        sys.stdout.write(printable(f"# router\n{command}\n"))
    return 0
