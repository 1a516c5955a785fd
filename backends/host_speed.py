# SPDX-License-Identifier: Apache-2.0
"""How fast this host is at what serving engines ask of one: scheduling, posting, waking, reading clocks, copying.

Each measurement ends within `SECONDS` of its own work, or `DEADLINE` with a process to start, and fails by itself.
"""

import ctypes
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import zmq

from backends.diagnosis import gpu_count

SECONDS = 0.4
DEADLINE = 20.0
_RUNNING = 64  # requests of a step
_COPY = 64 << 20  # bytes, beyond the caches that one core has
_REPEATS = 200


class Measured(NamedTuple):
    """Repeats of one measurement: in seconds, or bytes a second; without *values*, *problem* says why."""

    name: str
    values: tuple[float, ...]
    unit: str = "s"
    problem: str = ""


def measured() -> Iterator[Measured]:
    """Yield each measurement of this host."""
    yield Measured("scheduler step, 64 requests", _repeated(_step()))
    yield Measured("system call", _repeated(_of_many(os.getppid)))
    gpu = "small copy, GPU" if gpu_count() else "small copy, memory"
    yield _elsewhere(gpu, "gpu") if gpu_count() else Measured(gpu, _repeated(_of_many(_small_copy())))
    yield _thread_wake()
    yield _elsewhere("wake of a process, zmq", "process")
    yield Measured("clock, smallest step", _repeated(_clock_step))
    yield Measured("clock, a reading", _repeated(_of_many(time.perf_counter)))
    rates = tuple(_COPY / seconds for seconds in _repeated(_large_copy()))
    yield Measured("memory, one thread copies", rates, "B/s")


def _repeated(measure: Callable[[], float]) -> tuple[float, ...]:
    end, values = time.perf_counter() + SECONDS, list[float]()
    while len(values) < _REPEATS and (len(values) < 3 or time.perf_counter() < end):
        values.append(measure())
    return tuple(values)


def _of_many(call: Callable[[], object], times: int = 2000) -> Callable[[], float]:
    def measure() -> float:
        begin = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - begin) / times

    return measure


class _Request:
    def __init__(self, number: int) -> None:
        self.number, self.tokens, self.pages = number, 1000 + number, [number]


def _step() -> Callable[[], float]:
    # What schedulers do for each running request: budgets, attributes, dictionaries, a page now and then.
    running = [_Request(number) for number in range(_RUNNING)]

    def step() -> None:
        budget, scheduled, new = 8192, dict[int, int](), list[tuple[int, int]]()
        for request in running:
            if budget <= 0:
                break
            take = min(1, budget)
            if request.tokens % 16 == 0:
                new.append((request.number, request.tokens // 16))
            request.tokens += take
            scheduled[request.number] = take
            budget -= take

    return _of_many(step, 100)


def _small_copy() -> Callable[[], object]:
    source, target = ctypes.create_string_buffer(4096), ctypes.create_string_buffer(4096)
    return lambda: ctypes.memmove(target, source, 4096)


def _large_copy() -> Callable[[], float]:
    source, target = np.ones(_COPY, np.uint8), np.zeros(_COPY, np.uint8)

    def measure() -> float:
        begin = time.perf_counter()
        np.copyto(target, source)
        return time.perf_counter() - begin

    measure()  # the system gives pages when they are touched
    return measure


def _clock_step() -> float:
    first = time.perf_counter_ns()
    while (then := time.perf_counter_ns()) == first:
        pass
    return (then - first) / 1e9


def _socket(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PAIR)
    socket.linger, socket.rcvtimeo, socket.sndtimeo = 0, int(DEADLINE * 1e3), int(DEADLINE * 1e3)
    return socket


def _echo(socket: zmq.Socket[bytes]) -> None:
    while message := socket.recv():  # an empty one ends it
        socket.send(message)


def _round_trips(socket: zmq.Socket[bytes]) -> tuple[float, ...]:
    # Half a round trip each: a message, and a sleeper that wakes by it.
    def half() -> float:
        time.sleep(1e-3)  # as a server between requests, so that the other end sleeps
        begin = time.perf_counter()
        socket.send(b"request")
        socket.recv()
        return (time.perf_counter() - begin) / 2

    half()
    values = _repeated(half)
    socket.send(b"")
    return values


def _thread_wake() -> Measured:
    name, context = "wake of a thread, zmq", zmq.Context()
    here, there = _socket(context), _socket(context)
    here.bind("inproc://host")
    there.connect("inproc://host")
    thread = threading.Thread(target=_echo, args=(there,), daemon=True)
    thread.start()
    try:
        return Measured(name, _round_trips(here))
    except zmq.ZMQError as error:
        return Measured(name, (), problem=str(error))
    finally:
        thread.join(DEADLINE)
        here.close()
        there.close()


def _elsewhere(name: str, what: str) -> Measured:
    # With a process of its own, which ends by itself or is ended.
    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context, _socket(context) as socket:
        address = f"ipc://{folder}/host"
        socket.bind(address)
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        child = subprocess.Popen(
            [sys.executable, "-m", "backends.host_speed", what, address],
            env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        errors = child.stderr
        assert errors is not None
        end = time.monotonic() + DEADLINE
        try:
            while not socket.poll(100):
                if child.poll() is not None:
                    return Measured(
                        name, (), problem=errors.read().strip().rpartition("\n")[2] or "its process ended"
                    )
                if time.monotonic() > end:
                    return Measured(name, (), problem=f"nothing within {DEADLINE:g} s")
            values = np.frombuffer(socket.recv())
            return Measured(name, tuple(values.tolist()) or _round_trips(socket))
        except zmq.ZMQError as error:
            return Measured(name, (), problem=str(error))
        finally:
            child.kill()  # it has nothing more to do
            child.wait()
            errors.close()


def _gpu_copies() -> tuple[float, ...]:
    # How long the call takes that gives a stream a copy of 4 KiB, not the copy.
    from backends.cuda.runtime import SEGMENT, cudart

    cuda = cudart()
    cuda.use(0)
    source, target, stream = cuda.allocate(SEGMENT), cuda.allocate(SEGMENT), cuda.stream()

    def measure() -> float:
        seconds = _of_many(lambda: cuda.copy(target, source, 4096, stream), 50)()
        cuda.wait(stream)
        return seconds

    measure()
    return _repeated(measure)


def _peer(what: str, address: str) -> None:
    with zmq.Context() as context, _socket(context) as socket:
        socket.connect(address)
        if what not in ("gpu", "process"):
            raise SystemExit(f"{what!r} is measured by no process")
        socket.send(np.array(_gpu_copies() if what == "gpu" else ()).tobytes())
        _echo(socket)


if __name__ == "__main__":
    _peer(*sys.argv[1:])
