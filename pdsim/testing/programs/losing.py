# SPDX-License-Identifier: Apache-2.0
"""Ranks that are lost, stopped or late, and what their peers see.  Durations are in units of `PATIENCE`."""

import os
import signal
from collections import deque
from typing import Any

from pdsim.testing.programs.tools import (
    MOMENT,
    PATIENCE,
    Mail,
    filled,
    guard,
    initiator,
    one,
    outcome_of,
    refusal,
    target,
    wrong,
)
from pdsim.transfer import Program, Transfer
from pdsim.transfer.job import Rank

DEADLINE = 20 * PATIENCE


def move_until_lost(rank: Rank, to: str, size: int, operation: str) -> Program:
    """Move *size* bytes again and again until it fails; return the error and how long the last one took."""
    _, mine, peer, theirs = yield from initiator(rank, to, size)
    batch = one(mine, theirs, size) if operation == "write" else one(theirs, mine, size)
    done, error, started = 0, "ok", 0.0
    while error == "ok":
        started = rank.clock.now
        error = yield from outcome_of(getattr(rank.endpoint, operation)(peer, batch, timeout=DEADLINE))
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
    first = yield from outcome_of(rank.endpoint.write(peer, batch, timeout=DEADLINE))
    second = yield from outcome_of(rank.endpoint.write(peer, batch, timeout=DEADLINE))
    connect = refusal(lambda: rank.endpoint.connect(address))
    return {"errors": [first, second, connect], "took": (rank.clock.now - started) / PATIENCE}


def be_lost(rank: Rank, by: str, size: int = 4096) -> Program:
    """Register memory and wait to be killed; return "survived" if nobody does within a minute."""
    yield from target(rank, by, size)
    yield rank.clock.timeout(60 * PATIENCE)
    return "survived"


def lose_one_of_two(rank: Rank, wait: float) -> Program:
    """Write twice to two peers after "victim" has ended, at time *wait*; return the last outcomes."""
    mail = Mail(rank)
    mine = rank.endpoint.register(filled(rank, 4096, 1), "mine")
    peers = yield from mail.connect()
    yield rank.clock.timeout(wait * PATIENCE - rank.clock.now)
    errors = {}
    for turn in b"1", b"2":
        for name in ("victim", "other"):
            batch = one(mine, peers[name].regions["memory"], 4096)
            errors[name] = yield from outcome_of(rank.endpoint.write(peers[name], batch, turn, timeout=DEADLINE))
    yield from mail.wait_for("other")
    return errors


def fail(rank: Rank, after: float) -> Program:
    """Raise a `ValueError` *after* so many seconds."""
    yield rank.clock.timeout(after)
    raise ValueError("this rank fails on purpose")


def write_too_late(rank: Rank, to: str, region: int) -> Program:
    """Write with a deadline of 10 us; look at the quarantine before and after the write settles."""
    mail, buffer = Mail(rank), filled(rank, region, 1)
    mine = rank.endpoint.register(buffer, "mine")
    peer = (yield from mail.connect(to))[to]
    transfer = rank.endpoint.write(peer, one(mine, peer.regions["memory"], region), timeout=1e-5)
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


def stop_peer(rank: Rank, to: str, size: int, resume: bool) -> Program:
    """Write to a process that was stopped, and goes on or is killed; only a real target has one."""
    mail, buffer = Mail(rank), filled(rank, size, 1)
    mine = rank.endpoint.register(buffer, "mine")
    peer = (yield from mail.connect(to))[to]
    theirs = peer.regions["memory"]
    pid = int((yield from mail.receive(to)))
    yield rank.endpoint.write(peer, one(mine, theirs, 1), b"warm")
    os.kill(pid, signal.SIGSTOP)
    started = rank.clock.now
    transfer = rank.endpoint.write(peer, one(mine, theirs, size), b"stopped", timeout=PATIENCE)
    error = yield from outcome_of(transfer)
    took = rank.clock.now - started
    yield rank.clock.timeout(4 * MOMENT)
    used = rank.device.used
    result: dict[str, Any] = {
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
        yield transfer.settled | rank.clock.timeout(DEADLINE)
        result["after resuming"] = [transfer.settled.triggered, rank.endpoint.quarantined]
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


def write_and_close(rank: Rank, to: str, size: int) -> Program:
    """Write once, and close the endpoint in order while *to* still looks."""
    _, mine, peer, theirs = yield from initiator(rank, to, size)
    yield rank.endpoint.write(peer, one(mine, theirs, size))
    yield rank.clock.timeout(0.8 * PATIENCE)
    rank.endpoint.close()


def outlive(rank: Rank, by: str, size: int) -> Program:
    """Wait for the proof that the writer *by* is quiesced; then look whether bytes still change."""
    yield rank.endpoint.quiesced(by)  # a stranger, as yet
    _, buffer = yield from target(rank, by, size)
    yield rank.clock.timeout(0.3 * PATIENCE)
    event = rank.endpoint.quiesced(by)
    yield rank.clock.timeout(2 * MOMENT)
    early = event.triggered
    yield event | rank.clock.timeout(3.0 * PATIENCE)
    at, proven, changed = rank.clock.now, event.triggered, 0
    if rank.device.holds_bytes and proven:
        buffer.write(0, bytes(size))
        yield rank.clock.timeout(10 * MOMENT)
        changed = sum(map(bool, buffer.read(0, size)))
    return {"early": early, "proven": proven, "at": at, "changed": changed}


def connect_twice(rank: Rank, to: str, size: int) -> Program:
    """Write by an address that is too old and by the next one, each when *to* says so; return how both end."""
    mail, outcomes = Mail(rank), []
    mine = rank.endpoint.register(filled(rank, size, 1), "mine")
    for _ in range(2):
        address = yield from mail.receive(to)
        yield from mail.receive(to)
        peer = rank.endpoint.connect(address)
        outcomes.append((yield from outcome_of(rank.endpoint.write(peer, one(mine, peer.regions["memory"], size)))))
        rank.channel.send(to, b"over")
    return outcomes


def void_address(rank: Rank, by: str, size: int) -> Program:
    """Give *by* an address, ask for the proof, and have it connect; then again without; return bytes that came."""
    mail, buffer, came = Mail(rank), filled(rank, size, None), []
    rank.endpoint.register(buffer, "memory")
    for proof in (True, False):
        rank.channel.send(by, rank.endpoint.address())
        if proof:
            yield rank.endpoint.quiesced(by)  # of a stranger: at once
        rank.channel.send(by, b"go")
        yield from mail.receive(by)
        came.append(size if not rank.device.holds_bytes and not proof else wrong(rank, buffer, guard(size)))
    return came
