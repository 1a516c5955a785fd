# SPDX-License-Identifier: Apache-2.0
"""A Python in which amd-mori's wheel loads on Debian 12 and without ROCm, made from packages and kept in the cache.

The wheel wants a newer C library than Debian 12 has, and ROCm.  So `python` starts a Python 3.12 of this machine
with Debian 13's dynamic linker and C and C++ libraries, with the other libraries that the wheel was linked against,
and with `shims` for ROCm.  Nothing is installed, mounted or changed outside the cache, and no library leaks into
other programs.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from backends.emulation.guest.image import command
from backends.emulation.guest.mori import shims
from pdsim.core.errors import BackendUnavailable

__all__ = ["REPOSITORY", "missing_requirements", "python"]

WHEEL = "amd-mori==1.2.4"
PROGRAMS = {"gcc": "gcc", "readelf": "binutils"}
NEWER = "trixie"  # Debian 13, whose C library the wheel can use
FROM_NEWER = ("libc6", "libstdc++6", "libgcc-s1")
FROM_HERE = (
    "libabsl20220623", "libgrpc++1.51", "libgrpc29", "libprotobuf32", "libre2-9", "libc-ares2",
    "libpci3", "libdrm2", "libdrm-amdgpu1", "libnuma1",
)  # fmt: skip
ALIASES = {"libre2.so.10": "libre2.so.9"}  # Ubuntu's name of the same library
LINKER = "ld-linux-x86-64.so.2"
TORCH = (
    "class Tensor: pass  # not PyTorch: all that mori.io takes from it at import is this name, for an annotation\n"
)
COMPILED = ("pdsim", "backends", "experiments")
REPOSITORY = Path(__file__).parents[4]


def python() -> tuple[Path, Path]:
    """Return the Python, which has this repository and MORI, and the folder of its libraries.

    Make them if they are absent or older than this code.

    Raise `BackendUnavailable` if something that they are made of is missing.  The first call downloads and takes
    minutes; later ones only compile the repository's modules that have changed.
    """
    folder = _folder()
    if not (folder / "complete").exists():
        if problem := missing_requirements():
            raise BackendUnavailable(problem)
        _make(folder)
    interpreter = folder / "venv" / "bin" / "python"
    # where it is emulated, it could neither do so quickly nor keep what it has done
    _made(str(interpreter), "-m", "compileall", "-q", *(str(REPOSITORY / name) for name in COMPILED))
    return interpreter, folder / "libraries"


def missing_requirements() -> str:
    """Return what to install for MORI in the guest, or nothing if all is there."""
    if not (REPOSITORY / "pyproject.toml").exists():
        return (
            f"MORI in the guest needs a checkout of pdsim, and {REPOSITORY} is none: git clone, and pip install -e ."
        )
    if (_folder() / "complete").exists():
        return ""
    problems = [] if _base() else ["a Python 3.12, for which it has wheels: uv python install 3.12"]
    if packages := [package for program, package in PROGRAMS.items() if not shutil.which(program)]:
        problems.append(f"apt-get install -y --no-install-recommends {' '.join(packages)}")
    return f"MORI in the guest needs {' and '.join(problems)}" if problems else ""


def _folder() -> Path:
    parts = [Path(__file__), Path(shims.__file__), REPOSITORY / "pyproject.toml"]
    content = b"".join(part.read_bytes() for part in parts) + bytes(REPOSITORY)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "pdsim" / f"mori-{hashlib.sha256(content).hexdigest()[:16]}"


def _make(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    libraries = folder / "libraries"
    libraries.mkdir(parents=True)
    _libraries(libraries)
    interpreter = _environment(folder, libraries)
    _made(str(interpreter), "-m", "pip", "install", "-q", WHEEL, "-e", str(REPOSITORY))
    packages = next((folder / "venv").glob("lib/python3.12/site-packages"))
    shims.make(packages.glob("mori/**/*.so"), libraries)
    (packages / "torch.py").write_text(TORCH)
    (folder / "complete").touch()


# --- libraries -----------------------------------------------------------------------------------------------------


def _libraries(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        _download(FROM_NEWER, work, *_apt(work / "apt"))
        _download(FROM_HERE, work)
        for package in work.glob("*.deb"):
            _made("dpkg-deb", "--extract", str(package), str(work / "files"))
        for library in (work / "files").glob("**/x86_64-linux-gnu/*.so*"):
            shutil.copy(library, folder, follow_symlinks=False)
    for alias, name in ALIASES.items():
        (folder / alias).symlink_to(name)


def _download(packages: tuple[str, ...], folder: Path, *options: str) -> None:
    _made("apt-get", *options, "-qq", "download", *packages, cwd=folder)


def _apt(folder: Path) -> tuple[str, ...]:
    for part in ("lists/partial", "cache/archives/partial"):
        (folder / part).mkdir(parents=True)
    mirrors = _made("apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages").split()
    if not mirrors:
        raise BackendUnavailable("apt has no list of packages: run apt-get update, on Debian 12 for x86-64")
    (folder / "sources").write_text(f"deb {mirrors[0]} {NEWER} main\n")
    places = {"State::lists": "lists", "Cache": "cache", "Etc::sourcelist": "sources", "Etc::sourceparts": "-"}
    options = tuple(f"-oDir::{key}={folder / value}" for key, value in places.items())
    _made("apt-get", *options, "-qq", "update")
    return options


# --- Python --------------------------------------------------------------------------------------------------------


def _environment(folder: Path, libraries: Path) -> Path:
    base = _base()
    assert base is not None, "missing_requirements() says so"
    _made(str(base), "-m", "venv", str(folder / "venv"))
    interpreter = folder / "venv" / "bin" / "python"
    interpreter.unlink()
    # the linker tells Python where it was started from, or it would not find its environment
    interpreter.write_text(
        f'#!/bin/sh\nexec {libraries / LINKER} --library-path {libraries} --argv0 "$0" {base.resolve()} "$@"\n'
    )
    interpreter.chmod(0o755)
    return interpreter


def _base() -> Path | None:
    for candidate in _candidates():
        done = subprocess.run([candidate, "-V"], capture_output=True, text=True, timeout=60, check=False)
        if done.stdout.startswith("Python 3.12."):
            return Path(candidate)
    return None


def _candidates() -> Iterator[str]:
    yield from filter(None, [shutil.which("python3.12"), sys.executable])
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    for folder, name in ((pyenv / "versions", "3.12*"), (Path.home() / ".local/share/uv/python", "cpython-3.12*")):
        yield from map(str, folder.glob(f"{name}/bin/python3.12"))


def _made(*words: str, cwd: Path | None = None) -> str:
    return command(*words, cwd=cwd, about="MORI's test environment is made of packages")
