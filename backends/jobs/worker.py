# SPDX-License-Identifier: Apache-2.0
"""Run one rank: ``python -m backends.jobs.worker FD``, started by `backends.jobs.launcher` only.

In this order: read ``Start``, make clock, memory, endpoint and channel, say ``WorkerReady`` (or ``WorkerFailed``),
wait for ``Go``, run the program, say ``Done``, close everything, and leave.  *FD* is a socket to the supervisor.
What makes times uneven is kept away before the program starts: garbage collection of what libraries have made, naps
longer than asked for, memory that goes back to the system, and processors that another rank uses.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from backends.base.device import HostDevice, RealDevice
from backends.base.zmq_channel import ZmqChannel
from backends.collectives.real_group import RealGroups
from backends.emulation.link import namespaces
from backends.jobs import supervision
from backends.jobs.affinity import QuickProcessor
from backends.registry import load
from pdsim.core.clock import WallClock
from pdsim.core.errors import ConfigError, PdsimError
from pdsim.transfer import TransferRecord
from pdsim.transfer.job import Rank

__all__ = ["keep_memory", "main"]

SPIN_ON_GPU = 2e-3
"""Seconds for which the clock of a rank on a GPU looks for completions without a pause: 700 MB over NVLink.

A nap takes tens of microseconds, as long as a small copy."""

COUNTED = 1.0
"""Seconds between two counts of a rank's work: a message of 20 us then, which few transfers meet."""

_PR_SET_PDEATHSIG = 1
_PR_SET_TIMERSLACK = 29
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT, _MAPPED = 1 << 27, 1 << 25  # bytes; glibc allows no threshold of mmap above the second


class Records:
    """A `Recorder` that keeps records, in order, until the supervisor gets it with ``Done``."""

    def __init__(self) -> None:
        self.transfers: list[TransferRecord] = []
        self.spill = None

    def transfer(self, record: TransferRecord) -> None:
        self.transfers.append(record)

    def gauge(self, kind: str, name: str, read: Callable[[], float]) -> None:
        """Keep no samples."""

    def inspect(self, program: object) -> None:
        """Show nobody *program*: nobody looks into processes."""


class Pulse:
    """Tells the supervisor every *interval* seconds that the clock goes, and every `COUNTED` what *rank* counts.

    Heartbeats are events of the clock, so silence means that the clock has stopped.
    """

    def __init__(self, connection: socket.socket, rank: Rank, clock: WallClock, interval: float) -> None:
        self._connection = connection
        self._rank = rank
        self._clock = clock
        self._interval = interval
        self._clock.call_at(self._clock.now + min(interval, COUNTED), self._beat, None)

    def _beat(self, _: object) -> None:
        read, of = self._rank.counted or (int, 0)
        with suppress(OSError):  # a supervisor that does not read, or is gone, has other worries
            supervision.send(self._connection, supervision.Alive(read(), of), wait=False)
        pause = min(self._interval, COUNTED) if of else self._interval
        self._clock.call_at(self._clock.now + pause, self._beat, None)


class Moves:
    """A `Source`: tells *open* of ranks that were started again, as the supervisor says on *connection*."""

    def __init__(
        self,
        connection: socket.socket,
        clock: WallClock,
        open: Callable[[Mapping[str, str]], None],  # noqa: A002
    ) -> None:
        self._connection = connection
        self._clock = clock
        self._open = open
        self._decoder = supervision.Decoder()

    def poll(self) -> bool:
        try:
            piece = self._connection.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        if not piece:  # the supervisor is gone, and this process about to be
            self._clock.unwatch(self)
            return False
        moves = [message for message in self._decoder.feed(piece) if isinstance(message, supervision.Moved)]
        self._open({message.name: message.uri for message in moves})
        return bool(moves)

    def fileno(self) -> int:
        return self._connection.fileno()

    def busy(self) -> bool:
        return False


def main() -> None:
    """Become the rank that the supervisor describes; leave by `os._exit`, whose code no native library can spoil.

    Exit code 1 is a failure to start or to close.  The supervisor has the program's own errors in ``Done``.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # ns
    keep_memory()
    _die_with(os.getppid())
    connection = socket.socket(fileno=int(sys.argv[1]))
    start = supervision.receive(connection, supervision.Start)
    try:
        clock, rank, records, program = _prepare(start)
        supervision.send(connection, supervision.WorkerReady(rank.channel.uri))  # type: ignore[attr-defined]
    except BaseException as error:
        traceback.print_exc()
        supervision.send(connection, supervision.WorkerFailed(type(error).__name__, str(error)))
        _leave(1)
    go = supervision.receive(connection, supervision.Go)
    clock.origin = go.origin
    _open(rank, go.uris)
    gc.collect()
    gc.freeze()  # what the libraries have made lives as long as this process: no collection need look at it again
    if go.restarts:
        clock.watch(Moves(connection, clock, lambda uris: _open(rank, uris)))
    Pulse(connection, rank, clock, go.alive)
    supervision.send(connection, _run(clock, rank, records, program, start))
    try:
        if rank.groups is not None:
            rank.groups.close()  # type: ignore[attr-defined]
        rank.endpoint.close()
        rank.channel.close()
        rank.device.close()  # type: ignore[attr-defined]
    except BaseException:
        traceback.print_exc()
        _leave(1)
    _leave(0)


def _open(rank: Rank, uris: Mapping[str, str]) -> None:
    rank.channel.open(uris)  # type: ignore[attr-defined]
    control = _control(rank)
    for name in uris if control is not None else ():
        control.welcome(name)


def _control(rank: Rank) -> Any:
    return getattr(rank.endpoint, "control", None)


def _die_with(parent: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before
        os._exit(1)


def keep_memory() -> None:
    """Have free memory stay with this process: planning 100,000 descriptors took longer to fault it in than to do.

    By glibc's own rules blocks of 128 KiB and more go back to the system at once, or as soon as a few are free.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # other C libraries have their own ways
        mallopt(_M_MMAP_THRESHOLD, _MAPPED)
        mallopt(_M_TRIM_THRESHOLD, _KEPT)


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _prepare(start: supervision.Start) -> tuple[WallClock, Rank, Records, Any]:
    module, _, function = start.program.partition(":")
    if start.processors:
        os.sched_setaffinity(0, start.processors)  # before a library starts threads, which inherit it
    if start.device:
        namespaces.see_devices()
        os.environ.setdefault("UCX_NET_DEVICES", start.device)
    clock, records = WallClock() if start.gpu is None else WallClock(spin=SPIN_ON_GPU), Records()
    device = _device(clock, start)
    endpoint_class = load(start.engine.implementation)
    posting = {"posting": start.posting} if any(way.posting_threads for way in endpoint_class.variants) else {}
    endpoint = endpoint_class(
        keys=start.keys,
        clock=clock,
        device=device,
        engine=start.engine,
        recorder=records,
        bind=start.bind,
        **posting,
    )
    program = getattr(importlib.import_module(module), function, None)
    if program is None:
        raise ConfigError(f"program {start.program!r}: module {module} has no {function!r}")
    if start.processors:  # now that the libraries' threads run: those of a core are slow while it spins
        clock.idle = QuickProcessor(start.processors).look
    channel = ZmqChannel(clock, start.keys, start.bind)
    rank = Rank(start.name, clock, device, endpoint, channel, records, tuple(start.peers))
    if start.collective is not None:
        rank.groups = RealGroups(rank, start.bind, start.collective)
    return clock, rank, records, program


def _device(clock: WallClock, start: supervision.Start) -> RealDevice:
    if start.gpu is None:
        return HostDevice(clock, start.capacity)
    from backends.cuda.cuda_device import CudaDevice

    return CudaDevice(clock, start.gpu, start.capacity)


def _run(clock: WallClock, rank: Rank, records: Records, program: Any, start: supervision.Start) -> supervision.Done:
    # An error that is not pdsim's own also prints its traceback, for the output of the process.
    value, error = None, ""
    try:
        value = clock.run(clock.process(program(rank, **start.arguments)))
        supervision.check_plain(value)
    except BaseException as exception:
        if not isinstance(exception, PdsimError):
            traceback.print_exc()
        value, error = None, f"{type(exception).__name__}: {exception}"
    device = rank.device
    peaks = device.peak.items()  # type: ignore[attr-defined]
    pools = {f"{rank.name}/{pool}": peak / device.capacity for pool, peak in peaks if peak}
    control = _control(rank)
    refused = rank.channel.refused + (control.refused if control is not None else 0)
    return supervision.Done(value, error, rank.endpoint.engine, records.transfers, pools, clock.scheduled(), refused)


if __name__ == "__main__":
    main()
