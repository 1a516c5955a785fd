# SPDX-License-Identifier: Apache-2.0
"""The bundle of `pdsim probe`: a ZIP file of what one machine measured, without names, addresses or paths of it.

``about.json`` says what was measured, what was not and why; ``transfers/``, ``compute/`` and ``gathers/`` have CSV
files of samples, ``doctor.txt`` what works there, and ``hw.yaml`` the machine, where it is a file of the user's own.
"""

import getpass
import io
import json
import os
import re
import socket
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pdsim.core import files
from pdsim.core.errors import ConfigError

ABOUT = "about.json"
_NAMES = re.compile(r"about\.json|doctor\.txt|hw\.yaml|(?:transfers|compute|gathers)/[\w.-]+\.csv")
_LARGEST = 64 << 20  # bytes of all its files
_KEPT = ("kind", "source", "command", "date", "measured", "host", "versions", "gpus", "turn", "failures")
_ADDRESS = re.compile(
    r"\b[a-z][a-z0-9+.-]*://[^\s,;'\")]+"  # URL
    r"|(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.])"  # IPv4
    r"|(?<![\w:])(?=[0-9a-f:]*(?:::|(?::[0-9a-f]*){3}))[0-9a-f:]{3,}(?:%\w+)?",  # IPv6, MAC, GID
    re.IGNORECASE,
)
_PATH = re.compile(r"(?<![\w./])(?!/(?:dev|sys|proc)/)~?/[\w.+@~-]+(?:/[\w.+@~-]*)*")


def bare(text: str) -> str:
    """Return *text* without the names of this machine and its user, addresses, and paths but those of devices.

    >>> bare("bound to 10.1.2.3 (/srv/data/a.csv), fe80::1:2, at 40 GB/s; no /dev/kfd")
    'bound to ADDRESS (PATH), ADDRESS, at 40 GB/s; no /dev/kfd'
    """
    text = _PATH.sub("PATH", _ADDRESS.sub("ADDRESS", text))
    for name in _own():
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "NAME", text)
    return text


def _own() -> list[str]:
    names = {socket.gethostname(), *(os.environ.get(key, "") for key in ("USER", "LOGNAME", "HOSTNAME"))}
    with suppress(OSError, KeyError):  # a user without an entry
        names.add(getpass.getuser())
    with suppress(OSError):
        names.add(socket.getfqdn())
    names |= {name.split(".")[0] for name in names}
    common = {"localhost", "localdomain", "root"}  # of any machine
    return sorted((name for name in names - common if len(name) > 1), key=len, reverse=True)


def bare_samples(text: str) -> str:
    """Return the CSV file *text* with those of its comments that tell of no run, path or name."""
    lines = text.splitlines()
    comments = [line for line in lines if line.startswith("#")]
    kept = [bare(line) for line in comments if line[1:].partition(":")[0].strip() in _KEPT]
    return "\n".join([*kept, *(line for line in lines if not line.startswith("#")), ""])


def write(path: Path, about: Mapping[str, Any], texts: Mapping[str, str]) -> None:
    """Write *about* and *texts*, by their names in the bundle, to *path*, whole or not at all."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in {ABOUT: json.dumps(about, indent=1), **texts}.items():
            archive.writestr(_entry(name), text)
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(content.getvalue())
    part.replace(path)


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name)  # with the same time, mode and system everywhere
    entry.compress_type = zipfile.ZIP_DEFLATED
    return entry


def is_bundle(path: Path) -> bool:
    """Return whether *path* is a ZIP file."""
    return path.is_file() and zipfile.is_zipfile(path)


def read(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what the bundle *path* says about itself, and its other texts by name.

    Raise a `ConfigError` for what is not a bundle, or too large for one.
    """
    way_out = "name a file that pdsim probe wrote"
    try:
        with zipfile.ZipFile(io.BytesIO(files.whole(path, _LARGEST))) as archive:
            entries = archive.infolist()
            if wrong := [entry.filename for entry in entries if not _NAMES.fullmatch(entry.filename)]:
                raise ConfigError(f"--from {path}: {wrong[0]!r} is not of a bundle; {way_out}")
            if sum(entry.file_size for entry in entries) > _LARGEST:
                raise ConfigError(f"--from {path}: more than {_LARGEST >> 20} MiB unpacked; {way_out}")
            texts = {entry.filename: archive.read(entry).decode() for entry in entries}
        about = json.loads(texts.pop(ABOUT))
        hw = str(about["hw"])
    except (OSError, KeyError, TypeError, ValueError, RuntimeError, zipfile.BadZipFile) as error:
        raise ConfigError(f"--from {path}: not a bundle ({error}); {way_out}") from error
    if not re.fullmatch(r"[\w.-]+", hw) or "${" in texts.get("hw.yaml", ""):
        raise ConfigError(f"--from {path}: hw {hw!r} must be a plain name, and hw.yaml without ${{}}; {way_out}")
    return about, texts
