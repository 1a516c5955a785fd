# SPDX-License-Identifier: Apache-2.0
"""Common work of all ranks of a serving job: listen, answer the router's pings, connect to peers, stop.

`RankProcess` is the base of the router and of `EngineRank`, the one class for every rank of an instance, prefill or
decode, that schedules or follows.  What such a rank does beside is in its parts::

    EngineRank
      .mover       PushPrefill | PushDecode | PullPrefill | PullDecode     moves the bytes of this rank
      .worker      PrefillWorker | None                                    computes
      .scheduler   None | PrefillScheduler | DecodeScheduler               the first rank only: what runs, and when
                     .pages  .policy  .host  .handoff
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar, cast

from mypy_extensions import mypyc_attr
from simpy.events import Event

from pdsim.core.errors import MessageError, PeerLost, TransferFailed
from pdsim.kv.contents import KvPool
from pdsim.kv.layout import KvLayout
from pdsim.kv.messages import (
    ROUTER,
    ConnectPeer,
    Consensus,
    Fence,
    Fenced,
    Gone,
    KvMessage,
    KvSpec,
    Leave,
    Ping,
    Pong,
    RankQuiesced,
    Refused,
    RegisterPool,
    RegisterRank,
    Stop,
    Submit,
    decode,
    encode,
    epoch_of,
    index_of,
    instance_of,
    leader,
    rank_name,
    refusal,
)
from pdsim.kv.plan import Peers
from pdsim.serving.block_manager import BlockManager, QuarantineStall
from pdsim.serving.cp_gather import ForwardGather
from pdsim.serving.deployment import Deployment
from pdsim.serving.policies import scheduler_of
from pdsim.serving.settings import HostCosts
from pdsim.serving.steps import SchedulerHost
from pdsim.transfer import Message as Envelope
from pdsim.transfer import Notification, Program
from pdsim.transfer.job import Rank

Handler = Callable[[str, Any], object]
"""Called with the rank that sent a message, and the message."""


@mypyc_attr(allow_interpreted_subclasses=True)
class RankProcess:
    """One rank of a job.  `handlers` has one for each type of message that it expects, which must not wait.

    The rank ends with an error when a handler raises, when it cannot read the router, when another rank refuses it
    (the router loses the instance of that one instead), and with `PeerLost` when nothing has been heard of the
    router for `Deployment.deadline` seconds.  What cannot be read, or is for another rank, is answered with the
    reason, and its sender is ignored from then on.

    *ignored* counts messages that came too late to mean anything: those about rooms and incarnations that are over.
    """

    def __init__(self, rank: Rank, job: Deployment) -> None:
        self.rank = rank
        self.job = job
        self.clock = rank.clock
        self.ended = rank.clock.event()
        self.has_ended = False  # whether that is triggered: asked at each message
        self.ignored = 0
        self.handlers: dict[type[KvMessage], Handler] = {Ping: self._ping}
        self._heard = rank.clock.now

    def run(self) -> Program:
        """Serve until the router says stop; return `report`."""
        self.rank.recorder.inspect(self)
        self.rank.channel.subscribe(self._on_message)
        self.clock.process(self.watch())
        yield self.ended
        return self.report()

    def report(self) -> Any:
        """Return the value of the rank's program, as plain data."""
        return None

    def send(self, receivers: str | Iterable[str], message: KvMessage) -> None:
        """Send to one rank or to several, without waiting; to a rank that is gone it is lost."""
        payload = encode(message)
        send = self.rank.channel.send
        if isinstance(receivers, str):
            send(receivers, payload)
            return
        for receiver in receivers:
            send(receiver, payload)

    def ignore(self, *_: Any) -> None:
        """Count a message that has come too late."""
        self.ignored += 1

    def end(self, *_: Any) -> None:
        """End this rank in order."""
        if not self.has_ended:
            self.has_ended = True
            self.ended.succeed()

    def fail(self, error: Exception) -> None:
        """End this rank with *error*."""
        if not self.has_ended:
            self.has_ended = True
            self.ended.fail(error)

    def refuse(self, sender: str, reason: str) -> None:
        """Tell *sender*, which ends by that, why nothing that it sends is heard any more."""
        self.rank.channel.send(sender, refusal(reason))
        self.rank.channel.refuse(sender)

    def watch(self) -> Program:
        """End this rank once the router has been silent for too long."""
        while not self.has_ended:
            yield self.clock.timeout(self.job.deadline / 2)
            if self.clock.now - self._heard > self.job.deadline:
                self.fail(PeerLost(f"nothing from {ROUTER} for {self.job.deadline} s"))

    def guard(self, action: Callable[..., None], *arguments: Any) -> None:
        """Call *action*; what it raises ends this rank."""
        try:
            action(*arguments)
        except Exception as error:
            self.fail(error)

    def _on_message(self, message: Envelope) -> None:
        if not self.has_ended:
            self.guard(self._handle, *message)

    def _handle(self, sender: str, payload: bytes) -> None:
        try:
            message = decode(payload)
        except MessageError as error:
            if isinstance(error, Refused) and self.rank.name != ROUTER:
                raise MessageError(f"refused by {sender}: {error}") from None
            self.refuse(sender, str(error))
            if sender == ROUTER:
                raise MessageError(f"from {sender}: {error}") from None
            return
        if sender == ROUTER:
            self._heard = self.clock.now
        handler = self.handlers.get(type(message))
        if handler is None:
            self.refuse(sender, f"{type(message).__name__} is not for {self.rank.name}")
        else:
            handler(sender, message)

    def _ping(self, sender: str, _: Ping) -> None:
        self.send(sender, Pong(self.working()))

    def working(self) -> bool:
        """Return whether work for requests that ends by itself is under way, or has ended since the last call.

        Asked at each ping: what is slow, but goes on, must not be taken for stalled.
        """
        return False


class LinkTraffic(Protocol):
    """What else than KV the model puts on the links of one GPU: `pdsim.sim.topology.SideTraffic`."""

    def offload(self, size: int, back: bool = False, rate: float = math.inf) -> Event:
        """Move *size* bytes to host memory, or *back*, at *rate* bytes/s at most; the event is the end of it."""

    @property
    def node(self) -> int:
        """The node that the GPU is on."""

    def common(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what all ranks of the run know by *name*; the first one makes it."""

    def tier(self, tier: str, size: int, objects: int, node: int = -1, out: bool = False, gpu: bool = True) -> Event:
        """Move *size* bytes from *tier* to the GPU, or only to host memory, or *out* of that."""

    def exchange(self, network: float, port: float, seconds: float) -> list[Event]:
        """Move the tokens of a forward of so many *seconds* to their experts and back."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Mover:
    """Moves the bytes of one rank, whose pool is *layout*; it registers the messages that it takes with *engine*.

    *peers* connects it to the other side: a rank that posts transfers, or one whose memory is reached.
    """

    peers: PeerConnector | PeerFence

    def __init__(self, engine: EngineRank, layout: KvLayout) -> None:
        self.engine = engine
        self.layout = layout
        engine.works.append(self.progressed)

    def __len__(self) -> int:
        return 0

    def begin(self) -> None:
        """Begin to listen: the rank has begun to run."""

    def progressed(self) -> bool:
        """Return whether bytes move, or have arrived since the last call; False if the other side knows."""
        return False

    def report(self) -> dict[str, Any]:
        """Return what it has counted."""
        return {}


@mypyc_attr(allow_interpreted_subclasses=True)
class HandoffLeader:
    """The half of a handoff beside a scheduler: what it waits for on the other side."""

    @property
    def open_rooms(self) -> int:
        """How many rooms it keeps beside those that the scheduler has."""
        return 0

    def drop(self, incarnation: str) -> None:
        """End what waits for *incarnation*, of the other side, which is given up."""

    def stop(self) -> None:
        """Expect no more requests."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Room:
    """A request at the scheduler of an instance of so many *ranks*; *state* is the first of its states."""

    def __init__(self, request: Submit, ranks: int, state: str) -> None:
        self.request = request
        self.state = state
        self.ranks = Consensus(ranks)
        self.has_pages = False

    @property
    def failed(self) -> bool:
        """Whether it is over but for what still moves of it: its pages are in quarantine until nothing does."""
        return self.state == "failed"

    def fail(self) -> bool:
        """Let what moves be the last; return whether that ends it, which it does once."""
        failed = self.ranks.fail()
        if failed:
            self.state = "failed"
        return failed


AnyRoom = TypeVar("AnyRoom", bound=Room)
AnyPages = TypeVar("AnyPages", bound=BlockManager)
AnyHandoff = TypeVar("AnyHandoff", bound=HandoffLeader)


@mypyc_attr(allow_interpreted_subclasses=True)
class InstanceScheduler(Generic[AnyRoom, AnyPages, AnyHandoff]):
    """Decides what an instance runs, and owns its *pages* and the rooms that they are given to.

    A room that failed while its KV moved stays, with its pages, until `RankQuiesced` has come from every rank.
    """

    handoff: AnyHandoff  # set by whoever makes it

    def __init__(self, engine: EngineRank, pages: AnyPages, costs: HostCosts) -> None:
        job = engine.job
        self.engine = engine
        self.job = job
        self.clock = engine.clock
        self.pages = pages
        self.rooms: dict[int, AnyRoom] = {}
        self.policy = scheduler_of(job.engine)
        self.host = SchedulerHost(
            costs, job.engine.variation, job.seed, engine.instance, job.layers(engine.instance)
        )
        self.blocked = QuarantineStall(engine.clock, job.deadline, self.wake)
        self._stopping = False
        engine.rank.gauge("pages", engine.instance, lambda: pages.pool.used / pages.pool.pages)
        engine.works.append(self.waits)
        engine.handlers[RankQuiesced] = self.quiesced

    def begin(self) -> None:
        """Begin to schedule: the rank has begun to run."""

    def wake(self) -> None:
        """Look at what has come, as soon as this scheduler looks."""
        raise NotImplementedError

    def waits(self) -> bool:
        """Return whether it waits for what ends by itself: pages in quarantine come back, or it gives up."""
        return self.blocked.waiting

    def gives_up(self, others: int) -> bool:
        """Return whether a request that lacks pages must fail: *others* will give none back.

        What is in its way is then in quarantine, which is waited for `Deployment.deadline` seconds.
        """
        return not others and self.blocked.too_long()

    def drop(self, incarnation: str) -> None:
        """Fail the requests that need *incarnation*, of the other side, which is given up."""
        self.handoff.drop(incarnation)

    def stop(self) -> None:
        """Take no more requests; `end_if_drained` follows."""
        self._stopping = True
        self.handoff.stop()

    def end_if_drained(self) -> None:
        """End the rank if the job is over and no room is left."""
        if self._stopping and not self.rooms:
            self.engine.end()

    def forget(self, number: int) -> None:
        """End a room: nothing of it moves any more on any rank, so what it has here is free."""
        raise NotImplementedError

    def report(self) -> dict[str, Any]:
        """Return the numbers of pages, of open rooms on this side, and of messages that came too late."""
        open_rooms = len(self.rooms) + len(self.engine.mover) + self.handoff.open_rooms
        return self.pages.report() | {"open_rooms": open_rooms, "ignored": self.engine.ignored}

    def quiesced(self, sender: str, message: RankQuiesced) -> None:
        """Count a rank on which nothing of a failed room moves; the last one frees its pages."""
        room = self.rooms.get(message.room)
        if room is None:
            self.engine.ignore()
        elif room.ranks.settle(index_of(sender)):
            self.forget(message.room)


class EngineRank(RankProcess):
    """A rank of an instance, the *index*-th: registers with the router, and ends with its instance.

    *mover*, *worker* and *scheduler* are its parts.  They are given this rank, register in `handlers` the messages
    that they take, and are set before it runs.

    It learns its *incarnation*, that of its instance, with the first `ConnectPeer`, serves, and ends after `Stop`
    or `Leave`, or with `PeerLost` when its instance is given up.  *started* tells two processes of the same rank
    apart: nanoseconds on the clock when it was made.
    """

    mover: Mover

    def __init__(self, rank: Rank, job: Deployment, instance: str, index: int) -> None:
        super().__init__(rank, job)
        self.instance = instance
        self.index = index
        self.prefill = instance in job.prefills
        self.incarnation = ""
        self.worker: Any = None  # of a prefill rank
        self.peers: set[str] = set()  # incarnations of the other side
        self.works: list[Callable[[], bool]] = []  # of each part whether it works, or did since the last call
        self.started = int(rank.clock.now * 1e9)
        self.scheduler: InstanceScheduler[Any, Any, Any] | None = None
        self.gather: ForwardGather | None = None  # of a context-parallel rank
        self.followers = [] if index else [rank_name(instance, n) for n in range(1, job.grid(instance).size)]
        self._leader = leader(instance)
        self.early: list[tuple[str, KvMessage]] = []  # with their senders, before this rank knew its incarnation
        self.handlers |= {Gone: self._gone, ConnectPeer: self._connect_peer}
        self.handlers |= {Stop: self._stop, Leave: self._stop}

    @property
    def traffic(self) -> LinkTraffic:
        """What else than KV this rank puts on the links of its GPU; of the model only (`experiments.serve`)."""
        return cast("LinkTraffic", self.rank.device.traffic)  # type: ignore[attr-defined]

    @property
    def schedules(self) -> bool:
        """Whether `schedule` is possible: on the model, where nothing but messages can come between forwards."""
        return getattr(self.rank.device, "schedules", False)

    def schedule(self, name: Hashable, seconds: Sequence[float], changed: Callable[[], None], launches: Any) -> Any:
        """Return forwards of so many *seconds*, one after the other from now on, as `ScheduledComputations` are.

        All ranks of the instance have those of one *name*; the first has *launches*.
        """
        device: Any = self.rank.device
        if self.index:
            return device.follow(name, self._leader, changed)
        return device.schedule(name, seconds, changed, launches, len(self.followers))

    def run(self) -> Program:
        """As `RankProcess.run`, after registering."""
        self.mover.begin()
        if self.scheduler is not None:
            self.scheduler.begin()
        if self.gather is not None:
            yield from self.gather.open()
        spec = KvSpec(self.job.page_size, self.job.kv_dtype)
        self.send(ROUTER, RegisterRank(self.instance, self.index, self.started, spec))
        return (yield from super().run())

    def report(self) -> dict[str, Any]:
        """Return what the mover counted and, of the first rank, the account of its scheduler."""
        moved = self.mover.report()
        if self.gather is not None and self.gather.fallback:
            moved |= {"gather_fallback": self.gather.fallback}
        return moved if self.scheduler is None else moved | self.scheduler.report()

    def working(self) -> bool:
        """Return whether bytes move, or an answer, a forward or pages in quarantine are awaited; or did so since."""
        return sum(works() for works in self.works) > 0  # each is asked, and forgets what it did

    def pool(self) -> KvPool:
        """Allocate and register the memory of this rank's KV."""
        job, index = self.job, self.index
        prefill = self.instance.startswith("prefill")
        layout = job.prefill_layout(index) if prefill else job.decode_layout(index)
        return KvPool(self.rank, layout, index, job.grid(self.instance).at(index).tp, job.handoff, job.checked)

    def tell_leader(self, message: KvMessage) -> None:
        """Have the first rank of this instance take *message*: by a call, where that is this rank."""
        if self.index:
            self.send(self._leader, message)
        else:
            self.handlers[type(message)](self.rank.name, message)

    def listen(self, notice: Callable[[Notification], None]) -> None:
        """Call *notice* with each notification of a write; refuse the sender of one that cannot be read."""

        def hear(notification: Notification) -> None:
            try:
                notice(notification)
            except MessageError as error:
                self.refuse(notification.sender, str(error))
            except Exception as error:
                self.fail(error)

        self.rank.endpoint.notifications.listen(hear)

    def current(self, handler: Handler) -> Handler:
        """Return *handler* of messages of this incarnation; others have come too late."""

        def handle(sender: str, message: Any) -> None:
            if message.incarnation == self.incarnation:
                handler(sender, message)
            else:
                self.ignore()

        return self.introduced(handle)

    def introduced(self, handler: Handler) -> Handler:
        """Return *handler* of what may overtake the first `ConnectPeer`, as nothing of the router does."""

        def handle(sender: str, message: Any) -> None:
            if self.incarnation or sender == ROUTER:
                handler(sender, message)
            else:
                self._keep(sender, message)

        return handle

    def _keep(self, sender: str, message: KvMessage) -> None:
        # It is handled after `ConnectPeer`, or never after two deadlines: a rank that hears nothing from the router
        # for a deadline is lost by then, and its instance too.  Whoever forgot it sooner would skip a forward.
        self.early.append((sender, message))
        self.clock.call_at(self.clock.now + 2 * self.job.deadline, lambda kept: kept and kept.pop(0), self.early)

    def end(self, *_: Any) -> None:
        """End this rank in order, and those that follow it."""
        self.send(self.followers, Stop())
        super().end()

    def _connect_peer(self, _: str, message: ConnectPeer) -> None:
        if message.started != self.started:  # meant for an earlier incarnation of this rank, whose instance is over
            self.ignore()
            return
        self.incarnation, peer = message.incarnation, message.peer
        self.peers.add(peer)
        self.mover.peers.connect_peer(peer)
        early, self.early = self.early, []
        for sender, kept in early:
            self.handlers[type(kept)](sender, kept)

    def _drop(self, incarnation: str) -> None:
        self.peers.discard(incarnation)
        self.mover.peers.drop(incarnation)
        if self.scheduler is not None:
            self.scheduler.drop(incarnation)

    def _stop(self, sender: str, _: Stop | Leave) -> None:
        # The leader ends once no room is left; those that failed have as long for the proof that nothing moves.
        if sender not in (ROUTER, self._leader):
            self.refuse(sender, f"Stop of {self.rank.name} is for {ROUTER} and {self._leader} to send")
            return
        if self.scheduler is not None:
            self.scheduler.stop()
        if sender == ROUTER:
            self.clock.call_at(self.clock.now + self.job.deadline, self.end, None)
        else:
            self.end()
        if self.scheduler is not None:
            self.scheduler.end_if_drained()

    def _gone(self, _: str, message: Gone) -> None:
        if instance_of(message.instance) != self.instance:
            if self.incarnation:
                self._drop(message.instance)
            else:  # meant for an earlier incarnation of this rank: this one is connected to nobody
                self.ignore()
        elif self.started <= message.until:
            self.fail(PeerLost(f"{self.instance} is given up ({message.reason}), and {self.rank.name} with it"))
        else:  # a rank that was started after the loss is not meant
            self.ignore()


# --- the other side ------------------------------------------------------------------------------------------------


class PeerConnector:
    """Connects *engine*, a rank that posts transfers, to the ranks of the other side that register with it.

    The router names the incarnations to `connect_peer`, and their ranks send a `RegisterPool` each; either may come
    first.  *peers* keeps the connections, and what waits for them.
    """

    def __init__(self, engine: EngineRank, peers: Peers[Any]) -> None:
        self._engine = engine
        self._peers = peers
        peers.prepare = engine.job.engine.prepare
        self._early: dict[str, RegisterPool] = {}  # by sender: of incarnations that this rank is not to know yet
        engine.handlers[RegisterPool] = self._register

    def connect_peer(self, incarnation: str) -> None:
        """Connect to the ranks of *incarnation* that have registered, and to others as they do."""
        self._peers.expect(incarnation)
        early, self._early = self._early, {}
        for sender, register in early.items():
            self._register(sender, register)

    def drop(self, incarnation: str) -> None:
        """Forget the ranks of *incarnation*, and their messages."""
        self._peers.drop(incarnation)
        self._early = {name: register for name, register in self._early.items() if register.instance != incarnation}

    def _register(self, sender: str, message: RegisterPool) -> None:
        # A rank that is gone is reported to the router; one with a pool of another kind is refused.
        if message.incarnation != self._engine.incarnation or message.instance not in self._peers:
            kept = self._early.get(sender)  # one of each rank, and of no incarnation that is over for long
            if kept is None or _epochs(kept) <= _epochs(message):  # those of two epochs may come in any order
                self._early[sender] = message
            return
        try:
            self._peers.connect(message)
        except PeerLost as error:
            self._engine.send(ROUTER, Gone(message.instance, f"PeerLost: {error}"))
        except (MessageError, TransferFailed) as error:  # another kind of pool, or no address at all
            self._engine.refuse(sender, str(error))


def _epochs(message: RegisterPool) -> tuple[int, int]:
    return epoch_of(message.instance), epoch_of(message.incarnation)


class PeerFence:
    """Proves on one rank, *engine*, that nothing of a lost instance moves in its memory any more.

    A lost incarnation may have posted transfers that still land.  Its pages stay in quarantine until every rank has
    the proof of its endpoint (`Endpoint.quiesced`) about every rank that reaches into its memory: on decode where
    prefill pushes, on prefill where decode pulls.  There is none about an incarnation that lives and is connected;
    one that is not connected no longer can, nor is introduced.  A proof about epoch *n* holds for all earlier ones.

    *peers* are the ranks by index that move bytes there, which need to know *pool*.  *quiesced*, if given, is called
    with the name of each rank of an instance for which a new proof has come.  The leader sets *free*, called with
    each room of a fence once every rank has answered it.
    """

    def __init__(
        self, engine: EngineRank, pool: KvPool, peers: Iterable[int], quiesced: Callable[[str], None] | None = None
    ) -> None:
        self.free: Callable[[int], None] = engine.ignore
        self._engine = engine
        self._pool = pool
        self._peers = tuple(peers)
        self._quiesced = quiesced
        self._proven: dict[str, int] = {}  # by instance: up to which epoch nothing of it moves here
        self._number = engine.started  # so an answer to an earlier process of the leader is none to this one
        self._fences: dict[int, tuple[list[int], set[int]]] = {}  # rooms, and ranks without proof
        engine.handlers |= {Fence: lambda _, message: self._prove(message), Fenced: self._fenced}

    def connect_peer(self, incarnation: str) -> None:
        """Make the pool known to the ranks of *incarnation*, once nothing of an earlier one moves here."""
        before = epoch_of(incarnation) - 1
        self._engine.clock.process(self._proof(incarnation, before, lambda: self._register(incarnation)))

    def drop(self, incarnation: str) -> None:
        """Do nothing: proofs about *incarnation* hold."""

    def is_quiesced(self, incarnation: str) -> bool:
        """Return whether it is proven that nothing of *incarnation* moves here."""
        return self._proven.get(instance_of(incarnation), 0) >= epoch_of(incarnation)

    def begin(self, incarnation: str, rooms: list[int]) -> None:
        """Ask every rank for the proof about *incarnation*, for which *rooms* wait."""
        self._number += 1
        self._fences[self._number] = rooms, set(range(len(self._engine.followers) + 1))
        fence = Fence(self._number, incarnation)
        self._engine.send(self._engine.followers, fence)
        self._prove(fence)

    def _register(self, peer: str) -> None:
        if self.is_quiesced(peer):  # the leader's `Fence` has overtaken `ConnectPeer`: pages may be free
            return
        ranks = [rank_name(instance_of(peer), index) for index in self._peers]
        self._engine.send(ranks, self._pool.register(self._engine.incarnation, peer))

    def _prove(self, fence: Fence) -> None:
        answer = Fenced(fence.number)
        proof = self._proof(fence.peer, epoch_of(fence.peer), lambda: self._engine.tell_leader(answer))
        self._engine.clock.process(proof)

    def _proof(self, peer: str, epoch: int, then: Callable[[], None]) -> Program:
        instance = instance_of(peer)
        for index in self._peers:
            if self._proven.get(instance, 0) >= epoch:
                break
            yield self._engine.rank.endpoint.quiesced(rank_name(instance, index))
        if self._proven.get(instance, 0) < epoch:
            self._proven[instance] = epoch
            if self._quiesced is not None:
                for index in self._peers:
                    self._quiesced(rank_name(instance, index))
        if not self._engine.has_ended:
            then()

    def _fenced(self, sender: str, message: Fenced) -> None:
        fence = self._fences.get(message.number)
        if fence is None:
            self._engine.ignore()
            return
        rooms, missing = fence
        missing.discard(index_of(sender))
        if not missing:
            del self._fences[message.number]
            for room in rooms:
                self.free(room)
