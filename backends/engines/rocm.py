# SPDX-License-Identifier: Apache-2.0
"""Requirements of MORI's wheel; ``python -m backends.engines.rocm`` prints those that are missing here.

The wheel brings no part of ROCm, and its tag says nothing of it.  The versions are those that amd-mori 1.2.4 names
as needed in its libraries.  Looking loads libraries into the process, so those who go on to do something else look
from a process of its own.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["missing"]

GLIBC = (2, 38)
ROCM = Path("/opt/rocm/lib")  # where the wheel's libraries look, beside the linker's own places


def missing(rdma: bool = True) -> list[str]:
    """Return what MORI lacks here, in words; *rdma* says whether it is to use an RDMA device."""
    return [*_wheel(), *_libraries(), *(_device() if rdma else ())]


def _wheel() -> Iterator[str]:
    if importlib.util.find_spec("mori") is None:
        here = platform.python_version()
        yield f"no package amd-mori (it has wheels for Python 3.10 and 3.12 on manylinux_2_39; this is {here})"
    elif importlib.util.find_spec("torch") is None:
        yield "no torch, which mori.io imports"


def _libraries() -> Iterator[str]:
    name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "no glibc").partition(" ")
    if name != "glibc" or tuple(map(int, version.split(".")[:2])) < GLIBC:
        yield f"glibc is {version}, not >= {'.'.join(map(str, GLIBC))}"
    if not hasattr(_load("libstdc++.so.6"), "_ZSt21ios_base_library_initv"):  # the one symbol of that version
        yield "libstdc++ has no GLIBCXX_3.4.32"
    for library in ("libamdhip64.so.7", "libhsa-runtime64.so.1", os.environ.get("MORI_ROCM_SMI_PATH")):
        library = library or "librocm_smi64.so.1"
        if _load(library) is None:
            yield f"no {library} of ROCm 7"


def _device() -> Iterator[str]:
    folder = Path("/sys/class/infiniband")
    if not folder.is_dir() or not any(folder.iterdir()):
        yield f"no RDMA device in {folder}"


def _load(library: str) -> ctypes.CDLL | None:
    for place in (library, ROCM / library):
        try:
            return ctypes.CDLL(str(place))
        except OSError:
            continue
    return None


if __name__ == "__main__":
    sys.stdout.write("".join(f"{line}\n" for line in missing()))
