# SPDX-License-Identifier: Apache-2.0
"""The kernel and the first files of the RDMA guest, made from Debian packages and kept in the user's cache."""

from __future__ import annotations

import hashlib
import lzma
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pdsim.core.errors import BackendUnavailable

__all__ = ["Image", "cache", "cached", "command"]

INIT = Path(__file__).with_name("init")
MODULES = ("virtio_pci", "virtio_net", "9pnet_virtio", "9p", "overlay", "ib_uverbs", "crc32_generic", "rdma_rxe")
FOLDERS = ("bin", "dev", "lower", "modules", "proc", "root", "sys", "upper")
DOWNLOAD = 600.0  # seconds that a package may take to arrive, and any other step of the making


@dataclass(frozen=True)
class Image:
    """An image for QEMU: a kernel and its initial files."""

    kernel: Path
    initrd: Path


def cached() -> Image:
    """Return the image in the user's cache; make it there if it is absent, or older than this code.

    The first call downloads two packages and takes a minute.  Raise `BackendUnavailable` if apt cannot provide them.
    """
    key = hashlib.sha256(INIT.read_bytes() + Path(__file__).read_bytes()).hexdigest()[:16]
    folder = cache() / f"rdma-guest-{key}"
    if not folder.is_dir():
        _make(folder)
    return Image(folder / "vmlinuz", folder / "initrd.xz")


def cache() -> Path:
    """Return the user's cache of pdsim."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdsim"


def _make(folder: Path) -> None:
    # It is made beside its place and renamed, so two processes may make it at once and none sees half of it.
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".rdma-guest-", dir=folder.parent) as name:
        work = Path(name)
        kernel, busybox = work / "kernel", work / "busybox"
        _unpack(_newest_kernel(), kernel)
        _unpack("busybox-static", busybox)
        made = work / "image"
        made.mkdir()
        shutil.copy(next(kernel.glob("boot/vmlinuz-*")), made / "vmlinuz")
        (made / "initrd.xz").write_bytes(_archive(kernel, next(busybox.glob("**/bin/busybox"))))
        try:
            made.rename(folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise


# --- packages ------------------------------------------------------------------------------------------------------


def _newest_kernel() -> str:
    package = re.search(r"Depends: (linux-image-\S+)", command("apt-cache", "depends", "linux-image-amd64"))
    if not package:
        raise BackendUnavailable("apt knows no linux-image-amd64: run apt-get update, on Debian for x86-64")
    return package[1]


def _unpack(package: str, folder: Path) -> None:
    folder.mkdir()
    command("apt-get", "download", package, cwd=folder)
    command("dpkg-deb", "--extract", str(next(folder.glob("*.deb"))), str(folder))


def command(*words: str, cwd: Path | None = None, about: str = "the guest's files are Debian packages") -> str:
    """Run *words* for `DOWNLOAD` seconds at most and return what is printed.

    Raise `BackendUnavailable`, with what it is *about* or with the end of the output, if that fails.
    """
    try:
        done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=DOWNLOAD, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendUnavailable(f"{about}: {error}") from error
    if done.returncode:
        raise BackendUnavailable(f"{' '.join(words)}: {(done.stderr or done.stdout).strip()[-500:]}")
    return done.stdout


# --- the initial files ---------------------------------------------------------------------------------------------


def _archive(kernel: Path, busybox: Path) -> bytes:
    shipped = {_plain(path.name.partition(".")[0]): path for path in kernel.glob("lib/modules/*/kernel/**/*.ko*")}
    modules: dict[str, bytes] = {}
    for module in MODULES:
        _load(_plain(module), shipped, modules)
    files = {"init": INIT.read_bytes(), "bin/busybox": busybox.read_bytes()}
    files |= {f"modules/{name}": data for name, data in modules.items()}
    files["modules/order"] = "".join(f"{name}\n" for name in modules).encode()
    entries = [(name, stat.S_IFDIR | 0o755, b"") for name in FOLDERS]
    entries += [(name, stat.S_IFREG | 0o755, data) for name, data in files.items()]
    # the kernel knows no other check
    return lzma.compress(b"".join(_cpio(entries)), check=lzma.CHECK_CRC32, preset=1)


def _plain(module: str) -> str:
    return module.replace("-", "_")


def _load(module: str, shipped: dict[str, Path], modules: dict[str, bytes]) -> None:
    if module in modules or module not in shipped:
        return
    data = shipped[module].read_bytes()
    if shipped[module].suffix == ".xz":
        data = lzma.decompress(data)
    needs = re.search(rb"\0depends=([^\0]*)\0", data)
    for need in needs[1].decode().split(",") if needs else ():
        _load(_plain(need), shipped, modules)
    modules[module] = data


def _cpio(entries: list[tuple[str, int, bytes]]) -> Iterator[bytes]:
    for number, (name, mode, data) in enumerate([*entries, ("TRAILER!!!", 0, b"")], start=1):
        fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
        head = b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0"
        yield head + bytes(-len(head) % 4)
        yield data + bytes(-len(data) % 4)
