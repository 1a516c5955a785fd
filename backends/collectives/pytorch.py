# SPDX-License-Identifier: Apache-2.0
"""What the libraries that come with PyTorch have in common: a store to meet at, and what its errors mean."""

from __future__ import annotations

import datetime
import importlib.util
import os
import socket
from typing import Any

from pdsim.core.errors import OutOfMemory, PeerLost, TransferError, TransferFailed, TransferTimeout

__all__ = ["gather", "missing", "store", "translated"]


def missing() -> str:
    """Return what to install where there is no PyTorch, or nothing."""
    return "" if importlib.util.find_spec("torch") is not None else "needs PyTorch; pip install 'pdsim[torch]'"


def store(count: int, host: str, port: int, listener: socket.socket | None, seconds: float) -> Any:
    """Return the store at which the ranks of a group meet; the first serves it on *listener*.

    *seconds* is how long any wait at the store may take.  *listener* is duplicated, so the caller may close its own.
    """
    import torch.distributed as dist

    options: dict[str, Any] = {"timeout": datetime.timedelta(seconds=seconds), "wait_for_workers": False}
    if listener is not None:
        options["master_listen_fd"] = os.dup(listener.fileno())  # which is the store's from here on
    return dist.TCPStore(host, port, count, is_master=listener is not None, **options)


def gather(group: Any, whole: Any, piece: Any) -> Any:
    """Begin an all-gather of *piece* into the tensor *whole*, on all ranks of *group*; return PyTorch's work object.

    The public function for it wants a group that is known to the process's default group, and ours has none.
    """
    return group._allgather_base(whole, piece)


def translated(error: Exception, engine: str) -> TransferError:
    """Return what PyTorch's *error*, which has no classes of its own, means.

    Decided by words in the message: out of memory, a closed connection, a timeout; all else is a `TransferFailed`.
    """
    if isinstance(error, TransferError):
        return error
    text = " ".join(str(error).split())[:300]
    lowered = text.lower()
    if "out of memory" in lowered:
        return OutOfMemory(f"{engine}: {text}")
    if any(
        words in lowered for words in ("closed by peer", "connection reset", "broken pipe", "connection refused")
    ):
        return PeerLost(f"{engine}: {text}")
    if "timed out" in lowered or "timeout" in lowered:
        return TransferTimeout(f"{engine}: {text}")
    return TransferFailed(f"{engine}: {text}")
