"""The programs of the conformance suite: what ranks do, on whatever implementation of the waist they run.

Each returns plain data, which the tests compare.  A count of wrong bytes is None where the device keeps no contents.
"""

from __future__ import annotations

import os
import signal
from collections import defaultdict, deque
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import numpy.typing as npt

from pdsim.errors import PdsimError, TransferError
from pdsim.transfer import Batch, Buffer, Notification, Peer, Program, Rank, Region, Transfer

Steps = Generator[Any, Any, Any]
GUARD = 0xA5
KiB, MiB = 1 << 10, 1 << 20


# --- tools ----------------------------------------------------------------------------------------------------------


class Mail:
    """A rank's channel, read by sender: a fast peer's next message must not be taken for a slow one's first."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.kept: dict[str, deque[bytes]] = defaultdict(deque)

    def receive(self, sender: str) -> Steps:
        while not self.kept[sender]:
            name, payload = yield self.rank.channel.receive()
            self.kept[name].append(payload)
        return self.kept[sender].popleft()

    def meet(self, *names: str) -> Steps:
        """Exchange addresses with *names*, or with all; return their `Peer`s by name."""
        names = names or self.rank.peers
        for name in names:
            self.rank.channel.send(name, self.rank.endpoint.address())
        peers: dict[str, Peer] = {}
        for name in names:
            peers[name] = self.rank.endpoint.connect((yield from self.receive(name)))
        return peers

    def wait_for(self, *names: str) -> Steps:
        """Tell *names*, or all, that this rank is done, and wait until they are."""
        names = names or self.rank.peers
        for name in names:
            self.rank.channel.send(name, b"done")
        for name in names:
            yield from self.receive(name)


def pattern(seed: int, size: int) -> npt.NDArray[np.uint8]:
    """Return *size* bytes that differ from place to place, from seed to seed and from GUARD."""
    period = 65_521  # prime, so that no block, page or buffer is a multiple of it
    values = ((np.arange(period, dtype=np.uint64) * 2654435761 + seed * 97) >> 7) % 165
    return np.resize(values.astype(np.uint8), size)


def filled(rank: Rank, size: int, seed: int | None) -> Buffer:
    """Return a new buffer that holds the pattern of *seed*, or guard bytes."""
    buffer = rank.device.allocate(size)
    if rank.device.holds_bytes:
        contents = np.full(size, GUARD, np.uint8) if seed is None else pattern(seed, size)
        buffer.write(0, contents.tobytes())
    return buffer


def wrong(rank: Rank, buffer: Buffer, expected: npt.NDArray[np.uint8]) -> int | None:
    """Return how many bytes of *buffer* are not the expected ones."""
    if not rank.device.holds_bytes:
        return None
    return int(np.count_nonzero(np.frombuffer(buffer.read(0, buffer.size), np.uint8) != expected))


def scattered(count: int, size: int, region: int, seed: int) -> tuple[Any, Any, Any]:
    """Return offsets and sizes of *count* blocks of 1 to *size* bytes at shuffled places of a region."""
    random = np.random.default_rng(seed)
    slot = region // count
    sizes = random.integers(max(1, size // 2), size + 1, count) if count > 1 else np.array([size])
    slack = slot - sizes
    source = random.permutation(count) * slot + random.integers(0, slack + 1)
    target = random.permutation(count) * slot + random.integers(0, slack + 1)
    return source, target, sizes


def moved(count: int, size: int, region: int, seed: int) -> npt.NDArray[np.uint8]:
    """Return what a region of guard bytes looks like after the blocks of `scattered` came from the pattern."""
    image, contents = np.full(region, GUARD, np.uint8), pattern(seed, region)
    for source, target, length in zip(*scattered(count, size, region, seed), strict=True):
        image[target : target + length] = contents[source : source + length]
    return image


def outcome_of(transfer: Transfer) -> Steps:
    """Wait for *transfer* and return "ok" or the name of its error."""
    try:
        yield transfer
    except TransferError as error:
        return type(error).__name__
    return "ok"


def refusal(action: Callable[[], Any]) -> str:
    """Return "accepted", or the name of the error that *action* raises."""
    try:
        action()
    except PdsimError as error:
        return type(error).__name__
    return "accepted"


def one(source: Region, target: Region, size: int, source_offset: int = 0, target_offset: int = 0) -> Batch:
    return Batch(source, target, [source_offset], [target_offset], [size])


# --- bytes ----------------------------------------------------------------------------------------------------------


def write_blocks(rank: Rank, to: str, count: int, size: int, region: int, seed: int) -> Program:
    mail = Mail(rank)
    mine = rank.endpoint.register(filled(rank, region, seed), "source")
    peer = (yield from mail.meet(to))[to]
    batch = Batch(mine, peer.regions["sink"], *scattered(count, size, region, seed))
    record = yield rank.endpoint.write(peer, batch, b"written", label="blocks")
    yield from mail.wait_for(to)
    times = [record.submitted, record.prepared, record.posted, record.completed, record.seen]
    return {
        "operation": record.operation,
        "route": [record.source, record.target],
        "nbytes": record.nbytes,
        "expected": int(batch.size.sum()),
        "descriptors": record.descriptors,
        "ordered": times == sorted(times),
        "status": record.status,
        "label": record.label,
        "quarantined": rank.endpoint.quarantined,
    }


def be_written(rank: Rank, by: str, count: int, size: int, region: int, seed: int) -> Program:
    mail = Mail(rank)
    buffer = filled(rank, region, None)
    rank.endpoint.register(buffer, "sink")
    yield from mail.meet(by)
    notification = yield rank.endpoint.notifications.get()
    found = wrong(rank, buffer, moved(count, size, region, seed))
    yield from mail.wait_for(by)
    return {"from": notification.sender, "payload": notification.payload.decode(), "wrong": found}


def read_blocks(rank: Rank, of: str, count: int, size: int, region: int, seed: int) -> Program:
    mail = Mail(rank)
    buffer = filled(rank, region, None)
    mine = rank.endpoint.register(buffer, "sink")
    peer = (yield from mail.meet(of))[of]
    batch = Batch(peer.regions["source"], mine, *scattered(count, size, region, seed))
    record = yield rank.endpoint.read(peer, batch)
    found = wrong(rank, buffer, moved(count, size, region, seed))
    yield from mail.wait_for(of)
    return {"operation": record.operation, "route": [record.source, record.target], "wrong": found}


def be_read(rank: Rank, by: str, region: int, seed: int) -> Program:
    mail = Mail(rank)
    buffer = filled(rank, region, seed)
    rank.endpoint.register(buffer, "source")
    yield from mail.meet(by)
    yield from mail.wait_for(by)
    return {"wrong": wrong(rank, buffer, pattern(seed, region)), "notifications": len(rank.endpoint.notifications)}


def cross_writes(rank: Rank, peer: str, count: int, size: int, seed: int, other: int) -> Program:
    """Write *count* blocks in as many transfers at once, while the peer does the same the other way."""
    mail = Mail(rank)
    mine = rank.endpoint.register(filled(rank, count * size, seed), "out")
    sink = filled(rank, count * size, None)
    rank.endpoint.register(sink, "in")
    partner = (yield from mail.meet(peer))[peer]
    transfers = [
        rank.endpoint.write(partner, one(mine, partner.regions["in"], size, i * size, (count - 1 - i) * size))
        for i in range(count)
    ]
    yield rank.clock.all_of(transfers)
    yield from mail.wait_for(peer)
    expected = pattern(other, count * size).reshape(count, size)[::-1].ravel()
    return {"wrong": wrong(rank, sink, expected)}


def write_to_many(rank: Rank, size: int) -> Program:
    mail = Mail(rank)
    mine = rank.endpoint.register(filled(rank, size * len(rank.peers), 5), "source")
    peers = yield from mail.meet()
    transfers = []
    for index, (name, peer) in enumerate(sorted(peers.items())):
        batch = one(mine, peer.regions["sink"], size, source_offset=index * size)
        transfers.append(rank.endpoint.write(peer, batch, name.encode()))
    yield rank.clock.all_of(transfers)
    yield from mail.wait_for()
    return {"written": sorted(peers)}


def be_one_of_many(rank: Rank, index: int, size: int, of: int) -> Program:
    mail = Mail(rank)
    buffer = filled(rank, size, None)
    rank.endpoint.register(buffer, "sink")
    yield from mail.meet("hub")
    notification = yield rank.endpoint.notifications.get()
    found = wrong(rank, buffer, pattern(5, size * of)[index * size : (index + 1) * size])
    yield from mail.wait_for("hub")
    return {"payload": notification.payload.decode(), "wrong": found}


def write_to_hub(rank: Rank, size: int, seed: int, offset: int) -> Program:
    mail = Mail(rank)
    mine = rank.endpoint.register(filled(rank, size, seed), "source")
    hub = (yield from mail.meet("hub"))["hub"]
    yield rank.endpoint.write(hub, one(mine, hub.regions["sink"], size, target_offset=offset), rank.name.encode())
    yield from mail.wait_for("hub")


def be_hub(rank: Rank, size: int) -> Program:
    mail = Mail(rank)
    buffer = filled(rank, size * len(rank.peers), None)
    rank.endpoint.register(buffer, "sink")
    yield from mail.meet()
    received = []
    for _ in rank.peers:
        received.append((yield rank.endpoint.notifications.get()))  # noqa: PERF401 a yield cannot stand in a list
    expected = np.concatenate([pattern(seed, size) for seed in range(len(rank.peers))])
    found = wrong(rank, buffer, expected)
    yield from mail.wait_for()
    return {"notified": sorted([sender, payload.decode()] for sender, payload in received), "wrong": found}


# --- notifications --------------------------------------------------------------------------------------------------


def notify_in_turn(rank: Rank, to: str, payloads: list[str]) -> Program:
    """Write once for each payload (hexadecimal), each after the one before is complete."""
    mail = Mail(rank)
    mine = rank.endpoint.register(filled(rank, 64, 1), "source")
    peer = (yield from mail.meet(to))[to]
    for payload in payloads:
        yield rank.endpoint.write(peer, one(mine, peer.regions["sink"], 64), bytes.fromhex(payload))
    yield from mail.wait_for(to)


def notify_at_once(rank: Rank, to: str, count: int, size: int) -> Program:
    """Start *count* transfers of different bytes together, each with its own notification."""
    mail = Mail(rank)
    mine = rank.endpoint.register(filled(rank, count * size, 2), "source")
    peer = (yield from mail.meet(to))[to]
    transfers = []
    for i in range(count):
        batch = one(mine, peer.regions["sink"], size, i * size, i * size)
        transfers.append(rank.endpoint.write(peer, batch, str(i).encode()))
    yield rank.clock.all_of(transfers)
    yield from mail.wait_for(to)


def be_notified(rank: Rank, by: str, count: int, size: int = 64) -> Program:
    """Return what *count* notifications said, what came beyond, and how many bytes were wrong when one arrived."""
    mail = Mail(rank)
    buffer = filled(rank, max(size * count, 64), None)
    rank.endpoint.register(buffer, "sink")
    yield from mail.meet(by)
    expected, early, payloads = pattern(2, size * count), 0, []
    for _ in range(count):
        notification: Notification = yield rank.endpoint.notifications.get()
        payloads.append(notification.payload.hex())
        if size != 64 and rank.device.holds_bytes:
            start = int(notification.payload) * size
            early += buffer.read(start, size) != expected[start : start + size].tobytes()
    yield from mail.wait_for(by)
    yield rank.clock.timeout(0.05)  # a second delivery would come now
    return {"payloads": payloads, "surplus": len(rank.endpoint.notifications), "early": early}


def write_silently(rank: Rank, to: str) -> Program:
    mail = Mail(rank)
    mine = rank.endpoint.register(filled(rank, 64, 1), "source")
    peer = (yield from mail.meet(to))[to]
    yield rank.endpoint.write(peer, one(mine, peer.regions["sink"], 64))
    yield rank.clock.timeout(0.05)
    yield from mail.wait_for(to)


# --- what is refused ------------------------------------------------------------------------------------------------


def write_nonsense(rank: Rank, to: str) -> Program:
    """Return how each batch that breaks a rule is refused."""
    mail = Mail(rank)
    size = 4096
    mine = rank.endpoint.register(filled(rank, size, 1), "source")
    peer = (yield from mail.meet(to))[to]
    sink = peer.regions["sink"]
    stranger = Region(rank.name, "stranger", size, mine.address, mine.device)
    phantom = Region(to, "phantom", size, sink.address, sink.device)

    def batch(source: Any, target: Any, length: Any) -> Callable[[], Transfer]:
        return lambda: rank.endpoint.write(peer, Batch(mine, sink, source, target, length), b"nonsense")

    found = {
        "empty": refusal(batch([], [], [])),
        "zero size": refusal(batch([0, 8], [0, 8], [8, 0])),
        "negative size": refusal(batch([8], [8], [-8])),
        "beyond the source": refusal(batch([0, size - 8], [0, 16], [8, 16])),
        "beyond the target": refusal(batch([0, 8], [0, size - 4], [8, 8])),
        "before the target": refusal(batch([0], [-8], [8])),
        "overlapping targets": refusal(batch([0, 64], [0, 32], [64, 64])),
        "lengths differ": refusal(batch([0, 8], [0], [8])),
        "overflow": refusal(batch([2**63 - 8], [0], [16])),
        "unknown local region": refusal(lambda: rank.endpoint.write(peer, one(stranger, sink, 8), b"nonsense")),
        "unknown remote region": refusal(lambda: rank.endpoint.write(peer, one(mine, phantom, 8), b"nonsense")),
        "wrong way round": refusal(lambda: rank.endpoint.write(peer, one(sink, mine, 8), b"nonsense")),
        "local to local": refusal(lambda: rank.endpoint.write(peer, one(mine, mine, 8), b"nonsense")),
        "read into the peer": refusal(lambda: rank.endpoint.read(peer, one(mine, sink, 8))),
    }
    yield rank.clock.timeout(0.05)
    yield from mail.wait_for(to)
    return found


def be_spared(rank: Rank, by: str) -> Program:
    mail = Mail(rank)
    buffer = filled(rank, 4096, None)
    rank.endpoint.register(buffer, "sink")
    yield from mail.meet(by)
    yield from mail.wait_for(by)
    return {
        "wrong": wrong(rank, buffer, np.full(4096, GUARD, np.uint8)),
        "notifications": len(rank.endpoint.notifications),
    }


def connect_to_garbage(rank: Rank) -> Program:
    yield rank.clock.timeout(0)
    address = rank.endpoint.address()
    garbage = {"nothing": b"", "text": b"not an address", "bytes": bytes(range(256)), "truncated": address[:-5]}
    return {name: refusal(lambda value=value: rank.endpoint.connect(value)) for name, value in garbage.items()}


# --- registration ---------------------------------------------------------------------------------------------------


def register_oddly(rank: Rank) -> Program:
    """Return how registrations that break a rule are refused."""
    yield rank.clock.timeout(0)
    endpoint, device = rank.endpoint, rank.device
    buffer, other = device.allocate(4096), device.allocate(4096)
    region = endpoint.register(buffer, "kv")
    found = {
        "name taken": refusal(lambda: endpoint.register(other, "kv")),
        "buffer taken": refusal(lambda: endpoint.register(buffer, "other")),
        "freed while registered": refusal(lambda: device.free(buffer)),
        "deregistered": refusal(lambda: endpoint.deregister(region)),
        "deregistered again": refusal(lambda: endpoint.deregister(region)),
        "registered anew": refusal(lambda: endpoint.register(buffer, "kv")),
    }
    endpoint.deregister(Region(rank.name, "kv", 4096, buffer.address, device.name))
    device.free(buffer)
    device.free(other)
    return {**found, "used": device.used}


def withdraw_own_region(rank: Rank, to: str) -> Program:
    mail = Mail(rank)
    mine = rank.endpoint.register(filled(rank, 4096, 1), "source")
    peer = (yield from mail.meet(to))[to]
    rank.endpoint.deregister(mine)
    found = refusal(lambda: rank.endpoint.write(peer, one(mine, peer.regions["sink"], 8), b"withdrawn"))
    yield rank.clock.timeout(0.05)
    yield from mail.wait_for(to)
    return found


def write_to_withdrawn(rank: Rank, to: str) -> Program:
    """Write, then write again after the peer has withdrawn the region and told so."""
    mail = Mail(rank)
    mine = rank.endpoint.register(filled(rank, 4096, 1), "source")
    peer = (yield from mail.meet(to))[to]
    before = yield from outcome_of(rank.endpoint.write(peer, one(mine, peer.regions["sink"], 2048)))
    rank.channel.send(to, b"withdraw")
    yield from mail.receive(to)
    yield rank.clock.timeout(0.1)  # a notice of withdrawal travels on its own
    after = yield from outcome_of(rank.endpoint.write(peer, one(mine, peer.regions["sink"], 4096)))
    other = yield from outcome_of(rank.endpoint.write(peer, one(mine, peer.regions["kept"], 4096)))
    yield from mail.wait_for(to)
    return [before, after, other]


def withdraw(rank: Rank, by: str) -> Program:
    mail = Mail(rank)
    buffer = filled(rank, 4096, None)
    region = rank.endpoint.register(buffer, "sink")
    rank.endpoint.register(rank.device.allocate(4096), "kept")
    yield from mail.meet(by)
    yield from mail.receive(by)
    rank.endpoint.deregister(region)
    rank.channel.send(by, b"withdrawn")
    yield from mail.wait_for(by)
    expected = np.full(4096, GUARD, np.uint8)
    expected[:2048] = pattern(1, 4096)[:2048]
    found = wrong(rank, buffer, expected)
    rank.device.free(buffer)
    return {"wrong": found}


def write_to_latecomer(rank: Rank, to: str) -> Program:
    mail = Mail(rank)
    mine = rank.endpoint.register(filled(rank, 4096, 1), "source")
    peer = (yield from mail.meet(to))[to]
    known_before = sorted(peer.regions)
    rank.channel.send(to, b"register another")
    newer = rank.endpoint.connect((yield from mail.receive(to)))
    yield rank.endpoint.write(newer, one(mine, newer.regions["late"], 4096), b"late")
    yield from mail.wait_for(to)
    return {"before": known_before, "after": sorted(newer.regions), "old": sorted(peer.regions)}


def register_late(rank: Rank, by: str) -> Program:
    mail = Mail(rank)
    rank.endpoint.register(rank.device.allocate(4096), "early")
    yield from mail.meet(by)
    yield from mail.receive(by)
    buffer = filled(rank, 4096, None)
    rank.endpoint.register(buffer, "late")
    rank.channel.send(by, rank.endpoint.address())
    yield rank.endpoint.notifications.get()
    found = wrong(rank, buffer, pattern(1, 4096))
    yield from mail.wait_for(by)
    return {"wrong": found}


# --- a peer that is lost --------------------------------------------------------------------------------------------


def write_until_lost(rank: Rank, to: str, size: int, operation: str) -> Program:
    """Move *size* bytes again and again until it fails; return the error and how long the last one took."""
    mail = Mail(rank)
    mine = rank.endpoint.register(rank.device.allocate(size), "mine")
    peer = (yield from mail.meet(to))[to]
    theirs = peer.regions["theirs"]
    done, error, started = 0, "ok", 0.0
    while error == "ok":
        started = rank.clock.now
        if operation == "write":
            transfer = rank.endpoint.write(peer, one(mine, theirs, size), timeout=20)
        else:
            transfer = rank.endpoint.read(peer, one(theirs, mine, size), timeout=20)
        error = yield from outcome_of(transfer)
        done += error == "ok"
    return {"error": error, "done": done, "took": rank.clock.now - started, "at": rank.clock.now}


def write_after_loss(rank: Rank, to: str, wait: float) -> Program:
    """Write to, and connect to, a peer that is gone since before *wait* seconds."""
    mail = Mail(rank)
    mine = rank.endpoint.register(filled(rank, 4096, 1), "mine")
    rank.channel.send(to, rank.endpoint.address())
    address = yield from mail.receive(to)
    peer = rank.endpoint.connect(address)
    yield rank.clock.timeout(wait - rank.clock.now)
    rank.channel.send(to, b"lost")
    batch = one(mine, peer.regions["theirs"], 4096)
    started = rank.clock.now
    first = yield from outcome_of(rank.endpoint.write(peer, batch, timeout=20))
    second = yield from outcome_of(rank.endpoint.write(peer, batch, timeout=20))
    return {
        "errors": [first, second],
        "connect": refusal(lambda: rank.endpoint.connect(address)),
        "took": rank.clock.now - started,
    }


def be_lost(rank: Rank, by: str, size: int) -> Program:
    mail = Mail(rank)
    rank.endpoint.register(rank.device.allocate(size), "theirs")
    yield from mail.meet(by)
    yield rank.clock.timeout(60)
    return "survived"


def lose_one_of_two(rank: Rank, wait: float) -> Program:
    """Write to two peers of which "victim" is gone since before *wait* seconds."""
    mail = Mail(rank)
    mine = rank.endpoint.register(filled(rank, 4096, 1), "mine")
    peers = yield from mail.meet()
    yield rank.clock.timeout(wait - rank.clock.now)
    errors = {}
    for turn in "1", "2":
        for name in ("victim", "other"):
            batch = one(mine, peers[name].regions["sink"], 4096)
            transfer = rank.endpoint.write(peers[name], batch, turn.encode(), timeout=20)
            errors[name] = yield from outcome_of(transfer)
    yield from mail.wait_for("other")
    return errors


def be_victim(rank: Rank) -> Program:
    rank.endpoint.register(rank.device.allocate(4096), "sink")
    yield from Mail(rank).meet("writer")
    yield rank.clock.timeout(60)


def be_other(rank: Rank) -> Program:
    mail = Mail(rank)
    rank.endpoint.register(rank.device.allocate(4096), "sink")
    yield from mail.meet("writer")
    found = []
    for _ in range(2):
        notification = yield rank.endpoint.notifications.get()
        found.append(notification.payload.decode())
    yield from mail.wait_for("writer")
    return found


def fail(rank: Rank, after: float) -> Program:
    yield rank.clock.timeout(after)
    raise ValueError("this rank fails on purpose")


# --- deadlines ------------------------------------------------------------------------------------------------------


def be_late(rank: Rank, to: str, size: int) -> Program:
    """Write with a deadline that cannot be kept; look at the quarantine before and after it settles."""
    mail = Mail(rank)
    buffer = filled(rank, size, 1)
    mine = rank.endpoint.register(buffer, "source")
    peer = (yield from mail.meet(to))[to]
    transfer = rank.endpoint.write(peer, one(mine, peer.regions["sink"], size), timeout=1e-5)
    error = yield from outcome_of(transfer)
    settled = transfer.settled.triggered
    found = {
        "error": error,
        "settled": settled,
        "quarantined": rank.endpoint.quarantined,
        "deregister": "accepted" if settled else refusal(lambda: rank.endpoint.deregister(mine)),
        "free": refusal(lambda: rank.device.free(buffer)),
    }
    yield transfer.settled
    found["after"] = [rank.endpoint.quarantined, refusal(lambda: rank.endpoint.deregister(mine))]
    yield from mail.wait_for(to)
    return found


def be_target(rank: Rank, by: str, size: int) -> Program:
    mail = Mail(rank)
    rank.endpoint.register(rank.device.allocate(size), "sink")
    yield from mail.meet(by)
    yield from mail.wait_for(by)


def stop_peer(rank: Rank, to: str, size: int, resume: bool) -> Program:
    """Write to a process that was stopped; only a real target has one."""
    mail = Mail(rank)
    buffer = filled(rank, size, 1)
    mine = rank.endpoint.register(buffer, "source")
    peer = (yield from mail.meet(to))[to]
    pid = int((yield from mail.receive(to)))
    yield rank.endpoint.write(peer, one(mine, peer.regions["sink"], 1), b"warm")
    os.kill(pid, signal.SIGSTOP)
    started = rank.clock.now
    transfer = rank.endpoint.write(peer, one(mine, peer.regions["sink"], size), b"stopped", timeout=1.0)
    error = yield from outcome_of(transfer)
    took = rank.clock.now - started
    yield rank.clock.timeout(0.2)
    used = rank.device.used
    found = {
        "error": error,
        "in time": took < 2.0,
        "settled": transfer.settled.triggered,
        "quarantined": rank.endpoint.quarantined,
        "deregister": refusal(lambda: rank.endpoint.deregister(mine)),
        "free": refusal(lambda: rank.device.free(buffer)),
        "kept": rank.device.used == used,
    }
    if resume:
        os.kill(pid, signal.SIGCONT)
        yield transfer.settled | rank.clock.timeout(20)
        found["settled after resuming"] = transfer.settled.triggered
        found["quarantined after resuming"] = rank.endpoint.quarantined
        yield from mail.wait_for(to)
    else:
        os.kill(pid, signal.SIGKILL)
    return found


def be_stopped(rank: Rank, by: str, size: int) -> Program:
    mail = Mail(rank)
    rank.endpoint.register(rank.device.allocate(size), "sink")
    yield from mail.meet(by)
    rank.channel.send(by, str(os.getpid()).encode())
    yield from mail.wait_for(by)


# --- coming and going -----------------------------------------------------------------------------------------------


def reconnect(rank: Rank, to: str, times: int) -> Program:
    """Connect to the same address several times, and write over each of the peers that come of it."""
    mail = Mail(rank)
    mine = rank.endpoint.register(filled(rank, 64 * times, 1), "source")
    rank.channel.send(to, rank.endpoint.address())
    address = yield from mail.receive(to)
    peers = [rank.endpoint.connect(address) for _ in range(times)]
    for index, peer in enumerate(peers):
        batch = one(mine, peer.regions["sink"], 64, index * 64, index * 64)
        yield rank.endpoint.write(peer, batch, b"again")
    yield from mail.wait_for(to)
    return len({peer.name for peer in peers})


def be_reconnected(rank: Rank, by: str, times: int) -> Program:
    mail = Mail(rank)
    buffer = filled(rank, 64 * times, None)
    rank.endpoint.register(buffer, "sink")
    yield from mail.meet(by)
    for _ in range(times):
        yield rank.endpoint.notifications.get()
    found = wrong(rank, buffer, pattern(1, 64 * times))
    yield from mail.wait_for(by)
    return {"wrong": found, "surplus": len(rank.endpoint.notifications)}


def close_twice(rank: Rank, peer: str) -> Program:
    """Move some bytes, close everything twice, and return what is then still in use."""
    mail = Mail(rank)
    buffer = filled(rank, 4096, 1)
    mine = rank.endpoint.register(buffer, "mine")
    partner = (yield from mail.meet(peer))[peer]
    sink = filled(rank, 4096, None)
    rank.endpoint.register(sink, "sink")
    rank.channel.send(peer, rank.endpoint.address())
    partner = rank.endpoint.connect((yield from mail.receive(peer)))
    yield rank.endpoint.write(partner, one(mine, partner.regions["sink"], 4096), b"x")
    yield from mail.wait_for(peer)
    rank.endpoint.close()
    rank.endpoint.close()
    rank.device.free(buffer)
    rank.device.free(sink)
    rank.channel.close()
    rank.channel.close()
    return {"used": rank.device.used, "after close": refusal(lambda: rank.endpoint.register(buffer, "again"))}


# --- channel and device ---------------------------------------------------------------------------------------------


def send_numbers(rank: Rank, to: list[str], count: int) -> Program:
    for number in range(count):
        for name in to:
            rank.channel.send(name, f"{rank.name} {number}".encode())
    yield rank.clock.timeout(0)


def receive_numbers(rank: Rank, senders: list[str], count: int) -> Program:
    found: dict[str, list[int]] = {name: [] for name in senders}
    for _ in range(count * len(senders)):
        sender, payload = yield rank.channel.receive()
        name, number = payload.decode().split()
        assert name == sender
        found[sender].append(int(number))
    return found


def echo(rank: Rank, to: str, size: int) -> Program:
    """Send odd payloads, the last of *size* bytes, and compare what comes back."""
    payloads = [b"", b"\0", b"\0" * 300, bytes(range(256)), b"a_b_c", pattern(3, size).tobytes()]
    same = []
    for payload in payloads:
        rank.channel.send(to, payload)
        message = yield rank.channel.receive()
        same.append(message.payload == payload and message.sender == to)
    return same


def send_back(rank: Rank, count: int) -> Program:
    for _ in range(count):
        sender, payload = yield rank.channel.receive()
        rank.channel.send(sender, payload)


def send_to_nobody(rank: Rank) -> Program:
    yield rank.clock.timeout(0)
    try:
        rank.channel.send("nobody", b"?")
    except KeyError as error:
        return "nobody" in str(error)
    return False


def use_memory(rank: Rank) -> Program:
    """Return what the device says of allocations that fit and that do not."""
    yield rank.clock.timeout(0)
    device = rank.device
    first = device.allocate(4096)
    found: dict[str, Any] = {
        "used": device.used,
        "zeroed": first.read(0, 4096) == bytes(4096) if device.holds_bytes else None,
        "too much": refusal(lambda: device.allocate(device.capacity)),
        "used after": device.used,
    }
    half = device.allocate(device.capacity // 2)
    device.free(half)
    device.free(device.allocate(device.capacity - 4096))
    device.free(first)
    return {**found, "free of nothing": _raises_on_zero(rank), "used in the end": device.used}


def _raises_on_zero(rank: Rank) -> bool:
    try:
        rank.device.allocate(0)
    except (ValueError, PdsimError):
        return True
    return False


def touch_outside(rank: Rank) -> Program:
    """Return the errors of reads and writes outside a buffer, or on a device that keeps no contents."""
    yield rank.clock.timeout(0)
    buffer = rank.device.allocate(16)
    found = []
    for action in (
        lambda: buffer.read(8, 9),
        lambda: buffer.read(-1, 4),
        lambda: buffer.write(15, b"ab"),
        lambda: buffer.write(-2, b"a"),
    ):
        try:
            action()
        except (IndexError, TypeError) as error:
            found.append(type(error).__name__)
    return found


def copy_within(rank: Rank, region: int) -> Program:
    """Gather 100 scattered blocks from one region of the device to another."""
    source, sink = filled(rank, region, 7), filled(rank, region, None)
    batch = Batch(
        rank.endpoint.register(source, "source"),
        rank.endpoint.register(sink, "sink"),
        *scattered(100, 64, region, 7),
    )
    yield rank.device.copy(batch)
    return wrong(rank, sink, moved(100, 64, region, 7))


def compute_in_turn(rank: Rank) -> Program:
    """Start three computations at once; return when each ended, in units of their length."""
    start, length, ends = rank.clock.now, 0.05, []
    for event in [rank.device.compute(length) for _ in range(3)]:
        yield event
        ends.append((rank.clock.now - start) / length)
    return ends


def write_until_killed(rank: Rank, to: str, size: int, count: int) -> Program:
    """Write over and over, several writes at a time, until the supervisor ends this rank."""
    mail = Mail(rank)
    mine = rank.endpoint.register(filled(rank, size, 1), "mine")
    peer = (yield from mail.meet(to))[to]
    under_way: deque[Transfer] = deque()
    while True:
        under_way.append(rank.endpoint.write(peer, one(mine, peer.regions["sink"], size)))
        if len(under_way) == count:
            yield under_way.popleft()


def outlive(rank: Rank, writer: str, size: int, within: float) -> Program:
    """Wait for the proof that *writer* is severed; then look whether bytes still change."""
    mail = Mail(rank)
    buffer = filled(rank, size, None)
    rank.endpoint.register(buffer, "sink")
    stranger = rank.endpoint.severed(writer)
    yield stranger
    yield from mail.meet(writer)
    yield rank.clock.timeout(1.0)
    event = rank.endpoint.severed(writer)
    yield rank.clock.timeout(0.1)
    early = event.triggered
    yield event | rank.clock.timeout(within)
    at, proven = rank.clock.now, event.triggered
    changed = None
    if rank.device.holds_bytes and proven:
        buffer.write(0, bytes(size))
        yield rank.clock.timeout(0.5)
        changed = sum(map(bool, buffer.read(0, size)))
    return {"early": early, "proven": proven, "at": at, "changed": changed}


def write_and_close(rank: Rank, to: str, size: int) -> Program:
    mail = Mail(rank)
    mine = rank.endpoint.register(filled(rank, size, 1), "mine")
    peer = (yield from mail.meet(to))[to]
    yield rank.endpoint.write(peer, one(mine, peer.regions["sink"], size))
    yield rank.clock.timeout(1.5)
    rank.endpoint.close()
