# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the parts of ROCm that MORI's wheel is linked against, on a machine without an AMD GPU.

They are a test aid: they let the wheel load, and say that there is no device whenever they are asked, so that MORI's
RDMA engine can be tested on host memory.  Which functions it takes is read from the wheel itself.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

__all__ = ["PAUSE", "make"]

PAUSE = "pause.so"
"""To be preloaded where processors are few: MORI's completion thread looks for events without end, and this lets it
sleep until there are some.  It recognises its caller by how many events it takes at a time."""

LIBRARIES = {
    # the soname, and what every function answers
    "libamdhip64.so.7": 100,  # hipErrorNoDevice, hip_runtime_api.h
    "libhsa-runtime64.so.1": 0x1000,  # HSA_STATUS_ERROR, hsa.h
}
TEXTS = ("hipGetErrorString",)  # these answer with a text
QUIET = ("hipGetLastError",)  # there was no error before

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


def make(wheel: Iterable[Path], folder: Path) -> None:
    """Build in *folder* all that the libraries in *wheel* take from ROCm.

    *wheel* are the shared libraries of MORI; *folder* must exist.  Needs gcc and readelf; raises a
    `CalledProcessError` if one of them fails.
    """
    wanted = _wanted(wheel)
    for soname, answer in LIBRARIES.items():
        _build(_source(wanted[soname], answer), _versions(wanted[soname]), folder / soname)
    _build(SMI, "", folder / "librocm_smi64.so.1")  # it is opened by name, and none of its functions is listed
    _build(WAIT, "", folder / PAUSE)


def _wanted(wheel: Iterable[Path]) -> dict[str, dict[str, set[str]]]:
    wanted: dict[str, dict[str, set[str]]] = {soname: defaultdict(set) for soname in LIBRARIES}
    for library in wheel:
        needs: dict[str, tuple[str, str]] = {}  # a library and its version, by the number that symbols name
        soname = ""
        for line in _readelf("--version-info", library):
            if need := re.search(r"File: (\S+)", line):
                soname = need[1]
            elif version := re.search(r"Name: (\S+) +Flags: \S+ +Version: (\d+)", line):
                needs[version[2]] = soname, version[1]
        for line in _readelf("--dyn-syms", library):
            if symbol := re.search(r" UND (\S+)@\S+ \((\d+)\)", line):
                soname, version_name = needs[symbol[2]]
                if soname in wanted:
                    wanted[soname][version_name].add(symbol[1])
    return wanted


def _source(functions: dict[str, set[str]], answer: int) -> str:
    lines = []
    for name in sorted(set().union(*functions.values())):
        if name in TEXTS:
            lines.append(f'const char *{name}(void) {{ return "no device: a stand-in for ROCm"; }}')
        else:
            lines.append(f"int {name}(void) {{ return {0 if name in QUIET else answer}; }}")
    return "\n".join(lines)


def _versions(functions: dict[str, set[str]]) -> str:
    return "".join(f"{version} {{ global: {'; '.join(sorted(names))}; }};\n" for version, names in functions.items())


def _build(source: str, versions: str, target: Path) -> None:
    script = target.with_suffix(".map")
    script.write_text(versions or "{ global: *; };")
    options = ("-shared", "-fPIC", "-w", f"-Wl,--version-script={script}", f"-Wl,-soname,{target.name}")
    subprocess.run(
        ["gcc", "-x", "c", "-", *options, "-o", str(target)], input=source, text=True, check=True, timeout=60
    )
    script.unlink()


def _readelf(what: str, library: Path) -> list[str]:
    command = ["readelf", "--wide", what, str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
