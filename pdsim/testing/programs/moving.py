# SPDX-License-Identifier: Apache-2.0
"""Ranks that move bytes and attach notifications; what they write to is mostly `be_target`."""

import numpy as np

from pdsim.testing.programs.tools import (
    MOMENT,
    Mail,
    filled,
    initiator,
    moved,
    one,
    pattern,
    scattered,
    target,
    wrong,
)
from pdsim.transfer import Batch, Notification, Program, Writes
from pdsim.transfer.job import Rank


def write_blocks(rank: Rank, to: str, count: int, size: int, region: int, seed: int) -> Program:
    """Write *count* scattered blocks in one batch; return what the record says of it."""
    mail, mine, peer, theirs = yield from initiator(rank, to, region, seed)
    batch = Batch(mine, theirs, *scattered(count, size, region, seed))
    record = yield rank.endpoint.write(peer, batch, b"written", label="blocks")
    yield from mail.wait_for(to)
    times = [record.submitted, record.prepared, record.posted, record.completed, record.seen]
    return {
        "operation": record.operation,
        "route": [record.source, record.target],
        "missing": int(batch.size.sum()) - record.nbytes,
        "descriptors": record.descriptors,
        "ordered": times == sorted(times),
        "status": record.status,
        "label": record.label,
        "quarantined": rank.endpoint.quarantined,
    }


def read_blocks(rank: Rank, to: str, count: int, size: int, region: int, seed: int) -> Program:
    """Read *count* scattered blocks of *to* in one batch; return route and wrong bytes."""
    mail = Mail(rank)
    buffer = filled(rank, region, None)
    mine = rank.endpoint.register(buffer, "mine")
    peer = (yield from mail.connect(to))[to]
    batch = Batch(peer.regions["memory"], mine, *scattered(count, size, region, seed))
    record = yield rank.endpoint.read(peer, batch)
    result = wrong(rank, buffer, moved(count, size, region, seed))
    yield from mail.wait_for(to)
    return {"operation": record.operation, "route": [record.source, record.target], "wrong": result}


def cross_writes(rank: Rank, peer: str, count: int, size: int, seed: int, other: int) -> Program:
    """Write *count* blocks in as many transfers at once, while the peer does the same the other way."""
    mail = Mail(rank)
    mine = rank.endpoint.register(filled(rank, count * size, seed), "out")
    sink = filled(rank, count * size, None)
    rank.endpoint.register(sink, "in")
    partner = (yield from mail.connect(peer))[peer]
    yield rank.clock.all_of(
        [
            rank.endpoint.write(partner, one(mine, partner.regions["in"], size, i * size, (count - 1 - i) * size))
            for i in range(count)
        ]
    )
    yield from mail.wait_for(peer)
    return wrong(rank, sink, pattern(other, count * size).reshape(count, size)[::-1].ravel())


def write_to_many(rank: Rank, size: int) -> Program:
    """Write a part of one region to each peer, all at once, with its name as notification."""
    mail = Mail(rank)
    mine = rank.endpoint.register(filled(rank, size * len(rank.peers), 5), "mine")
    peers = yield from mail.connect()
    yield rank.clock.all_of(
        [
            rank.endpoint.write(peer, one(mine, peer.regions["memory"], size, index * size), name.encode())
            for index, (name, peer) in enumerate(sorted(peers.items()))
        ]
    )
    yield from mail.wait_for()


def write_to_hub(rank: Rank, to: str, size: int, seed: int, offset: int) -> Program:
    """Write the pattern of *seed* to *offset* of the hub's region, with this rank's name as notification."""
    mail, mine, hub, theirs = yield from initiator(rank, to, size, seed)
    yield rank.endpoint.write(hub, one(mine, theirs, size, target_offset=offset), rank.name.encode())
    yield from mail.wait_for(to)


def be_hub(rank: Rank, size: int) -> Program:
    """Take one write of each peer; return who notified, and how many bytes are wrong in all."""
    mail = Mail(rank)
    buffer = filled(rank, size * len(rank.peers), None)
    rank.endpoint.register(buffer, "memory")
    yield from mail.connect()
    heard = []
    for _ in rank.peers:
        note: Notification = yield rank.endpoint.notifications.get()
        heard.append([note.sender, note.payload.decode()])
    result = wrong(rank, buffer, np.concatenate([pattern(seed, size) for seed in range(len(rank.peers))]))
    yield from mail.wait_for()
    return {"heard": sorted(heard), "wrong": result}


def write_in_sequence(rank: Rank, to: str, count: int, size: int, stop: bool = False) -> Program:
    """Write *count* batches one after the other, or, with *stop*, no more than the one that is under way at once.

    They are of two parts in turns, a millisecond apart at least.
    """
    mail, mine, peer, theirs = yield from initiator(rank, to, count * size, 2)
    batches = [one(mine, theirs, size, i * size, i * size) for i in range(count)]
    reported: list[tuple[int, int]] = []

    def progress(writes: int, nbytes: int) -> None:
        reported.append((writes, nbytes))

    parts = [Writes(batches[number::2], b"part", "parts", progress) for number in (0, 1)]
    times = [rank.clock.now + 1e-3 * turn for turn in range(count // 2)]
    sequence = rank.endpoint.write_sequence(peer, parts, times)
    if stop:
        sequence.stop(0)
        sequence.stop(1)
    written = yield sequence
    yield from mail.wait_for(to)
    return {
        "written": [written, sequence.done, sum(writes for writes, _ in reported)],
        "nbytes": sum(nbytes for _, nbytes in reported),
        "failed": sequence.failed is not None,
    }


def notify_in_turn(rank: Rank, to: str, payloads: list[str]) -> Program:
    """Write once for each payload (hexadecimal), each after the one before is complete; "" is no notification."""
    mail, mine, peer, theirs = yield from initiator(rank, to, 64)
    for payload in payloads:
        yield rank.endpoint.write(peer, one(mine, theirs, 64), bytes.fromhex(payload))
    yield rank.clock.timeout(MOMENT)
    yield from mail.wait_for(to)


def notify_at_once(rank: Rank, to: str, count: int, size: int) -> Program:
    """Start *count* transfers of different bytes together, each with its own notification."""
    mail, mine, peer, theirs = yield from initiator(rank, to, count * size, 2)
    batches = [one(mine, theirs, size, i * size, i * size) for i in range(count)]
    yield rank.clock.all_of([rank.endpoint.write(peer, b, str(i).encode()) for i, b in enumerate(batches)])
    yield from mail.wait_for(to)


def be_notified(rank: Rank, by: str, count: int, size: int) -> Program:
    """Return what the notifications of `notify_at_once` said, and how many came before their bytes or beyond."""
    mail, buffer = yield from target(rank, by, size * count)
    expected, early, numbers = pattern(2, size * count), 0, []
    for _ in range(count):
        notification: Notification = yield rank.endpoint.notifications.get()
        number = int(notification.payload)
        numbers.append(number)
        if rank.device.holds_bytes:
            early += buffer.read(number * size, size) != expected[number * size :][:size].tobytes()
    yield from mail.wait_for(by)
    yield rank.clock.timeout(MOMENT)  # a second delivery would come now
    return {"numbers": sorted(numbers), "surplus": len(rank.endpoint.notifications), "early": early}
