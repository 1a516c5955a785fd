# SPDX-License-Identifier: Apache-2.0
"""Declarations of backends: their needs of a machine, and the abilities of their transfers.

An endpoint class lists a `Variant` for each backend (``conf/backend``) that it implements.  Nothing else in pdsim
knows an engine by name: `pdsim doctor`, the checks of ``target=real``, the conformance suite and the RDMA guest read
these.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from pdsim.core.errors import BackendUnavailable
from pdsim.core.units import one_of
from pdsim.hardware.costs import Engine

DEVICES = ("gpu", "rdma", "shm", "cma")
"""Needs of a variant, named as in `backends.diagnosis.devices`: GPUs, RDMA devices, shared memory, cross-memory
attach."""


@dataclass(frozen=True)
class EngineLibrary:
    """The name of an engine's library and its installation."""

    probe: str  # Python source that exits without an error, in a process of its own, if the library works
    distributions: tuple[str, ...]  # names that it may be installed under, tried in order
    install: str  # the command to print


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way in which an endpoint class moves bytes; a backend with several works if one of them does."""

    backend: str  # as `conf/backend` names it
    requires: EngineLibrary | None = None  # None: its package is all it needs
    device: str = ""  # one of `DEVICES`, without which it does not work
    memory: tuple[str, ...] = ("host",)  # which buffers it moves: "host", "gpu"
    one_sided: bool = False  # the target's process has no part in a transfer, which ends though that is stopped
    proves_quiescence: bool = True  # `Endpoint.quiesced` comes after a peer was killed
    posting_threads: bool = False  # the endpoint takes *posting*: `pdsim.transfer.job.RankSpec`
    guest: str = ""  # "module:object", a `Recipe` of `backends.emulation.guest.engines`: it runs in the RDMA guest
    same_as: str = ""  # another backend of the class whose transfers are the same: the suite runs that one
    tried_with: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # options, by suffix
    check: Callable[[Engine], Iterable[str]] | None = None  # yields reasons why a configuration is wrong
    notes: Callable[[Engine], Iterable[str]] | None = None  # yields what a run should say, though it is not wrong

    def __post_init__(self) -> None:
        one_of("variant", ("", *DEVICES), device=self.device)
        for memory in self.memory:
            one_of("variant", ("host", "gpu"), memory=memory)

    def on_hosts(self, nodes: int) -> bool:
        """Return whether it moves host memory, of one machine or between *nodes*, without GPUs and RDMA devices."""
        devices = ("", "shm", "cma") if nodes == 1 else ("",)
        return "host" in self.memory and self.device in devices and not self.guest


Declared = TypeVar("Declared", bound=Variant)


def declared(variants: Iterable[Declared], backend: str) -> list[Declared]:
    """Return those of *variants* that are *backend*, in order.  Raise `BackendUnavailable` without any."""
    every = list(variants)
    matching = [variant for variant in every if variant.backend == backend]
    if not matching:
        known = " or ".join(dict.fromkeys(variant.backend for variant in every))
        raise BackendUnavailable(f"backend {backend!r} is not one that target=real knows; use {known}")
    return matching
