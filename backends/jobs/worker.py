# SPDX-License-Identifier: Apache-2.0
"""Run one rank: ``python -m backends.jobs.worker FD``, started by `backends.jobs.launcher` only.

In this order: read ``Start``, make clock, memory, endpoint and channel, say ``WorkerReady`` (or ``Done``, with why
not), wait for ``Go``, run the program, say ``Done``, close everything, leave.  *FD* is a socket to the supervisor.
What makes times uneven is kept away before the program starts: garbage collection of what libraries have made, naps
longer than asked for, memory that goes back to the system, and processors that another rank uses.
"""

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
from backends.emulation.link.emulated_link import see_devices
from backends.jobs.affinity import QuickProcessor
from backends.jobs.supervision import Alive, Done, Go, Line, Moved, Start, WorkerReady, check_plain
from backends.registry import load
from pdsim.core.clock import WallClock
from pdsim.core.errors import ConfigError, PdsimError, PeerLost
from pdsim.transfer import TransferRecord
from pdsim.transfer.job import Rank
from pdsim.transfer.log import TransferLog

SPIN_ON_GPU = 2e-3
"""Seconds for which the clock of a rank on a GPU looks for completions without a pause: 700 MB over NVLink.

A nap takes tens of microseconds, as long as a small copy."""

COUNTED = 1.0  # seconds between two counts of a rank's work: a message of 20 us then, which few transfers meet
_PR_SET_PDEATHSIG = 1
_PR_SET_TIMERSLACK = 29
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT, _MAPPED = 1 << 27, 1 << 25  # bytes; glibc allows no threshold of mmap above the second


class _Records:
    """A `Recorder` that keeps records, in order, until the supervisor gets them; no samples, and no programs."""

    def __init__(self, rank: str) -> None:
        self.transfers = TransferLog(rank=rank)
        self.spill = None

    def transfer(self, record: TransferRecord) -> None:
        self.transfers.append(record)

    def gauge(self, kind: str, name: str, read: Callable[[], float]) -> None:
        pass

    def inspect(self, program: object) -> None:
        pass


class _Moves:
    """A `Source`: tells *rank* of ranks that were started again, as the supervisor says on *line*."""

    def __init__(self, line: Line, rank: Any) -> None:
        self._line, self._rank = line, rank
        rank.clock.watch(self)
        self.poll()  # what came with the word to go

    def poll(self) -> bool:
        try:
            messages = self._line.receive(socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except PeerLost:  # the supervisor is gone, and this process about to be
            self._rank.clock.unwatch(self)
            return False
        moves = {message.name: message.uri for message in messages if isinstance(message, Moved)}
        _open(self._rank, moves)
        return bool(moves)

    def fileno(self) -> int:
        return self._line.connection.fileno()

    def busy(self) -> bool:
        return False


def main() -> None:
    """Become the rank that the supervisor describes; end by `os._exit`, whose status no native library can change.

    Exit code 1 is a failure to start or to close.  The supervisor has the program's own errors in ``Done``.
    """
    libc, parent = ctypes.CDLL(None, use_errno=True), os.getppid()
    libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # ns
    _keep_memory(libc)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before
        os._exit(1)
    line = Line(socket.socket(fileno=int(sys.argv[1])))
    start = line.wait_for(Start)
    try:
        rank, program = _prepare(start)
        line.send(WorkerReady(rank.channel.uri))
    except BaseException as error:
        traceback.print_exc()
        line.send(Done(None, f"{type(error).__name__}: {error}"))
        _leave(1)
    go = line.wait_for(Go)
    rank.clock.origin = go.origin
    _open(rank, go.uris)
    gc.collect()
    gc.freeze()  # what the libraries have made lives as long as this process: no collection need look at it again
    if go.restarts:
        _Moves(line, rank)
    _beat(line, rank, go.alive)
    line.send(_run(rank, program, start.arguments))
    try:
        if rank.groups is not None:
            rank.groups.close()
        for part in (rank.endpoint, rank.channel, rank.device):
            part.close()
    except BaseException:
        traceback.print_exc()
        _leave(1)
    _leave(0)


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _keep_memory(libc: Any) -> None:
    # Free memory stays with this process: planning 100,000 descriptors took longer to fault it in than to do.  By
    # glibc's own rules blocks of 128 KiB and more go back to the system at once, or as soon as a few are free.
    with suppress(AttributeError):  # other C libraries have their own ways
        libc.mallopt(_M_MMAP_THRESHOLD, _MAPPED)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT)


def _beat(line: Line, rank: Rank, interval: float) -> None:
    # Every *interval* seconds the supervisor hears that the clock goes, and every `COUNTED` what the rank counts.
    # Heartbeats are events of the clock, so silence means that the clock has stopped.

    def beat(first: bool) -> None:
        read, of = rank.counted or (int, 0)
        if not first:
            with suppress(OSError):  # a supervisor that does not read, or is gone, has other worries
                line.send(Alive(read(), of), wait=False)
        pause = min(interval, COUNTED) if of or first else interval
        rank.clock.call_at(rank.clock.now + pause, beat, False)

    beat(True)


def _open(rank: Any, uris: Mapping[str, str]) -> None:
    rank.channel.open(uris)
    if control := getattr(rank.endpoint, "control", None):
        for name in uris:
            control.welcome(name)


def _prepare(start: Start) -> tuple[Any, Any]:
    # the `Rank` and its program
    module, _, function = start.program.partition(":")
    if start.processors:
        os.sched_setaffinity(0, start.processors)  # before a library starts threads, which inherit it
    if start.device:
        see_devices()
        os.environ.setdefault("UCX_NET_DEVICES", start.device)
    clock, records = WallClock() if start.gpu is None else WallClock(spin=SPIN_ON_GPU), _Records(start.name)
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
    peers = tuple(name for name in start.keys.public if name != start.name)
    rank = Rank(start.name, clock, device, endpoint, channel, records, peers)
    if start.collective is not None:
        rank.groups = RealGroups(rank, start.bind, start.collective)
    return rank, program


def _device(clock: WallClock, start: Start) -> RealDevice:
    if start.gpu is None:
        return HostDevice(clock, start.capacity)
    from backends.cuda.cuda_device import CudaDevice

    return CudaDevice(clock, start.gpu, start.capacity)


def _run(rank: Any, program: Any, arguments: Mapping[str, Any]) -> Done:
    # An error that is not pdsim's own also prints its traceback, for the output of the process.
    value, error, clock, device = None, "", rank.clock, rank.device
    try:
        value = clock.run(clock.process(program(rank, **arguments)))
        check_plain(value)
    except BaseException as exception:
        if not isinstance(exception, PdsimError):
            traceback.print_exc()
        value, error = None, f"{type(exception).__name__}: {exception}"
    pools = {f"{rank.name}/{pool}": peak / device.capacity for pool, peak in device.peak.items() if peak}
    refused = rank.channel.refused + getattr(getattr(rank.endpoint, "control", None), "refused", 0)
    transfers = list(rank.recorder.transfers.payloads())
    return Done(value, error, rank.endpoint.engine, transfers, pools, clock.scheduled(), refused)


if __name__ == "__main__":
    main()
