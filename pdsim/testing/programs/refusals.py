# SPDX-License-Identifier: Apache-2.0
"""Ranks that ask for what must be refused, and that register and withdraw memory."""

from collections.abc import Callable
from functools import partial
from typing import Any

from pdsim.testing.programs.tools import (
    MOMENT,
    Mail,
    begun,
    filled,
    initiator,
    one,
    outcome_of,
    pattern,
    refusal,
    target,
    wrong,
)
from pdsim.transfer import Batch, Program, Region, Transfer
from pdsim.transfer.job import Rank

SIZE = 4096


def write_nonsense(rank: Rank, to: str) -> Program:
    """Return how each batch that breaks a rule is refused, by a description of the rule."""
    mail, mine, peer, sink = yield from initiator(rank, to, SIZE)
    stranger = Region(rank.name, "stranger", SIZE, mine.address, mine.device)
    phantom = Region(to, "phantom", SIZE, sink.address, sink.device)

    def write(batch: Callable[[], Batch]) -> Callable[[], Transfer]:
        return lambda: rank.endpoint.write(peer, batch(), b"nonsense")

    def columns(source: Any, target: Any, length: Any) -> Callable[[], Transfer]:
        return write(lambda: Batch(mine, sink, source, target, length))

    nonsense = {
        "empty": columns([], [], []),
        "zero size": columns([0, 8], [0, 8], [8, 0]),
        "negative size": columns([8], [8], [-8]),
        "beyond the source": columns([0, SIZE - 8], [0, 16], [8, 16]),
        "beyond the target": columns([0, 8], [0, SIZE - 4], [8, 8]),
        "before the target": columns([0], [-8], [8]),
        "overlapping targets": columns([0, 64], [0, 32], [64, 64]),
        "lengths differ": columns([0, 8], [0], [8]),
        "overflow": columns([2**63 - 8], [0], [16]),
        "unknown local region": write(lambda: one(stranger, sink, 8)),
        "unknown remote region": write(lambda: one(mine, phantom, 8)),
        "wrong way round": write(lambda: one(sink, mine, 8)),
        "local to local": write(lambda: one(mine, mine, 8)),
        "read into the peer": lambda: rank.endpoint.read(peer, one(mine, sink, 8)),
    }
    result = {rule: refusal(action) for rule, action in nonsense.items()}
    yield rank.clock.timeout(MOMENT)
    yield from mail.wait_for(to)
    return result


def connect_to_garbage(rank: Rank) -> Program:
    """Return how bytes that are no address are refused: none, text, all byte values, a truncated address."""
    yield rank.clock.timeout(0)
    garbage = b"", b"not an address", bytes(range(256)), rank.endpoint.address()[:-5]
    return [refusal(partial(rank.endpoint.connect, value)) for value in garbage]


def register_oddly(rank: Rank) -> Program:
    """Return how registrations that break a rule are refused, and the bytes in use after all was given back."""
    yield rank.clock.timeout(0)
    endpoint, device = rank.endpoint, rank.device
    buffer, other = device.allocate(SIZE), device.allocate(SIZE)
    region = endpoint.register(buffer, "kv")
    result = {
        "name taken": refusal(lambda: endpoint.register(other, "kv")),
        "buffer taken": refusal(lambda: endpoint.register(buffer, "other")),
        "freed while registered": refusal(lambda: device.free(buffer)),
        "deregistered": refusal(lambda: endpoint.deregister(region)),
        "deregistered again": refusal(lambda: endpoint.deregister(region)),
        "registered anew": refusal(lambda: endpoint.register(buffer, "kv")),
    }
    endpoint.deregister(Region(rank.name, "kv", SIZE, buffer.address, device.name))
    device.free(buffer)
    device.free(other)
    return {**result, "used": device.used}


def withdraw_own_region(rank: Rank, to: str) -> Program:
    """Return how a write from a region is refused that this rank has deregistered."""
    mail, mine, peer, sink = yield from initiator(rank, to, SIZE)
    rank.endpoint.deregister(mine)
    result = refusal(lambda: rank.endpoint.write(peer, one(mine, sink, 8), b"withdrawn"))
    yield rank.clock.timeout(MOMENT)
    yield from mail.wait_for(to)
    return result


def write_to_withdrawn(rank: Rank, to: str) -> Program:
    """Write, then write again after the peer has withdrawn the region and said so."""
    mail, mine, peer, sink = yield from initiator(rank, to, SIZE)
    before = yield from outcome_of(rank.endpoint.write(peer, one(mine, sink, SIZE // 2)))
    rank.channel.send(to, b"withdraw")
    yield from mail.receive(to)
    yield rank.clock.timeout(2 * MOMENT)  # a notice of withdrawal travels on its own
    after = yield from outcome_of(rank.endpoint.write(peer, one(mine, sink, SIZE)))
    other = yield from outcome_of(rank.endpoint.write(peer, one(mine, peer.regions["kept"], SIZE)))
    yield from mail.wait_for(to)
    return [before, after, other]


def withdraw(rank: Rank, by: str) -> Program:
    """Withdraw one of two regions when *by* says so; return how many bytes of it changed that should not have."""
    mail = Mail(rank)
    buffer = filled(rank, SIZE, None)
    region = rank.endpoint.register(buffer, "memory")
    rank.endpoint.register(rank.device.allocate(SIZE), "kept")
    yield from mail.connect(by)
    yield from mail.receive(by)
    rank.endpoint.deregister(region)
    rank.channel.send(by, b"withdrawn")
    yield from mail.wait_for(by)
    result = wrong(rank, buffer, begun(1, SIZE // 2, SIZE))
    rank.device.free(buffer)
    return result


def write_to_latecomer(rank: Rank, to: str) -> Program:
    """Connect before and after *to* registers a region, and write to it."""
    mail, mine, peer, _ = yield from initiator(rank, to, SIZE)
    before = sorted(peer.regions)
    rank.channel.send(to, b"register another")
    newer = rank.endpoint.connect((yield from mail.receive(to)))
    yield rank.endpoint.write(newer, one(mine, newer.regions["late"], SIZE), b"late")
    yield from mail.wait_for(to)
    return {"before": before, "after": sorted(newer.regions), "old": sorted(peer.regions)}


def register_late(rank: Rank, by: str) -> Program:
    """Register a region after *by* has connected, and send it the new address; return wrong bytes of its write."""
    mail, _ = yield from target(rank, by, SIZE)
    yield from mail.receive(by)
    buffer = filled(rank, SIZE, None)
    rank.endpoint.register(buffer, "late")
    rank.channel.send(by, rank.endpoint.address())
    yield rank.endpoint.notifications.get()
    result = wrong(rank, buffer, pattern(1, SIZE))
    yield from mail.wait_for(by)
    return result
