# SPDX-License-Identifier: Apache-2.0
"""What the libraries that come with PyTorch have in common: a store to connect at, and what its errors mean."""

from __future__ import annotations

import datetime
import importlib.util
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pdsim.core.errors import OutOfMemory, PeerLost, TransferError, TransferFailed, TransferTimeout

__all__ = ["gather", "missing", "store", "translated", "translating"]


def missing() -> str:
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
