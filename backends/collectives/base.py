# SPDX-License-Identifier: Apache-2.0
"""The libraries that groups of real ranks gather with: entry points of the group ``pdsim.collectives``.

Those of pdsim come with PyTorch, which is imported on the thread that connects a group: a rank in no group never
loads it.
"""

import datetime
import importlib.util
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from backends.base.device import HostDevice
from pdsim.core import plugins
from pdsim.core.errors import (
    BackendUnavailable,
    ConfigError,
    OutOfMemory,
    PeerLost,
    TransferError,
    TransferFailed,
    TransferTimeout,
    instead,
)
from pdsim.hardware.costs import Collective


class Library(ABC):
    """What moves the bytes of one group.  Raises `TransferError`s.

    `connect` is called once; `reserve` and `start` one at a time, in the same order on all ranks; `poll` on the
    clock's thread until the work is over; `abort` at the end, or when something failed.
    """

    engine: str  # as it reports itself
    memory: str  # that it gathers: "host" or "gpu"
    times_device: bool = False  # whether `start` can be told to time the device alone
    timing: str = "caller"  # of `pdsim.hardware.costs.Collective`; "device" only where it *times_device*

    def __init__(self, device: Any, timeout: float) -> None:
        """Gather memory of *device*; nothing takes more than *timeout* seconds."""
        self._device = device
        self._timeout = timeout

    @classmethod
    def missing(cls) -> str:
        """Return what it needs and this machine lacks, and what would help, in a few words; or nothing."""
        return ""

    @abstractmethod
    def connect(self, index: int, count: int, host: str, port: int, listener: socket.socket | None) -> None:
        """Connect to the other ranks at a store, which the first opens on *listener*; on a thread of its own."""

    @abstractmethod
    def start(self, source: Any, target: Any, size: int, symmetric: bool, places: Sequence[tuple[int, int]]) -> Any:
        """Begin to gather and return the work; on the clock's thread, so it must not block.

        *source* and *target* are buffers of the device, *size* bytes of each rank, once for each of *places*, where
        the piece begins in *source* and where all begin in *target*.
        """

    @abstractmethod
    def poll(self, work: Any) -> float | None:
        """Return None while *work* goes on, then the seconds that it took on the device, 0 if unknown.

        Raise a `TransferError` if the work has failed; the group is broken then, and `abort` follows.
        """

    @abstractmethod
    def reserve(self, size: int) -> Callable[[], None]:
        """Allocate and register *size* bytes together with the other ranks; on a thread of its own.

        Return what adds them to the device's pool, to be called on the clock's thread.
        """

    @abstractmethod
    def abort(self) -> None:
        """Stop everything that moves; on a thread of its own.

        When it returns the buffers of the call are released; when it raises they stay held until the process ends.
        """


def library(settings: Collective, device: Any) -> Library:
    """Return the library that *settings* choose for the memory of *device*.

    Raise `BackendUnavailable` if it is not installed, and a `ConfigError` if it cannot move that memory.
    """
    chosen = _class(settings.implementation)
    if problem := chosen.missing():
        raise BackendUnavailable(f"collective={settings.name} {problem}")
    memory = "host" if isinstance(device, HostDevice) else "gpu"
    if chosen.memory != memory:
        fit = [name for name in plugins.names(plugins.COLLECTIVES) if _class(name).memory == memory]
        raise ConfigError(
            f"collective={settings.name} does not gather memory of {device.name}; "
            f"choose collective={' or '.join(fit)}"
        )
    opened = chosen(device, settings.timeout)
    opened.timing = settings.timing
    return opened


def check(collective: Collective) -> Iterator[str]:
    """Yield a line for each reason why ``target=real`` cannot gather with *collective*."""
    known = plugins.names(plugins.COLLECTIVES)
    if collective.implementation not in known:
        yield (
            f"collective.implementation={collective.implementation} is provided by no package; "
            f"{instead(collective.implementation, known)}"
        )
    elif collective.timing == "device" and not (chosen := _class(collective.implementation)).times_device:
        yield (
            f"collective.timing=device: real ranks take it between two events of a GPU's stream, and "
            f"collective={collective.name} gathers memory of the {chosen.memory}; use timing=caller"
        )


def _class(name: str) -> type[Library]:
    chosen: type[Library] = plugins.resolve(plugins.COLLECTIVES, name)
    return chosen


def without_pytorch() -> str:
    """Return what to install where there is no PyTorch, or nothing."""
    return "" if importlib.util.find_spec("torch") is not None else "needs PyTorch; pip install 'pdsim[torch]'"


def store(count: int, host: str, port: int, listener: socket.socket | None, seconds: float) -> Any:
    """Return a group's store, which the first rank serves on a copy of *listener*; waits take *seconds* at most."""
    import torch.distributed as dist

    options: dict[str, Any] = {"timeout": datetime.timedelta(seconds=seconds), "wait_for_workers": False}
    if listener is not None:
        options["master_listen_fd"] = os.dup(listener.fileno())  # which is the store's from here on
    return dist.TCPStore(host, port, count, is_master=listener is not None, **options)


def gather(group: Any, whole: Any, piece: Any) -> Any:
    """Begin an all-gather of *piece* into the tensor *whole*; return PyTorch's work object.

    The public function for it wants a group that is known to the process's default group, and ours has none.
    """
    return group._allgather_base(whole, piece)


@contextmanager
def translating(engine: str) -> Iterator[None]:
    """Raise the `TransferError` that a `RuntimeError` of the block means."""
    try:
        yield
    except RuntimeError as error:
        raise translated(error, engine) from error


def translated(error: Exception, engine: str) -> TransferError:
    """Return what PyTorch's *error* means, by words in its message: it has no classes of its own."""
    if isinstance(error, TransferError):
        return error
    text = " ".join(str(error).split())[:300]
    lowered = text.lower()
    kinds = {
        OutOfMemory: ("out of memory",),
        PeerLost: ("closed by peer", "connection reset", "broken pipe", "connection refused"),
        TransferTimeout: ("timed out", "timeout"),
    }
    kind = next((kind for kind, words in kinds.items() if any(word in lowered for word in words)), TransferFailed)
    return kind(f"{engine}: {text}")
