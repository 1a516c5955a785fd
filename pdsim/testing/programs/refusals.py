# SPDX-License-Identifier: Apache-2.0
"""Ranks that ask for what must be refused, and that register and withdraw memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from pdsim.testing.programs.tools import (
    GUARD,
    PATIENCE,
    Mail,
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


def write_nonsense(rank: Rank, to: str) -> Program:
    """Return how each batch that breaks a rule is refused, by a description of the rule."""
    size = 4096
    mail, mine, peer, sink = yield from initiator(rank, to, size)
    stranger = Region(rank.name, "stranger", size, mine.address, mine.device)
    phantom = Region(to, "phantom", size, sink.address, sink.device)

    def batch(source: Any, target: Any, length: Any) -> Callable[[], Transfer]:
        return lambda: rank.endpoint.write(peer, Batch(mine, sink, source, target, length), b"nonsense")

    result = {
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
    yield rank.clock.timeout(0.05 * PATIENCE)
    yield from mail.wait_for(to)
    return result


def be_spared(rank: Rank, by: str) -> Program:
    """Register guard bytes; return how many of them changed, and how many notifications came."""
    mail, buffer = yield from target(rank, by, 4096)
    yield from mail.wait_for(by)
    return {
        "wrong": wrong(rank, buffer, np.full(4096, GUARD, np.uint8)),
        "notifications": len(rank.endpoint.notifications),
    }


def connect_to_garbage(rank: Rank) -> Program:
    """Return how bytes that are no address are refused: none, text, all byte values, a truncated address."""
    yield rank.clock.timeout(0)
    address = rank.endpoint.address()
    garbage = {"nothing": b"", "text": b"not an address", "bytes": bytes(range(256)), "truncated": address[:-5]}
    return {name: refusal(partial(rank.endpoint.connect, value)) for name, value in garbage.items()}


def register_oddly(rank: Rank) -> Program:
    """Return how registrations that break a rule are refused, and the bytes in use after all was given back."""
    yield rank.clock.timeout(0)
    endpoint, device = rank.endpoint, rank.device
    buffer, other = device.allocate(4096), device.allocate(4096)
    region = endpoint.register(buffer, "kv")
    result = {
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
    return {**result, "used": device.used}


def withdraw_own_region(rank: Rank, to: str) -> Program:
    """Return how a write from a region is refused that this rank has deregistered."""
    mail, mine, peer, sink = yield from initiator(rank, to, 4096)
    rank.endpoint.deregister(mine)
    result = refusal(lambda: rank.endpoint.write(peer, one(mine, sink, 8), b"withdrawn"))
    yield rank.clock.timeout(0.05 * PATIENCE)
    yield from mail.wait_for(to)
    return result


def write_to_withdrawn(rank: Rank, to: str) -> Program:
    """Write, then write again after the peer has withdrawn the region and said so."""
    mail, mine, peer, sink = yield from initiator(rank, to, 4096)
    before = yield from outcome_of(rank.endpoint.write(peer, one(mine, sink, 2048)))
    rank.channel.send(to, b"withdraw")
    yield from mail.receive(to)
    yield rank.clock.timeout(0.1 * PATIENCE)  # a notice of withdrawal travels on its own
    after = yield from outcome_of(rank.endpoint.write(peer, one(mine, sink, 4096)))
    other = yield from outcome_of(rank.endpoint.write(peer, one(mine, peer.regions["kept"], 4096)))
    yield from mail.wait_for(to)
    return [before, after, other]


def withdraw(rank: Rank, by: str) -> Program:
    """Withdraw one of two regions when *by* says so; return how many bytes of it changed that should not have."""
    mail = Mail(rank)
    buffer = filled(rank, 4096, None)
    region = rank.endpoint.register(buffer, "memory")
    rank.endpoint.register(rank.device.allocate(4096), "kept")
    yield from mail.connect(by)
    yield from mail.receive(by)
    rank.endpoint.deregister(region)
    rank.channel.send(by, b"withdrawn")
    yield from mail.wait_for(by)
    expected = np.full(4096, GUARD, np.uint8)
    expected[:2048] = pattern(1, 4096)[:2048]
    result = wrong(rank, buffer, expected)
    rank.device.free(buffer)
    return {"wrong": result}


def write_to_latecomer(rank: Rank, to: str) -> Program:
    """Connect before and after *to* registers a region, and write to it."""
    mail, mine, peer, _ = yield from initiator(rank, to, 4096)
    known_before = sorted(peer.regions)
    rank.channel.send(to, b"register another")
    newer = rank.endpoint.connect((yield from mail.receive(to)))
    yield rank.endpoint.write(newer, one(mine, newer.regions["late"], 4096), b"late")
    yield from mail.wait_for(to)
    return {"before": known_before, "after": sorted(newer.regions), "old": sorted(peer.regions)}


def register_late(rank: Rank, by: str) -> Program:
    """Register a region after *by* has connected, and send it the new address."""
    mail, _ = yield from target(rank, by, 4096)
    yield from mail.receive(by)
    buffer = filled(rank, 4096, None)
    rank.endpoint.register(buffer, "late")
    rank.channel.send(by, rank.endpoint.address())
    yield rank.endpoint.notifications.get()
    result = wrong(rank, buffer, pattern(1, 4096))
    yield from mail.wait_for(by)
    return {"wrong": result}
