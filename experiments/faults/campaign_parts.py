# SPDX-License-Identifier: Apache-2.0
"""Scenarios of `experiment=faults` that are kept as they finish, so that a campaign can be run in parts and resumed.

A file of JSON lines: the first says by which code, and with which options, the scenarios were run; each other one is
a scenario.  Parts of other code or other options do not add up with these, and are refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.faults.scenario import Tried
from pdsim.core.errors import ConfigError
from pdsim.verify.invariants import Violation

__all__ = ["CampaignParts", "code"]

_ROOT = Path(__file__).resolve().parents[2]
_CODE = (
    *("pdsim/core", "pdsim/hardware", "pdsim/transfer", "pdsim/sim", "pdsim/kv", "pdsim/serving", "pdsim/verify"),
    "experiments/faults",
)
"""Folders of the sources that decide what becomes of a scenario."""


def code() -> str:
    """Return the SHA-256, in hexadecimal, of the sources in `_CODE`."""
    digest = hashlib.sha256()
    for path in sorted(path for room in _CODE for path in (_ROOT / room).rglob("*.py")):
        digest.update(str(path.relative_to(_ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


class CampaignParts:
    """The scenarios that *path* keeps, by seed; *options* are what all of them have alike.

    Raise a `ConfigError` if the file is of another kind, of other options, or of other code.  A last line that was
    cut short when a run was ended by force is dropped.
    """

    def __init__(self, path: Path, options: Mapping[str, Any]) -> None:
        self.tried: dict[int, Tried] = {}
        self._path = path
        head = json.loads(json.dumps({"faults": 1, "code": code(), **options}))
        try:
            if not path.exists() or not path.read_bytes():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(head) + "\n", encoding="utf-8")
            self._read(path.read_text(encoding="utf-8"), head)
        except OSError as error:
            raise ConfigError(
                f"experiment.parts={path}: {error.strerror}; name a file that can be written"
            ) from error
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"experiment.parts={path} does not keep scenarios: {error}; name another file"
            ) from error

    def add(self, tried: Tried) -> None:
        """Keep *tried*, for good when this returns."""
        self.tried[tried.seed] = tried
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(tried) + "\n")

    def note(self) -> str:
        """Return in one line what the file keeps."""
        bad = sum(bool(each.violations) for each in self.tried.values())
        return f"{self._path} keeps {len(self.tried)} scenarios, {bad} with violations"

    def _read(self, text: str, head: Mapping[str, Any]) -> None:
        first, *lines = text.splitlines(keepends=True)
        header = json.loads(first)
        for key, value in head.items():
            if header[key] != value:
                raise ConfigError(
                    f"experiment.parts={self._path} keeps scenarios of {key}={header[key]}, these are of {value}: "
                    "they do not add up; name another file"
                )
        if lines and not lines[-1].endswith("\n"):
            torn = lines.pop()
            with self._path.open("r+b") as file:
                file.truncate(len(text.encode()) - len(torn.encode()))
        for line in lines:
            seed, violations, statuses, events, words = json.loads(line)
            self.tried[int(seed)] = Tried(seed, [Violation(*each) for each in violations], statuses, events, words)
