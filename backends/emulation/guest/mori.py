# SPDX-License-Identifier: Apache-2.0
"""MORI in the RDMA guest: its wheel wants a newer C library than Debian 12 has, and ROCm.

So it runs on a Python 3.12 of this machine with Debian 13's dynamic linker and C and C++ libraries, the other
libraries that the wheel was linked against, and stand-ins for ROCm that say that there is no device.  All of it is
made from packages and kept in the user's cache; nothing is installed, mounted or changed outside it.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from backends.emulation.guest.engines import Recipe
from backends.emulation.guest.machine import DEVICE, Guest, GuestFailed, cache, command
from pdsim.core.errors import BackendUnavailable

WHEEL = "amd-mori==1.2.4"
PROGRAMS = {"gcc": "gcc", "nm": "binutils"}
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
REPOSITORY = Path(__file__).parents[3]

# MORI walks up from the device's folder until it comes to a PCI address, and never ends where there is none, as with
# soft-RoCE: so the guest shows the device below the address of the card that it is on.
_CARD = f"""
folder=$(readlink -f /sys/class/infiniband/{DEVICE})
card=$(basename "$(readlink -f /sys/class/net/eth0/device/..)")
mkdir -p "/run/cards/$card/{DEVICE}"
mount --bind "$folder" "/run/cards/$card/{DEVICE}"
mount -t tmpfs tmpfs /sys/class/infiniband
ln -s "/run/cards/$card/{DEVICE}" /sys/class/infiniband/{DEVICE}
"""
_ENVIRONMENT = {
    "PYTHONPATH": str(REPOSITORY),
    "MORI_IO_CP_TIMEOUT_MS": "60000",  # emulated processors are slow to make queue pairs
    # the other's thread keeps those that connect from a lock, if processors are few
    "MORI_IO_POLL_CQ_MODE": "event",
    "MORI_IO_QP_PER_TRANSFER": "1",
    "MORI_IO_NUM_WORKER_THREADS": "1",
}


def _prepare(guest: Guest) -> tuple[Sequence[str], Mapping[str, str]]:
    interpreter, libraries = python()
    done = guest.run("bash", "-ec", _CARD, timeout=60)
    if done.status:
        raise GuestFailed(f"the guest's RDMA device was not given a place on a bus: {done.output}")
    return [str(interpreter)], {**_ENVIRONMENT, "LD_PRELOAD": str(libraries / PAUSE)}


RECIPE = Recipe("mori", "mori.io", _prepare, lambda _: missing_requirements())


def python() -> tuple[Path, Path]:
    """Return the Python, which has this repository and MORI, and the folder of its libraries.

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
    content = Path(__file__).read_bytes() + (REPOSITORY / "pyproject.toml").read_bytes() + bytes(REPOSITORY)
    return cache() / f"mori-{hashlib.sha256(content).hexdigest()[:16]}"


def _make(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    libraries = folder / "libraries"
    libraries.mkdir(parents=True)
    _libraries(libraries)
    interpreter = _environment(folder, libraries)
    _made(str(interpreter), "-m", "pip", "install", "-q", WHEEL, "-e", str(REPOSITORY))
    packages = next((folder / "venv").glob("lib/python3.12/site-packages"))
    _stand_ins(packages, libraries)
    (packages / "torch.py").write_text(TORCH)
    (folder / "complete").touch()


def _libraries(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        _made("apt-get", *_apt(work / "apt"), "-qq", "download", *FROM_NEWER, cwd=work)
        _made("apt-get", "-qq", "download", *FROM_HERE, cwd=work)
        for package in work.glob("*.deb"):
            _made("dpkg-deb", "--extract", str(package), str(work / "files"))
        for library in (work / "files").glob("**/x86_64-linux-gnu/*.so*"):
            shutil.copy(library, folder, follow_symlinks=False)
    for alias, name in ALIASES.items():
        (folder / alias).symlink_to(name)


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


PAUSE = "pause.so"
"""To be preloaded where processors are few: MORI's completion thread looks for events without end, and this lets it
sleep until there are some.  It recognises its caller by how many events it takes at a time."""

LIBRARIES = {
    # the soname: the prefix of its functions, and what they answer
    "libamdhip64.so.7": ("hip", 100),  # hipErrorNoDevice, hip_runtime_api.h
    "libhsa-runtime64.so.1": ("hsa", 0x1000),  # HSA_STATUS_ERROR, hsa.h
}
OTHERS = {
    "hipGetErrorString": 'const char *hipGetErrorString(void) { return "no device: a stand-in for ROCm"; }',
    "hipGetLastError": "int hipGetLastError(void) { return 0; }",  # there was no error before
}

SMI = """
#include <stdbool.h>
#include <stdint.h>
/* One GPU without links: MORI ends the process where there is none, though it needs none for host memory. */
int rsmi_init(uint64_t flags) { return 0; }
int rsmi_shut_down(void) { return 0; }
int rsmi_num_monitor_devices(uint32_t *count) { *count = 1; return 0; }
int rsmi_dev_pci_id_get(uint32_t device, uint64_t *id) { *id = 0; return 0; }
int rsmi_is_P2P_accessible(uint32_t from, uint32_t to, bool *yes) { *yes = false; return 0; }
int rsmi_topo_get_link_type(uint32_t from, uint32_t to, uint64_t *hops, int *type)
{ *hops = 0; *type = 0; return 0; }
int rsmi_topo_get_link_weight(uint32_t from, uint32_t to, uint64_t *weight) { *weight = 0; return 0; }
int rsmi_status_string(int status, const char **text) { *text = "no device"; return 0; }
"""

WAIT = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/epoll.h>
int epoll_wait(int epoll, struct epoll_event *events, int most, int timeout) {
    static int (*next)(int, struct epoll_event *, int, int);
    if (!next) next = dlsym(RTLD_NEXT, "epoll_wait");
    return next(epoll, events, most, most == 128 && timeout == 0 ? 5 : timeout);
}
"""


def _stand_ins(packages: Path, folder: Path) -> None:
    wheel = sorted(map(str, packages.glob("mori/**/*.so")))
    wanted = _made("nm", "--dynamic", "--undefined-only", *wheel)
    for soname, (prefix, answer) in LIBRARIES.items():
        by_version: dict[str, set[str]] = defaultdict(set)
        for name, version in re.findall(rf" U (_*{prefix}\w+)@(\S+)", wanted):
            by_version[version].add(name)
        names = sorted(set().union(*by_version.values()))
        source = "\n".join(OTHERS.get(name, f"int {name}(void) {{ return {answer}; }}") for name in names)
        versions = [
            f"{version} {{ global: {'; '.join(sorted(all_of))}; }};" for version, all_of in by_version.items()
        ]
        _build(source, "\n".join(versions), folder / soname)
    _build(SMI, "", folder / "librocm_smi64.so.1")  # it is opened by name, and none of its functions is listed
    _build(WAIT, "", folder / PAUSE)


def _build(source: str, versions: str, target: Path) -> None:
    script = target.with_suffix(".map")
    script.write_text(versions or "{ global: *; };")
    options = ("-shared", "-fPIC", "-w", f"-Wl,--version-script={script}", f"-Wl,-soname,{target.name}")
    subprocess.run(
        ["gcc", "-x", "c", "-", *options, "-o", str(target)], input=source, text=True, check=True, timeout=60
    )
    script.unlink()
