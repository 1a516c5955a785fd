"""Sender and receiver over the modelled waist: order, counts, failures, queues, and when memory is used again."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import astuple
from simpy.events import Event

from pdsim.core.clock import Clock
from pdsim.core.errors import MessageError, OutOfMemory, TransferFailed
from pdsim.kv.contents import KvPool
from pdsim.kv.layout import REGION, STAGING, Grid, KvLayout, KvShape, RankMap
from pdsim.kv.messages import (
    Chunk,
    Destination,
    RankQuiesced,
    ReadRequest,
    RegisterPool,
    StagingReply,
    StagingRequest,
    TransferDone,
    decode,
    encode,
)
from pdsim.kv.policy import Policy, Staging
from pdsim.kv.pull import KvReader
from pdsim.kv.push import GatherBuffers, KvSender, Queues
from pdsim.kv.receiver import KvReceiver
from pdsim.sim.model import Model
from pdsim.transfer import Batch, Program
from pdsim.transfer.job import Outcome, Place, Rank, RankSpec
from tests.support.configs import ENGINE, MACHINE

SHAPE = KvShape(layers=2, heads=2, head_bytes=16)
LAYOUT = KvLayout(SHAPE, tp=1, page_size=4, pages=8, slots=2)
HERE = "tests.kv.test_push"
Script = list[list[Any]]


def model(programs: Mapping[str, tuple[str, dict[str, Any]]], kill: Mapping[str, float], **changes: Any) -> Outcome:
    ranks = [
        RankSpec(name, f"{HERE}:{program}", Place(0, gpu), arguments)
        for gpu, (name, (program, arguments)) in enumerate(programs.items())
    ]
    machine, engine = changes.get("machine", MACHINE), changes.get("engine", ENGINE)
    return Model(machine, engine, memory="tracked").run(ranks, kill)


def chunk(index: int, runs: list[list[int]], last: bool, first_page: int = 0) -> Chunk:
    return Chunk(7, "decode0", index, first_page, 10, tuple(map(tuple, runs)), last, (0, 1), 0.0, 0.0)


def prefill(rank: Rank, *, script: Script, page_size: int = 4, layers: int = 2) -> Program:
    """Do what *script* says, at the times it says, and return what was reported and when."""
    reports: Script = []

    def report(message: TransferDone | RankQuiesced) -> None:
        reports.append([rank.clock.now, type(message).__name__, *astuple(message)])

    layout = KvLayout(replace(SHAPE, layers=layers), 1, page_size, 8, 2)
    sender = KvSender(KvPool(rank, layout, 0, 0), RankMap(layout.shape, Grid(1), Grid(1)), report)
    register = decode((yield rank.channel.receive()).payload)
    assert isinstance(register, RegisterPool)
    try:
        sender.peers.connect(register)
    except MessageError as error:
        return str(error)
    do(rank.clock, sender, script)
    yield rank.clock.timeout(6.0)
    return {"reports": reports, "open": len(sender)}


def do(clock: Clock, sender: KvSender, script: Script) -> None:
    actions: dict[str, Callable[..., None]] = {
        "expect": lambda *arguments: sender.expect([chunk(*arguments)]),
        "send": lambda *arguments: sender.send(chunk(*arguments)),
        "abort": sender.abort,
        "grant": lambda position: sender.grant("decode0.0", StagingReply(7, 0, position)),
    }
    for at, action, *arguments in script:
        clock.call_at(at, lambda step: actions[step[0]](*step[1]), (action, arguments))


def receive(rank: Rank, *, reserve_at: float = 0.0, seconds: float = 1.0) -> Program:
    """Register, reserve pages 2 to 4 for room 7, and return what arrived and when."""
    reports: Script = []
    receiver = KvReceiver(
        KvPool(rank, LAYOUT, 0, 0),
        RankMap(SHAPE, Grid(1), Grid(1)),
        lambda message, last: reports.append([rank.clock.now, message.reason, last.count]),
        lambda message: None,
    )
    rank.channel.send("prefill0.0", encode(receiver.pool.register("decode0", "prefill0")))
    rank.endpoint.notifications.listen(receiver.notice)
    yield rank.clock.at(reserve_at)
    receiver.reserve(Destination("decode0@1", 7, 10, ((2, 3),), 1))
    yield rank.clock.timeout(seconds)
    return {"reports": reports, "open": len(receiver)}


def giving_up(rank: Rank, *, pulls: bool) -> Program:
    """Give room 7 up, which waits for its peer, and return whether nothing waits when that is connected."""
    register = decode((yield rank.channel.receive()).payload)
    pool, rank_map = KvPool(rank, LAYOUT, 0, 0), RankMap(SHAPE, Grid(1), Grid(1))
    part: KvSender | KvReader
    if pulls:
        part = KvReader(pool, rank_map, lambda _: None, lambda _: None)
        part.read(ReadRequest("prefill0@1", 7, 10, "decode0", ((0, 3),), ((2, 3),), (), ()))
        part.forget(7)
    else:
        part = KvSender(pool, rank_map, lambda _: None)
        part.expect([chunk(*FIRST)])
        part.send(chunk(*FIRST))
        part.abort(7)
    part.peers.connect(register)
    return part.peers.connected("decode0")


def run(script: Script, kill: Mapping[str, float] = {}, **options: Any) -> tuple[Script, Script, Outcome]:
    """Return what prefill and decode reported."""
    receiver = {name: options.pop(name) for name in ("reserve_at", "seconds") if name in options}
    programs = {"prefill0.0": ("prefill", {"script": script}), "decode0.0": ("receive", receiver)}
    outcome = model(programs, kill, **options)
    sent, received = (outcome.ranks[name].value for name in programs)
    return sent["reports"], received["reports"] if received else [], outcome


# ten tokens of room 7: two pages after the first forward, the last page after the second
FIRST = [0, [[0, 2, 2]], False]
LAST = [1, [[5, 4, 1]], True, 2]
BEGIN = [[0.1, "expect", *FIRST], [0.2, "send", *FIRST]]
WHOLE = [*BEGIN, [0.2, "expect", *LAST], [0.3, "send", *LAST]]
BYTES = 3 * 4 * SHAPE.token_bytes(1) + 1600


def test_a_room_is_complete_when_all_writes_are_intact():
    sent, received, outcome = run(WHOLE)
    # 4 descriptors of the last page, then 10 of metadata: 5 us a call and 1 us each, then 1600 bytes at 10 GB/s
    assert received == [[pytest.approx(0.3 + 9e-6 + 15e-6 + 1600 / 10e9, rel=1e-12), "", 3]]
    assert [report[1:] for report in sent] == [["TransferDone", 7, BYTES, "", ""]]
    assert [rank.value["open"] for rank in outcome.ranks.values()] == [0, 0]


@pytest.mark.parametrize("pulls", [False, True], ids=["push", "pull"])
def test_a_room_that_is_given_up_waits_for_no_peer(pulls):
    outcome = model({"prefill0.0": ("giving_up", {"pulls": pulls}), "decode0.0": ("receive", {})}, {})
    assert outcome.ranks["prefill0.0"].value is True


def test_a_last_chunk_that_overtakes_does_not_complete_the_room():
    slow = replace(ENGINE, intra=replace(ENGINE.intra, queues=1, descriptor=0.0, call=0.0, rate=1e4))
    # 1024, 512 and 1600 bytes at 10 kB/s: posted together, the smallest arrives first
    script = [[0.1, "expect", *FIRST], [0.1, "expect", *LAST], [0.2, "send", *FIRST], [0.2, "send", *LAST]]
    _, ((at, reason, _),), outcome = run(script, engine=slow)
    arrivals = sorted(record.completed for record in outcome.ranks["prefill0.0"].transfers)
    assert (len(set(arrivals)), at, reason) == (3, arrivals[-1], "")


def test_writes_may_be_noticed_before_the_pages_are_known():
    _, received, _ = run(WHOLE, reserve_at=0.6)
    assert received == [[0.6, "", 3]]


def test_bytes_that_are_not_those_of_the_room_fail_it():
    wrong = [1, [[5, 3, 1]], True, 2]  # to page 3, over the first chunk, and page 4 stays empty
    _, ((_, reason, _),), _ = run([*BEGIN, [0.2, "expect", *wrong], [0.3, "send", *wrong]])
    assert reason == "room 7 plane 0 token 4 byte 0: found room 7 plane 0 head 0 token 8"


def test_a_lost_peer_fails_the_room_once_by_name():
    script = [*BEGIN, [0.7, "expect", *LAST], [0.8, "send", *LAST], [0.9, "abort", 7]]
    (first, second), _, _ = run(script, {"decode0.0": 0.5})
    assert (first[1:3], first[4][:8], first[5]) == (["TransferDone", 7], "PeerLost", "decode0")
    assert second[1:] == ["RankQuiesced", 7]


def test_a_room_settles_after_its_writes_and_its_leader():
    crawling = replace(MACHINE, interconnect=replace(MACHINE.interconnect, rate=1000.0))
    slow = {"machine": crawling, "engine": replace(ENGINE, timeout=0.1), "seconds": 2.0}
    (failed, settled), _, _ = run([*BEGIN, [0.35, "abort", 7]], **slow)
    assert (failed[0], failed[4][:15]) == (pytest.approx(0.3), "TransferTimeout")
    # the write goes on after its deadline: 4 descriptors cost 9 us, 1024 bytes take 1.024 s
    assert settled == [pytest.approx(0.2 + 9e-6 + 1.024, rel=1e-9), "RankQuiesced", 7]


def test_an_abort_stops_what_has_not_been_written_yet():
    sent, received, outcome = run([*BEGIN, [0.2, "expect", *LAST], [0.25, "abort", 7], [0.3, "send", *LAST]])
    assert sent == [[0.3, "RankQuiesced", 7]]  # when the forward that was under way has ended
    assert (received, len(outcome.ranks["prefill0.0"].transfers)) == ([], 1)
    assert run([[0.1, "abort", 99]])[0] == [[0.1, "RankQuiesced", 99]]


@pytest.mark.parametrize(
    ("change", "words"),
    [({"page_size": 16}, "decode0 has kv.page_size=4, this"), ({"layers": 3}, "decode0 keeps KvShape(layers=2")],
)
def test_a_pool_of_another_kind_is_refused(change, words):
    programs = {"prefill0.0": ("prefill", {"script": [], **change}), "decode0.0": ("receive", {})}
    assert words in model(programs, {}).ranks["prefill0.0"].value


class Broken:
    """The device of *rank*, but copies fail half a second after they begin."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rank.device, name)

    def copy(self, _: Any) -> Event:
        failed = self.rank.clock.event()
        self.rank.clock.call_at(self.rank.clock.now + 0.5, failed.fail, TransferFailed("uncorrectable error"))
        return failed


def staging(rank: Rank, *, script: Script) -> Program:
    """Do what *script* says, where a gather fails half a second later; return what was reported."""
    rank = replace(rank, device=Broken(rank))
    reports: Script = []
    sender = KvSender(
        KvPool(rank, LAYOUT, 0, 0, Policy(queues=1)),
        RankMap(SHAPE, Grid(1), Grid(2)),
        lambda message: reports.append([rank.clock.now, type(message).__name__]),
        Staging(ring=4096, buffer=4096, wait=1.0),
    )
    for _ in range(2):
        sender.peers.connect(decode((yield rank.channel.receive()).payload))

    do(rank.clock, sender, script)
    yield rank.clock.timeout(2.0)
    return reports, len(sender)


def be_staged(rank: Rank, *, index: int) -> Program:
    """Register a pool of one head and a staging ring, and return how often a slot of it was asked for."""
    heard: list[Any] = []
    layout = replace(LAYOUT, tp=2)
    rank.endpoint.register(rank.device.allocate(layout.size), REGION)
    rank.endpoint.register(rank.device.allocate(4096), STAGING)
    rank.channel.send("prefill0.0", encode(RegisterPool("", rank.endpoint.address(), "decode0", index, layout)))
    rank.channel.subscribe(lambda message: heard.append(decode(message.payload)))
    yield rank.clock.timeout(2.0)
    return sum(isinstance(message, StagingRequest) for message in heard)


def staged(script: Script) -> list[Any]:
    decodes = {f"decode0.{index}": ("be_staged", {"index": index}) for index in range(2)}
    programs = {"prefill0.0": ("staging", {"script": script})} | decodes
    outcome = model(programs, {}, machine=replace(MACHINE, gpus=3))
    return [rank.value for rank in outcome.ranks.values()]


def test_an_aborted_room_whose_gather_fails_is_quiesced():
    script = [[0.1, "expect", *FIRST], [0.2, "grant", 0], [0.3, "send", *FIRST], [0.4, "abort", 7]]
    assert staged(script) == [[[[0.8, "RankQuiesced"]], 0], 1, 1]


@pytest.mark.parametrize(("position", "asked"), [(-1, 1), (0, 2)])
def test_a_rank_that_refused_is_not_asked_again(position, asked):
    _, refusing, other = staged([[0.1, "expect", *FIRST], [0.2, "grant", position], [0.3, "expect", *LAST]])
    assert (refusing, other) == (asked, 2)


def served(count: int, *items: tuple[float, int, Any]) -> list[Any]:
    """Put *items*, each at a time under a key, into *count* queues, and return what ended when.

    An item is what its work raises, or the seconds that it takes: as a program, or negative as a bare event.
    """
    clock, ended = Clock(), []

    def work(item: Any, _: int) -> Program | Event | None:
        if isinstance(item, Exception):
            raise item
        if not item:
            ended.append((clock.now, item))
            return None
        return program(item) if item > 0 else clock.timeout(-item)

    def program(seconds: float) -> Program:
        failing = clock.event()
        clock.call_at(clock.now + seconds, failing.fail, KeyError(seconds))
        with pytest.raises(KeyError):  # a program is told of the event that failed
            yield failing
        ended.append((clock.now, (yield clock.timeout(0.0, seconds))))
        if seconds == 3.0:
            raise RuntimeError(seconds)

    queues: Queues[Any] = Queues(count, work, lambda item, error: ended.append((clock.now, repr(error))))
    for at, key, item in items:
        clock.call_at(at, lambda arguments: queues.put(*arguments), (key, item))
    clock.run()
    return ended


@pytest.mark.parametrize(
    ("count", "items", "done"),
    [
        # a slow item holds up its queue and no other
        (4, [(0.0, 0, 4.0), (1.0, 4, 0.5), (1.0, 1, 1.0)], [(2.0, 1.0), (4.0, 4.0), (4.5, 0.5)]),
        # first come, first served; an idle worker begins at once
        (1, [(0, 0, 1.0), (0.5, 0, 0.25), (0.5, 0, 0.5), (5, 0, 1.0)], [(1, 1), (1.25, 0.25), (1.75, 0.5), (6, 1)]),
        # what raises ends an item, not the worker
        (
            1,
            [(0.0, 0, 3.0), (2.0, 0, ValueError()), (2.0, 0, 1.0)],
            [(3.0, 3.0), (3.0, "RuntimeError(3.0)"), (3.0, "ValueError()"), (4.0, 1.0)],
        ),
        # work may return an event, or nothing to wait for
        (1, [(1.0, 0, -2.0), (1.0, 0, 0), (1.0, 0, 1.0)], [(3.0, 0), (4.0, 1.0)]),
        # without queues nothing waits
        (0, [(0.0, 0, 0), (0.0, 0, ValueError()), (0.0, 0, 0)], [(0.0, 0), (0.0, "ValueError()"), (0.0, 0)]),
    ],
)
def test_a_worker_does_one_thing_after_the_other(count, items, done):
    assert served(count, *items) == done


def test_an_event_that_fails_is_over_and_not_the_workers():
    clock, ended, failed = Clock(), [], []

    def work(seconds: float, _: int) -> Event:
        ended.append(clock.now)
        event = clock.event()
        clock.call_at(clock.now + seconds, event.fail, RuntimeError(seconds))
        return event

    queues: Queues[float] = Queues(1, work, lambda *what: failed.append(what))
    for _ in range(2):
        clock.call_at(0.0, lambda _: queues.put(0, 2.0), None)
    clock.run()
    assert (ended, failed) == ([0.0, 2.0], [])


SIZE = 1000
SLOW = replace(MACHINE, interconnect=replace(MACHINE.interconnect, rate=1000.0))  # a buffer takes a second
HASTY = replace(ENGINE, timeout=0.25)


def gatherer(rank: Rank, *, times: list[float], leave: int) -> Program:
    """At each of *times* take the buffer of the second queue, fill it with the next letter and write it to a row.

    Return what was taken, and how many bytes were allocated beside the buffers before each and at the end.  With
    *leave*, only so many bytes of the device are left beside them.
    """
    buffers = GatherBuffers(rank, 2, SIZE)
    if leave:
        rank.device.allocate(rank.device.capacity - rank.device.used - leave)
    first = rank.device.used
    peer = rank.endpoint.connect((yield rank.channel.receive()).payload)
    taken, used = [], []
    for number, at in enumerate(times):
        yield rank.clock.at(at)
        used.append(rank.device.used - first)
        try:
            region = buffers.take(1)
        except OutOfMemory:
            taken.append("OutOfMemory")
            continue
        taken.append(region.name)
        buffer: Any = next(buffer for buffer, other in buffers._buffers if other is region)
        buffer.write(0, bytes([ord("a") + number]) * SIZE)
        write = rank.endpoint.write(peer, Batch(region, peer.regions["kv"], [0], [SIZE * number], [SIZE]))
        write.callbacks.append(lambda event: setattr(event, "defused", True))
        buffers.lend(1, write)
    yield rank.clock.timeout(10.0)
    return {"taken": taken, "used": [*used, rank.device.used - first]}


def rows(rank: Rank, *, count: int) -> Program:
    """Return the letters that each row holds in the end."""
    buffer = rank.device.allocate(SIZE * count)
    rank.endpoint.register(buffer, "kv")
    rank.channel.send("writer", rank.endpoint.address())
    yield rank.clock.timeout(9.0)
    return ["".join(sorted(set(buffer.read(SIZE * row, SIZE).decode()))) for row in range(count)]


@pytest.mark.parametrize(
    ("times", "engine", "leave", "taken", "used", "landed"),
    [
        # whose write has settled is filled again
        ([0.5, 2.0, 4.0], ENGINE, 0, ["gather2"] * 3, [0, 0, 0, 0], "abc"),
        # whose write timed out is replaced, and given back when that settles: at 1.5 s, the second before 3 s
        ([0.5, 1.0, 4.0], HASTY, 0, ["gather2", "gather3", "gather3"], [0, 0, 0, 0], "abc"),
        ([0.5, 1.0, 1.25], HASTY, 0, ["gather2", "gather3", "gather4"], [0, 0, SIZE, 0], "abc"),
        # without memory for another nothing is taken until then
        ([0.5, 1.0, 3.0], HASTY, SIZE - 1, ["gather2", "OutOfMemory", "gather2"], [0, 0, 0, 0], "a\0c"),
    ],
)
def test_a_buffer_is_filled_again_once_its_write_settled(times, engine, leave, taken, used, landed):
    programs = {"writer": ("gatherer", {"times": times, "leave": leave}), "reader": ("rows", {"count": len(times)})}
    outcome = model(programs, {}, machine=SLOW, engine=engine)
    assert outcome.ranks["writer"].value == {"taken": taken, "used": used}
    assert outcome.ranks["reader"].value == list(landed)
