# SPDX-License-Identifier: Apache-2.0
"""Ranks that come and go, talk, and use their device."""

from functools import partial

from pdsim.core.errors import PdsimError
from pdsim.testing.programs.tools import Mail, filled, moved, one, pattern, refusal, scattered, wrong
from pdsim.transfer import Batch, Program
from pdsim.transfer.job import Rank


def reconnect(rank: Rank, to: str, times: int) -> Program:
    """Connect to the same address several times, write over each of the peers that come of it; return how many."""
    mail = Mail(rank)
    mine = rank.endpoint.register(filled(rank, 64 * times, 1), "source")
    rank.channel.send(to, rank.endpoint.address())
    address = yield from mail.receive(to)
    peers = [rank.endpoint.connect(address) for _ in range(times)]
    for index, peer in enumerate(peers):
        yield rank.endpoint.write(peer, one(mine, peer.regions["memory"], 64, index * 64, index * 64), b"again")
    yield from mail.wait_for(to)
    return len({peer.name for peer in peers})


def close_twice(rank: Rank, peer: str) -> Program:
    """Move some bytes, close everything twice, and return what is then still in use."""
    mail = Mail(rank)
    buffer, sink = filled(rank, 4096, 1), filled(rank, 4096, None)
    mine = rank.endpoint.register(buffer, "mine")
    rank.endpoint.register(sink, "sink")
    partner = (yield from mail.connect(peer))[peer]
    yield rank.endpoint.write(partner, one(mine, partner.regions["sink"], 4096), b"x")
    yield from mail.wait_for(peer)
    rank.endpoint.close()
    rank.endpoint.close()
    rank.device.free(buffer)
    rank.device.free(sink)
    rank.channel.close()
    rank.channel.close()
    return {"used": rank.device.used, "after close": refusal(lambda: rank.endpoint.register(buffer, "again"))}


def send_numbers(rank: Rank, to: list[str], count: int) -> Program:
    """Send the numbers from 0 on to each rank of *to*, with this rank's name."""
    for number in range(count):
        for name in to:
            rank.channel.send(name, f"{rank.name} {number}".encode())
    yield rank.clock.timeout(0)


def receive_numbers(rank: Rank, senders: list[str], count: int) -> Program:
    """Return the numbers of each of *senders*, in order of arrival."""
    result: dict[str, list[int]] = {name: [] for name in senders}
    for _ in range(count * len(senders)):
        sender, payload = yield rank.channel.receive()
        name, number = payload.decode().split()
        assert name == sender
        result[sender].append(int(number))
    return result


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
    """Return each of *count* messages to its sender."""
    for _ in range(count):
        sender, payload = yield rank.channel.receive()
        rank.channel.send(sender, payload)


def send_to_nobody(rank: Rank) -> Program:
    """Return whether a message to an unknown rank is a `KeyError` that names it."""
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
    used, zeroed = device.used, not device.holds_bytes or first.read(0, 4096) == bytes(4096)
    result = {"used": used, "zeroed": zeroed, "too much": refusal(lambda: device.allocate(device.capacity))}
    result["used after"] = device.used
    device.free(device.allocate(device.capacity // 2))
    device.free(device.allocate(device.capacity - 4096))
    device.free(first)
    try:
        device.allocate(0)
        result["nothing"] = "accepted"
    except (ValueError, PdsimError):
        result["nothing"] = "refused"
    return {**result, "used in the end": device.used}


def touch_outside(rank: Rank) -> Program:
    """Return the errors of reads and writes outside a buffer, or on a device that keeps no contents."""
    yield rank.clock.timeout(0)
    buffer = rank.device.allocate(16)
    result = []
    for action in (
        partial(buffer.read, 8, 9),
        partial(buffer.read, -1, 4),
        partial(buffer.write, 15, b"ab"),
        partial(buffer.write, -2, b"a"),
    ):
        try:
            action()
        except (IndexError, TypeError) as error:
            result.append(type(error).__name__)
    return result


def copy_within(rank: Rank, region: int) -> Program:
    """Gather 100 scattered blocks from one region of the device to another; return how many bytes are wrong."""
    source, sink = filled(rank, region, 7), filled(rank, region, None)
    regions = rank.endpoint.register(source, "source"), rank.endpoint.register(sink, "sink")
    yield rank.device.copy(Batch(*regions, *scattered(100, 64, region, 7)))
    return wrong(rank, sink, moved(100, 64, region, 7))


def compute_in_turn(rank: Rank) -> Program:
    """Return when each of three computations that were started at once ended, in units of their length."""
    start, length, ends = rank.clock.now, 0.05, []
    for event in [rank.device.compute(length) for _ in range(3)]:
        yield event
        ends.append((rank.clock.now - start) / length)
    return ends
