# SPDX-License-Identifier: Apache-2.0
"""Ranks that are lost, stopped or late, and what their peers see."""

from __future__ import annotations

import os
import signal
from collections import deque

from pdsim.testing.programs.tools import PATIENCE, Mail, filled, initiator, one, outcome_of, refusal, target
from pdsim.transfer import Program, Transfer
from pdsim.transfer.job import Rank


def move_until_lost(rank: Rank, to: str, size: int, operation: str) -> Program:
    """Move *size* bytes again and again until it fails; return the error and how long the last one took."""
    _, mine, peer, theirs = yield from initiator(rank, to, size)
    source, sink = (mine, theirs) if operation == "write" else (theirs, mine)
    done, error, started = 0, "ok", 0.0
    while error == "ok":
        started = rank.clock.now
        move = getattr(rank.endpoint, operation)
        error = yield from outcome_of(move(peer, one(source, sink, size), timeout=20 * PATIENCE))
        done += error == "ok"
    return {"error": error, "done": done, "took": (rank.clock.now - started) / PATIENCE, "at": rank.clock.now}


def write_after_loss(rank: Rank, to: str, wait: float) -> Program:
    """Write to, and connect to, a peer that is gone since before *wait* seconds."""
    mail = Mail(rank)
    mine = rank.endpoint.register(filled(rank, 4096, 1), "mine")
    rank.channel.send(to, rank.endpoint.address())
    address = yield from mail.receive(to)
    peer = rank.endpoint.connect(address)
    yield rank.clock.timeout(wait * PATIENCE - rank.clock.now)
    rank.channel.send(to, b"lost")
    batch = one(mine, peer.regions["memory"], 4096)
    started = rank.clock.now
    first = yield from outcome_of(rank.endpoint.write(peer, batch, timeout=20 * PATIENCE))
    second = yield from outcome_of(rank.endpoint.write(peer, batch, timeout=20 * PATIENCE))
    return {
        "errors": [first, second],
        "connect": refusal(lambda: rank.endpoint.connect(address)),
        "took": (rank.clock.now - started) / PATIENCE,
    }


def be_lost(rank: Rank, by: str, size: int) -> Program:
    """Register memory and wait to be killed; return "survived" if nobody does within a minute."""
    yield from target(rank, by, size)
    yield rank.clock.timeout(60 * PATIENCE)
    return "survived"


def lose_one_of_two(rank: Rank, wait: float) -> Program:
    """Write to two peers of which "victim" is gone since before *wait* seconds."""
    mail = Mail(rank)
    mine = rank.endpoint.register(filled(rank, 4096, 1), "mine")
    peers = yield from mail.connect()
    yield rank.clock.timeout(wait * PATIENCE - rank.clock.now)
    errors = {}
    for turn in "1", "2":
        for name in ("victim", "other"):
            batch = one(mine, peers[name].regions["memory"], 4096)
            transfer = rank.endpoint.write(peers[name], batch, turn.encode(), timeout=20 * PATIENCE)
            errors[name] = yield from outcome_of(transfer)
    yield from mail.wait_for("other")
    return errors


def be_other(rank: Rank, by: str) -> Program:
    """Take two writes and return their notifications, whatever becomes of the other peer."""
    mail, _ = yield from target(rank, by, 4096)
    result = []
    for _ in range(2):
        notification = yield rank.endpoint.notifications.get()
        result.append(notification.payload.decode())
    yield from mail.wait_for(by)
    return result


def fail(rank: Rank, after: float) -> Program:
    """Raise a `ValueError` *after* so many seconds."""
    yield rank.clock.timeout(after)
    raise ValueError("this rank fails on purpose")


def write_too_late(rank: Rank, to: str, size: int) -> Program:
    """Write with a deadline of 10 us; look at the quarantine before and after the write settles."""
    mail = Mail(rank)
    buffer = filled(rank, size, 1)
    mine = rank.endpoint.register(buffer, "mine")
    peer = (yield from mail.connect(to))[to]
    transfer = rank.endpoint.write(peer, one(mine, peer.regions["memory"], size), timeout=1e-5)
    error = yield from outcome_of(transfer)
    settled = transfer.settled.triggered
    result = {
        "error": error,
        "settled": settled,
        "quarantined": rank.endpoint.quarantined,
        "deregister": "accepted" if settled else refusal(lambda: rank.endpoint.deregister(mine)),
        "free": refusal(lambda: rank.device.free(buffer)),
    }
    yield transfer.settled
    result["after"] = [rank.endpoint.quarantined, refusal(lambda: rank.endpoint.deregister(mine))]
    yield from mail.wait_for(to)
    return result


def be_target(rank: Rank, by: str, size: int) -> Program:
    """Register memory, and wait until *by* is done with it."""
    mail, _ = yield from target(rank, by, size)
    yield from mail.wait_for(by)


def stop_peer(rank: Rank, to: str, size: int, resume: bool) -> Program:
    """Write to a process that was stopped; only a real target has one."""
    mail = Mail(rank)
    buffer = filled(rank, size, 1)
    mine = rank.endpoint.register(buffer, "mine")
    peer = (yield from mail.connect(to))[to]
    pid = int((yield from mail.receive(to)))
    yield rank.endpoint.write(peer, one(mine, peer.regions["memory"], 1), b"warm")
    os.kill(pid, signal.SIGSTOP)
    started = rank.clock.now
    transfer = rank.endpoint.write(peer, one(mine, peer.regions["memory"], size), b"stopped", timeout=PATIENCE)
    error = yield from outcome_of(transfer)
    took = rank.clock.now - started
    yield rank.clock.timeout(0.2 * PATIENCE)
    used = rank.device.used
    result = {
        "error": error,
        "in time": took < 2.0 * PATIENCE,
        "settled": transfer.settled.triggered,
        "quarantined": rank.endpoint.quarantined,
        "deregister": refusal(lambda: rank.endpoint.deregister(mine)),
        "free": refusal(lambda: rank.device.free(buffer)),
        "kept": rank.device.used == used,
    }
    if resume:
        os.kill(pid, signal.SIGCONT)
        yield transfer.settled | rank.clock.timeout(20 * PATIENCE)
        result["settled after resuming"] = transfer.settled.triggered
        result["quarantined after resuming"] = rank.endpoint.quarantined
        yield from mail.wait_for(to)
    else:
        os.kill(pid, signal.SIGKILL)
    return result


def be_stopped(rank: Rank, by: str, size: int) -> Program:
    """Tell *by* the number of this process, which it stops."""
    mail, _ = yield from target(rank, by, size)
    rank.channel.send(by, str(os.getpid()).encode())
    yield from mail.wait_for(by)


def write_until_killed(rank: Rank, to: str, size: int) -> Program:
    """Write *size* bytes over and over, four writes at a time, until the supervisor ends this rank."""
    _, mine, peer, theirs = yield from initiator(rank, to, size)
    under_way: deque[Transfer] = deque()
    while True:
        under_way.append(rank.endpoint.write(peer, one(mine, theirs, size)))
        if len(under_way) == 4:
            yield under_way.popleft()


def outlive(rank: Rank, by: str, size: int) -> Program:
    """Wait for the proof that the writer *by* is quiesced; then look whether bytes still change."""
    stranger = rank.endpoint.quiesced(by)
    yield stranger
    _, buffer = yield from target(rank, by, size)
    yield rank.clock.timeout(PATIENCE)
    event = rank.endpoint.quiesced(by)
    yield rank.clock.timeout(0.1 * PATIENCE)
    early = event.triggered
    yield event | rank.clock.timeout(3.0 * PATIENCE)
    at, proven = rank.clock.now, event.triggered
    changed = None
    if rank.device.holds_bytes and proven:
        buffer.write(0, bytes(size))
        yield rank.clock.timeout(0.5 * PATIENCE)
        changed = sum(map(bool, buffer.read(0, size)))
    return {"early": early, "proven": proven, "at": at, "changed": changed}


def write_and_close(rank: Rank, to: str, size: int) -> Program:
    """Write once, and close the endpoint in order while *to* still looks."""
    _, mine, peer, theirs = yield from initiator(rank, to, size)
    yield rank.endpoint.write(peer, one(mine, theirs, size))
    yield rank.clock.timeout(1.5 * PATIENCE)
    rank.endpoint.close()
