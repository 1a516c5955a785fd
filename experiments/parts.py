# SPDX-License-Identifier: Apache-2.0
"""What an experiment of many simulations keeps of each as it ends, so that it can be run in parts and resumed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from pdsim.core.errors import ConfigError

Part = TypeVar("Part", bound=tuple[Any, ...])


class Parts(Generic[Part]):
    """What *path* keeps: tuples of *kind*, called *what*, by their first field.

    A file of JSON lines: *head* is the first and says what they are of, each other line is one.  Raise a
    `ConfigError` if the file is of another kind or of another *head*.  A last line that was cut short when a run was
    ended by force is dropped.
    """

    def __init__(self, path: Path, head: Mapping[str, Any], kind: type[Part], what: str) -> None:
        self.kept: dict[Any, Part] = {}
        self._path = path
        head = json.loads(json.dumps(head))
        try:
            if not path.exists() or not path.stat().st_size:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(head) + "\n", encoding="utf-8")
            first, *lines = path.read_bytes().splitlines(keepends=True)
            header = json.loads(first)
            for key, value in head.items():
                if header[key] != value:
                    raise ConfigError(
                        f"experiment.parts={path} keeps {what} of {key}={header[key]}, these are of {value}: "
                        "they do not add up; name another file"
                    )
            if lines and not lines[-1].endswith(b"\n"):
                torn = lines.pop()
                os.truncate(path, path.stat().st_size - len(torn))
            self.kept = {each[0]: each for each in (msgspec.json.decode(line, type=kind) for line in lines)}
        except OSError as error:
            raise ConfigError(
                f"experiment.parts={path}: {error.strerror}; name a file that can be written"
            ) from error
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"experiment.parts={path} does not keep {what}: {error}; name another file") from error

    def add(self, part: Part) -> None:
        """Keep *part*, for good when this returns."""
        self.kept[part[0]] = part
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(part) + b"\n")
