"""Programs for the tests of the supervisor and of single engines."""

import ctypes
import gc
import os
import resource
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from pdsim.core.errors import PdsimError, RegistrationError
from pdsim.transfer import Batch, Peer, Program, Region
from pdsim.transfer.job import Rank


def sleep(rank: Rank, seconds: float) -> Program:
    yield rank.clock.timeout(seconds)
    return "slept"


def surroundings(rank: Rank) -> Program:
    """Return what the process has of the one that asked for it."""
    opened = []
    for _ in range(20):  # an engine's threads open files for a moment
        yield rank.clock.timeout(0.01)
        opened.append(len(list(Path("/proc/self/fd").iterdir())))
    return {
        "environ": {name: text for name, text in os.environ.items() if name != "PYTHONPATH"},  # which `path` is of
        "path": list(dict.fromkeys(entry for entry in sys.path if Path(entry).is_dir())),
        "folder": str(Path.cwd()),
        "processors": sorted(os.sched_getaffinity(0)),
        "ignored": [each.name for each in signal.Signals if signal.getsignal(each) == signal.SIG_IGN],
        "leads": os.getsid(0) == os.getpid(),
        "open": min(opened),
        "words": len(sys.argv),
    }


def identify(rank: Rank) -> Program:
    """Return the numbers of this process and of its parent, the origin of its clock, and its command line."""
    yield rank.clock.timeout(0.0)
    shown = "".join(Path(f"/proc/self/{name}").read_bytes().decode() for name in ("cmdline", "environ"))
    return [os.getpid(), os.getppid(), rank.clock.origin, shown]


def tell_network(rank: Rank, others: list[str]) -> Program:
    """Return this process's namespace and its devices, once all *others* have been heard from over the channel."""
    for name in others:
        rank.channel.send(name, b"here")
    for _ in others:
        yield rank.channel.receive()
    devices = sorted(path.name for path in Path("/sys/class/net").iterdir())
    return [str(Path("/proc/self/ns/net").readlink()), rank.channel.uri, devices]


def idle(rank: Rank, seconds: float) -> Program:
    """Do nothing for *seconds*; return the share of a core that this took, and the addresses it listens on."""
    yield rank.clock.timeout(0.2)
    before = sum(os.times()[:2])
    yield rank.clock.timeout(seconds)
    share = (sum(os.times()[:2]) - before) / seconds
    import psutil  # which the Python of MORI's guest lacks

    every = psutil.Process().net_connections()
    return share, sorted({each.laddr.ip for each in every if each.status == psutil.CONN_LISTEN})


def gaps(rank: Rank, seconds: float) -> Program:
    """Look at the clock again and again; return from when to when no look was possible for 0.2 s or longer."""
    spans, last = [], rank.clock.now
    while last < seconds:
        yield rank.clock.timeout(0.01)
        if rank.clock.now - last > 0.2:
            spans.append([last, rank.clock.now])
        last = rank.clock.now
    return spans


def use_memory_again(rank: Rank, rounds: int) -> Program:
    """Return how often the system had to give memory while the same 12 MiB were filled and freed *rounds* times."""
    yield rank.clock.timeout(0.0)
    faults = []
    for _ in range(rounds + 1):
        held = [np.ones(1 << 19) for _ in range(3)]
        held.clear()
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    return faults[-1] - faults[0]


def take_memory(rank: Rank, size: int) -> Program:
    rank.device.allocate(size)
    yield rank.clock.timeout(0)


def count(rank: Rank, seconds: float) -> Program:
    """Say that a part of the work is done, and do nothing."""
    rank.counts(lambda: 3, 7)
    yield rank.clock.timeout(seconds)


def hang(rank: Rank) -> Program:
    yield rank.clock.timeout(0.1)
    threading.Event().wait()


def say_and_die(rank: Rank, code: int) -> Program:
    yield rank.clock.timeout(0)
    sys.stdout.write("last words\n")
    sys.stdout.flush()
    os._exit(code)


def say_and_raise(rank: Rank) -> Program:
    yield rank.clock.timeout(0)
    raise LookupError("on purpose")


def return_object(rank: Rank) -> Program:
    yield rank.clock.timeout(0)
    return object()


def fork(rank: Rank) -> Program:
    yield rank.clock.timeout(0)
    buffer = rank.device.allocate(64)
    child = os.fork()
    if not child:
        try:
            rank.endpoint.register(buffer, "mine")
        except RegistrationError as error:
            os._exit(42 if "do not survive a fork" in str(error) else 1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def _ask(rank: Rank, other: str) -> Program:
    while True:
        rank.channel.send(other, b"who")
        yield rank.clock.timeout(0.02)


def greet(rank: Rank, other: str) -> Program:
    """Ask *other* who it is until it has answered as two; return both answers."""
    answers: list[str] = []
    rank.clock.process(_ask(rank, other))
    while len(answers) < 2:
        _, payload = yield rank.channel.receive()
        if payload.decode() not in answers:
            answers.append(payload.decode())
    rank.channel.send(other, b"stop")
    return answers


def answer(rank: Rank) -> Program:
    """Answer with the number of this process until told to stop; return it."""
    number = str(os.getpid())
    while True:
        sender, payload = yield rank.channel.receive()
        if payload == b"stop":
            return number
        rank.channel.send(sender, number.encode())


def call(rank: Rank, other: str) -> Program:
    """Ask *other* who it is until it has asked, too, and for a second more; return who has asked."""
    rank.clock.process(_ask(rank, other))
    sender, _ = yield rank.channel.receive()
    yield rank.clock.timeout(1.0)
    return sender


def stay(rank: Rank, by: str) -> Program:
    """Answer *by*, and stay until it says more."""
    yield rank.channel.receive()
    rank.channel.send(by, b"here")
    yield rank.channel.receive()


def _connect(rank: Rank, to: str, size: int, name: str = "source") -> Generator[Any, Any, tuple[Peer, Batch]]:
    mine = rank.endpoint.register(rank.device.allocate(size), name)
    rank.channel.send(to, rank.endpoint.address())
    peer = rank.endpoint.connect((yield rank.channel.receive()).payload)
    return peer, Batch(mine, peer.regions["sink"], [0], [0], [size])


def _offer(rank: Rank, by: str, size: int) -> Generator[Any, Any, tuple[Any, Region]]:
    buffer = rank.device.allocate(size)
    region = rank.endpoint.register(buffer, "sink")
    address = (yield rank.channel.receive()).payload
    rank.channel.send(by, rank.endpoint.address())
    rank.endpoint.connect(address)
    return buffer, region


def write_many(rank: Rank, to: str, count: int) -> Program:
    peer, batch = yield from _connect(rank, to, 64)
    for number in range(count):
        yield rank.endpoint.write(peer, batch, label=str(number))
    rank.channel.send(to, b"done")


def write_and_count(rank: Rank, to: str, every: int) -> Program:
    """Write twice *every* times; return how many objects of each kind the second half has left."""
    peer, batch = yield from _connect(rank, to, 64)
    counts = []
    for number in range(2 * every + 100):  # the first hundred make what stays
        yield rank.endpoint.write(peer, batch, label=str(number))
        if number % every == 99:
            gc.collect()
            counts.append(Counter(type(each).__name__ for each in gc.get_objects()))
    rank.channel.send(to, b"done")
    return dict(counts[2] - counts[1])


def write_while_the_clock_steps(rank: Rank, to: str, count: int) -> Program:
    """Write *count* times while each look at the clock is a day from the last; return the days of some looks."""
    peer, batch = yield from _connect(rank, to, 64)
    yield rank.endpoint.write(peer, batch)
    ctypes.c_uint.in_dll(ctypes.CDLL(None), "each_call").value = 1
    days = {int(time.time() // 86400) for _ in range(100)}
    for _ in range(count):
        yield rank.endpoint.write(peer, batch)
    rank.channel.send(to, b"done")
    return [day - min(days) for day in sorted(days)]


def be_written(rank: Rank, by: str) -> Program:
    yield from _offer(rank, by, 64)
    yield rank.channel.receive()


def write_and_die(rank: Rank, to: str) -> Program:
    """Write once, and end as by a kill when *to* says so."""
    peer, batch = yield from _connect(rank, to, 64)
    yield rank.endpoint.write(peer, batch)
    yield rank.channel.receive()
    os._exit(1)


def exchange_and_outlive(rank: Rank, by: str) -> Program:
    """Write to *by*, which writes here, have it die, and say whether it is proven that it writes no more."""
    mine = rank.endpoint.register(rank.device.allocate(64), "sink")
    peer = rank.endpoint.connect((yield rank.channel.receive()).payload)
    rank.channel.send(by, rank.endpoint.address())
    yield rank.channel.receive()  # it has written
    yield rank.endpoint.write(peer, Batch(mine, peer.regions["source"], [0], [0], [64]))
    rank.channel.send(by, b"die")
    proof = rank.endpoint.quiesced(by)
    yield proof | rank.clock.timeout(10.0)
    return proof.triggered


def exchange_and_die(rank: Rank, to: str) -> Program:
    """Write once, be written to, and end as by a kill when *to* says so."""
    peer, batch = yield from _connect(rank, to, 64)
    yield rank.endpoint.write(peer, batch)
    rank.channel.send(to, b"written")
    yield rank.channel.receive()
    os._exit(1)


def outlive(rank: Rank, writer: str, beside: str) -> Program:
    """Have *writer* die, and wait for the proof that it writes no more, while *beside* stays connected."""
    yield from _offer(rank, writer, 64)
    rank.channel.send(beside, b"here")
    yield rank.channel.receive()
    rank.channel.send(writer, b"die")
    yield rank.endpoint.quiesced(writer)
    rank.channel.send(beside, b"done")
    return "proven"


def _opened() -> list[str]:
    opened = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since, as the listing's own is
            opened.append(str(path.readlink()))
    return opened


def lose_in_turn(rank: Rank, others: list[str]) -> Program:
    """Write to each of *others* and have it die; return what is open after each.

    Descriptors without those of connections half closed, these, threads, and peers that NIXL knows.
    """
    agent = getattr(rank.endpoint, "_agent", None)
    rows: list[list[int]] = []
    peers: list[Peer] = []
    for name in others:
        peer, batch = yield from _connect(rank, name, 64, name)
        peers.append(peer)
        yield rank.endpoint.write(peer, batch)
        rank.channel.send(name, b"die")
        for look in range(50):
            yield rank.clock.timeout(0.1)
            rank.channel.send(name, b"")  # or the channel would not see that its connection is gone
            mine, lines = _opened(), Path("/proc/self/net/tcp").read_text().splitlines()[1:]
            kept = sum(f"socket:[{words[9]}]" in mine for line in lines if (words := line.split())[3] == "08")
            known = sum(agent.check_remote_metadata(each.handle.handle) for each in peers) if agent else 0
            row = [len(mine) - kept, kept, len(list(Path("/proc/self/task").iterdir())), known]
            if look > 5 and peer.handle.line.lost and row[0] <= [*rows, row][0][0]:
                break
        rows.append(row)
    return rows


def be_written_and_die(rank: Rank, by: str) -> Program:
    yield from _offer(rank, by, 64)
    yield rank.channel.receive()
    os._exit(1)


def keep_lent_memory(rank: Rank, by: str) -> Program:
    """Withdraw and free memory that a peer still writes to; return what the device says before and after."""
    buffer, region = yield from _offer(rank, by, 1 << 20)
    yield rank.channel.receive()
    rank.endpoint.deregister(region)
    rank.device.free(buffer)
    lent = rank.device.used
    rank.channel.send(by, b"withdrawn")
    while rank.device.used:
        yield rank.clock.timeout(0.005)
    return {"lent": lent, "returned": rank.device.used}


def write_lent_memory(rank: Rank, to: str) -> Program:
    peer, batch = yield from _connect(rank, to, 1 << 20)
    yield rank.endpoint.write(peer, batch)
    rank.channel.send(to, b"withdraw")
    yield rank.channel.receive()
    yield rank.clock.timeout(0.1)


def connect_with_stale_address(rank: Rank, to: str) -> Program:
    """Connect with an address that was given out before its region was withdrawn; return how a write ends."""
    peer, batch = yield from _connect(rank, to, 64)
    error = "ok"
    try:
        yield rank.endpoint.write(peer, batch)
    except PdsimError as exception:
        error = type(exception).__name__
    rank.channel.send(to, b"done")
    return error


def give_stale_address(rank: Rank, by: str) -> Program:
    buffer = rank.device.allocate(64)
    region = rank.endpoint.register(buffer, "sink")
    address = rank.endpoint.address()
    rank.endpoint.deregister(region)
    rank.channel.send(by, address)
    yield rank.channel.receive()
    yield rank.channel.receive()
    return buffer.read(0, 64) == bytes(64)


def settle_after_loss(rank: Rank, to: str, late: int = 0) -> Program:
    """Write until the peer is lost; return the error, and whether the memory settles.

    The first *late* questions whether the peer is dead come before it is.
    """
    from backends.base import endpoint, processes

    known, asked = processes.is_dead, []

    def is_dead(identity: str) -> bool:
        asked.append(identity)
        return len(asked) > late and known(identity)

    endpoint.is_dead = processes.is_dead = is_dead
    peer, batch = yield from _connect(rank, to, 8 << 20)
    while True:
        transfer = rank.endpoint.write(peer, batch, timeout=20)
        try:
            yield transfer
        except PdsimError as error:
            yield transfer.settled | rank.clock.timeout(15)
            return [type(error).__name__, transfer.settled.triggered, rank.endpoint.quarantined]


def wait_for_death(rank: Rank, by: str) -> Program:
    yield from _offer(rank, by, 8 << 20)
    yield rank.clock.timeout(60)


def write_beside_stopped(rank: Rank, stopped: str, to: str) -> Program:
    """Write to *stopped*, which stands still until a write to *to* has ended; return how both end."""
    peers = {}
    for name in (stopped, to):
        peers[name] = yield from _connect(rank, name, 64, name)
    process = int((yield rank.channel.receive()).payload)
    os.kill(process, signal.SIGSTOP)
    try:
        yield rank.clock.timeout(0.2)  # all its threads have stopped by then
        late = rank.endpoint.write(*peers[stopped], timeout=30)
        yield rank.clock.timeout(0.5)  # the engine is at it by then
        record = yield rank.endpoint.write(*peers[to], timeout=5)
    finally:
        os.kill(process, signal.SIGCONT)
    records = [record, (yield late)]
    for name in peers:
        rank.channel.send(name, b"done")
    return [each.status for each in records]


def be_stopped(rank: Rank, by: str) -> Program:
    yield from _offer(rank, by, 64)
    yield rank.clock.timeout(0.5)  # what *by* asks first is answered by then
    rank.channel.send(by, str(os.getpid()).encode())
    yield rank.channel.receive()


def write_at_once(rank: Rank, to: str, writes: int) -> Program:
    """Write one after the other without waiting; return whether each was posted when `write` returned."""
    peer, batch = yield from _connect(rank, to, writes << 12)
    data = bytes(number for number in range(writes) for _ in range(1 << 12))
    rank.device.buffer_of(batch.source).write(0, data)
    yield rank.endpoint.write(peer, Batch(batch.source, batch.target, [0], [0], [1]))  # by now the peer has answered
    transfers, held = [], []
    for number in range(writes):
        offsets = [(number << 12) + (block << 10) for block in range(4)]
        piece = Batch(batch.source, batch.target, offsets, offsets, [1 << 10] * 4)
        transfers.append(rank.endpoint.write(peer, piece, b"written"))
        held.append(transfers[-1].posted > transfers[-1].submitted)
    yield rank.clock.all_of(transfers)
    return held


def take_writes(rank: Rank, by: str, writes: int) -> Program:
    """Return whether each of the writes has its bytes once all notifications are there."""
    buffer, _ = yield from _offer(rank, by, writes << 12)
    for _ in range(writes):
        yield rank.endpoint.notifications.get()
    return [buffer.read(number << 12, 1 << 12) == bytes([number]) * (1 << 12) for number in range(writes)]
