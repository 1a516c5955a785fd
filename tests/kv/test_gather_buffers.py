"""The buffers in which a prefill rank gathers: none is filled again, or given back, while a write may read it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pdsim.core.errors import OutOfMemory
from pdsim.kv.staging.ring import GatherBuffers
from pdsim.sim.model import Model
from pdsim.transfer import Batch, Program, Region
from pdsim.transfer.job import Outcome, Place, Rank, RankSpec
from tests.support.configs import ENGINE, MACHINE

SIZE = 1000
SLOW = replace(MACHINE, interconnect=replace(MACHINE.interconnect, rate=1000.0))  # a buffer takes a second
HASTY = replace(ENGINE, timeout=0.25)
HERE = "tests.kv.test_gather_buffers"


def writer(rank: Rank, *, times: list[float], leave: int = 0) -> Program:
    """At each of *times* take the buffer of queue 0, fill it with the next letter and write it to a row of its own.

    Return what was taken, how many bytes were allocated beside the buffer before each and at the end, and what
    failed. With *leave*, only so many bytes of the device are left beside that buffer.
    """
    buffers = GatherBuffers(rank, 1, SIZE)
    if leave:
        rank.device.allocate(rank.device.capacity - rank.device.used - leave)
    first = rank.device.used
    message = yield rank.channel.receive()
    peer = rank.endpoint.connect(message.payload)
    taken: list[str] = []
    used: list[int] = []
    for number, at in enumerate(times):
        yield rank.clock.at(at)
        used.append(rank.device.used - first)
        try:
            region = buffers.take(0)
        except OutOfMemory:
            taken.append("OutOfMemory")
            continue
        taken.append(region.name)
        _buffer(buffers, region).write(0, bytes([ord("a") + number]) * SIZE)
        write = rank.endpoint.write(peer, Batch(region, peer.regions["kv"], [0], [SIZE * number], [SIZE]))
        write.callbacks.append(lambda event: setattr(event, "defused", True))
        buffers.lend(0, write)
    yield rank.clock.timeout(10.0)
    return {"taken": taken, "used": [*used, rank.device.used - first]}


def _buffer(buffers: GatherBuffers, region: Region) -> Any:
    return next(buffer for buffer, other in buffers._buffers if other is region)


def reader(rank: Rank, *, rows: int) -> Program:
    """Return the letters that each row holds in the end."""
    buffer = rank.device.allocate(SIZE * rows)
    rank.endpoint.register(buffer, "kv")
    rank.channel.send("writer", rank.endpoint.address())
    yield rank.clock.timeout(9.0)
    return ["".join(sorted(set(buffer.read(SIZE * row, SIZE).decode()))) for row in range(rows)]


def run(times: list[float], engine: Any = ENGINE, leave: int = 0) -> Outcome:
    ranks = [
        RankSpec("writer", f"{HERE}:writer", Place(0, 0), {"times": times, "leave": leave}),
        RankSpec("reader", f"{HERE}:reader", Place(0, 1), {"rows": len(times)}),
    ]
    outcome = Model(SLOW, engine, memory="tracked").run(ranks)
    assert not any(rank.error for rank in outcome.ranks.values())
    return outcome


def test_a_buffer_whose_write_has_settled_is_filled_again():
    outcome = run([0.5, 2.0, 4.0])
    assert outcome.ranks["writer"].value == {"taken": ["gather1"] * 3, "used": [0, 0, 0, 0]}
    assert outcome.ranks["reader"].value == ["a", "b", "c"]


def test_a_buffer_whose_write_timed_out_is_replaced_and_what_it_held_lands_whole():
    outcome = run([0.5, 1.0], HASTY)
    assert outcome.ranks["writer"].value["taken"] == ["gather1", "gather2"]
    assert outcome.ranks["reader"].value == ["a", "b"]  # what came after was gathered elsewhere


def test_a_replaced_buffer_is_given_back_when_its_write_settles():
    # the first write settles at 1.5 s, the second, which shared the link with it, before 3 s
    value = run([0.5, 1.0, 4.0], HASTY).ranks["writer"].value
    assert value["taken"] == ["gather1", "gather2", "gather2"]
    assert value["used"] == [0, 0, 0, 0]  # looked at before each is taken, and in the end


def test_a_replaced_buffer_is_kept_until_then():
    value = run([0.5, 1.0, 1.25], HASTY).ranks["writer"].value
    assert value["taken"] == ["gather1", "gather2", "gather3"]
    assert value["used"] == [0, 0, SIZE, 0]


def test_without_memory_for_another_nothing_is_taken_until_the_write_has_settled():
    value = run([0.5, 1.0, 1.25, 3.0], HASTY, leave=SIZE - 1).ranks["writer"].value
    assert value["taken"] == ["gather1", "OutOfMemory", "OutOfMemory", "gather1"]
    assert value["used"] == [0] * 5


@pytest.mark.parametrize("count", [1, 4])
def test_every_queue_has_a_buffer_of_its_own(count: int):
    ranks = [RankSpec("many", f"{HERE}:many", Place(0, 0), {"count": count})]
    assert Model(MACHINE, ENGINE).run(ranks).ranks["many"].value == [f"gather{n + 1}" for n in range(count)]


def many(rank: Rank, *, count: int) -> Program:
    buffers = GatherBuffers(rank, count, SIZE)
    yield rank.clock.timeout(0.0)
    return [buffers.take(queue).name for queue in range(count)]
