# SPDX-License-Identifier: Apache-2.0
"""The two files of a validation, of transfers as of servers: predictions and measurements, sealed with a hash.

Measurements name the hash of the predictions that they were made for, and a file that was changed by hand is
refused.  So a prediction cannot have been adjusted to what was measured.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from pdsim.core import files
from pdsim.core.errors import ConfigError
from pdsim.validation.verdicts import Value
from pdsim.version import __version__

EXPECTED, MEASURED = "expectations.json", "measurements.json"


def keep(path: Path, content: bytes) -> None:
    """Write *content* to *path*, and return when it and its name are on disk, before anything is measured."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read(path: Path, *keys: str) -> dict[str, Any]:
    """Return what is in *path*; raise a `ConfigError` as `unseal` does."""
    return unseal(files.whole(path), str(path), *keys)


def predictions(folder: Path) -> Path:
    """Return the file of predictions in *folder*, which gzip may have packed."""
    packed = folder / f"{EXPECTED}.gz"
    return packed if packed.is_file() else folder / EXPECTED


def adopt(source: Path, folder: Path, *keys: str) -> dict[str, Any]:
    """Copy the predictions *source*, a file or the folder that it is in, to *folder*, and return their content.

    Raise a `ConfigError` if there are none, or as `unseal` does.
    """
    path = predictions(source) if source.is_dir() else source
    try:
        content = files.whole(path)
    except OSError as error:
        way_out = f"name the {EXPECTED} of a run with experiment.predict=only"
        raise ConfigError(f"experiment.expected={source}: {error.strerror}; {way_out}") from error
    expected = unseal(content, str(path), *keys)
    keep(folder / EXPECTED, content)
    return expected


def seal(content: Mapping[str, Any]) -> bytes:
    """Return *content* as JSON with pdsim's version and the SHA-256 of all the rest, so that a later change shows.

    >>> unseal(seal({"seed": 1}), "predictions.json")["seed"]
    1
    """
    content = {"pdsim": __version__, **content}
    return (json.dumps({**content, "sha256": _digest(content)}, indent=1) + "\n").encode()


def unseal(text: bytes, name: str, *keys: str) -> dict[str, Any]:
    """Return what `seal` was given and, as ``sha256``, the hash.

    Raise a `ConfigError` that names the file *name* if it is no such file, was changed since, or lacks one of
    *keys*: files of transfers and of servers, and of other versions, differ.
    """
    try:
        content: dict[str, Any] = dict(json.loads(text))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{name} is not a file of a validation: {error}; name one that pdsim validate wrote"
        ) from error
    digest = content.pop("sha256", "")
    if digest != _digest(content):
        raise ConfigError(
            f"{name} was changed after it was written: its contents do not have its hash; take the original"
        )
    if missing := [key for key in keys if key not in content]:
        raise ConfigError(_foreign(content, name, f"no {missing[0]}"))
    return {**content, "sha256": digest}


def values_in(path: Path, key: str) -> list[Value]:
    """Return the values that the rows at *key* of the sealed file *path* hold.

    Raise a `ConfigError` as `unseal` does, or if the rows are of a version that had other fields.
    """
    content = read(path, key)
    try:
        unknown = sorted({field for row in content[key] for field in row} - {field.name for field in fields(Value)})
        if not unknown:
            return msgspec.convert(content[key], list[Value])
        reason = f"rows with {unknown[0]}"
    except (TypeError, msgspec.ValidationError) as error:
        reason = f"other rows ({error})"
    raise ConfigError(_foreign(content, str(path), reason))


def _foreign(content: Mapping[str, Any], name: str, reason: str) -> str:
    if {"requests", "runs"} & set(content):
        return f"{name} has {reason}, for it is of servers: use validate target=live, or experiment=validate_live"
    if {"expected", "measured"} & set(content) and reason in ("no requests", "no predicted", "no runs"):
        return f"{name} has {reason}, for it is of transfers: use validate without target=live"
    commit = f", commit {str(content['commit'])[:12]}" if content.get("commit") else ""
    writer = f"pdsim {content['pdsim']}" if "pdsim" in content else "an older pdsim"
    return (
        f"{name} has {reason}: {writer}{commit} wrote it, this is pdsim {__version__}; "
        "read it with the version that wrote it, or validate again"
    )


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
