# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks on the model: the simulated `pdsim.transfer.group.Group`.

An all-gather takes what `CollectiveModel` says, its bytes being flows that share links with everything else; all
ranks have it when the last flow ends.  The end of a rank, `close` or a deadline that passes breaks the group: flows
stop, and the ranks that wait learn of it `DETECTION` later.  Not modelled: skew between ranks, and the
multiprocessors that a collective's kernel takes from computation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from simpy.events import Event

from pdsim.core.errors import (
    InvalidBatch,
    OutOfMemory,
    PeerLost,
    RegistrationError,
    TransferError,
    TransferFailed,
    TransferTimeout,
)
from pdsim.core.units import format_size
from pdsim.sim.endpoint import DETECTION
from pdsim.sim.memory import SimBuffer
from pdsim.sim.posting import Fabric
from pdsim.transfer import TransferRecord
from pdsim.transfer.group import SYMMETRIC, check_gather, repeated

if TYPE_CHECKING:
    from pdsim.hardware.costs import Collective, CollectiveModel
    from pdsim.sim.hosts import RankClock
    from pdsim.sim.memory import SimDevice
    from pdsim.sim.network import Flow, Path
    from pdsim.transfer import Buffer, Recorder


def join(
    shared: dict[tuple[str, ...], SharedGroup],
    fabric: Fabric,
    library: Collective,
    names: tuple[str, ...],
    rank: tuple[RankClock, SimDevice, Recorder],
) -> SimGroup:
    """Return the membership of *rank* in the group of *names*, whose collectives are those of *library*.

    *shared* keeps what the members of each group of the job share, by their names in order.  Raise a `ConfigError`
    if the machine has no way between two of the ranks for this library.
    """
    group, clock = shared.get(names), rank[0]
    member = None if group is None else group.members.get(clock.name)
    again = member is not None and member.clock is not clock  # a rank that was started again has another clock
    if group is None or (again and group.left is not None):
        group = shared[names] = SharedGroup(fabric, library, names)
    if member is None or again:
        member = group.members[clock.name] = SimGroup(group, *rank)
    return member


class SimGroup:
    """One rank's membership: the simulated `pdsim.transfer.group.Group`."""

    def __init__(self, group: SharedGroup, clock: RankClock, device: SimDevice, recorder: Recorder) -> None:
        self.names = group.names
        self.index = group.names.index(clock.name)
        self.clock = clock
        self.device = device
        self.recorder = recorder
        self.calls = 0  # that this rank has made
        self.growths = 0
        self.growth_seconds = 0.0
        self._group = group

    @property
    def reserved(self) -> int:
        return self.device.symmetric.reserved

    def all_gather(
        self,
        source: Buffer,
        target: Buffer,
        size: int | None = None,
        *,
        times: int = 1,
        timeout: float | None = None,
        label: str = "",
    ) -> Event:
        size = source.size if size is None else size
        check_gather(len(self.names), source, target, size, times)
        buffers = []
        for buffer in (source, target):
            if not isinstance(buffer, SimBuffer) or not self.device.owns(buffer):
                raise RegistrationError(
                    f"{buffer!r} is not allocated on {self.device.name}; gather what allocate returns"
                )
            buffers.append(buffer)
        return self._call(size, timeout, label, buffers, times)

    def reserve(self, size: int, *, timeout: float | None = None) -> Event:
        if size <= 0:
            raise ValueError(f"size={size} must be > 0")
        return self._call(size, timeout, "", [], 1)

    def close(self) -> None:
        """Leave the group, which breaks it: the calls of all others fail with `PeerLost` when they notice."""
        self._group.leave(self.clock.name)

    def _call(self, size: int, timeout: float | None, label: str, buffers: list[SimBuffer], times: int) -> Event:
        timeout = times * self._group.library.timeout if timeout is None else timeout
        if not timeout > 0:
            raise ValueError(f"timeout={timeout} must be > 0")
        event = self.clock.event()
        event.defused = True  # a rank may leave while its call is under way
        self._group.call(_Request(self, size, event, self.clock.now, timeout, label, buffers, times))
        return event


@dataclass(eq=False)
class _Request:
    """One rank's part in a call, from that call to its end."""

    member: SimGroup
    size: int  # bytes of a rank's piece, or of the reservation
    event: Event
    submitted: float
    timeout: float
    label: str
    buffers: list[SimBuffer]  # source and target; empty: it reserves
    times: int

    @property
    def kind(self) -> str:
        if not self.buffers:
            return "reserve"
        return "symmetric" if self.buffers[1].pool == SYMMETRIC else "plain"

    @property
    def over(self) -> bool:
        return self.event.triggered or self.member.clock.stopped

    def release(self) -> None:
        for buffer in self.buffers:
            buffer.release()


@dataclass(eq=False)
class _Call:
    """One collective, by the requests of the ranks that have made it.  Each rank numbers its calls."""

    requests: dict[str, _Request] = field(default_factory=dict)
    flows: list[Flow] = field(default_factory=list)
    left: int = 0  # flows that have not ended
    began: float | None = None  # when all ranks had made it and the one before was over
    busy: float = 0.0  # until when it keeps the hosts, whatever its flows do
    done: bool = False

    @property
    def one(self) -> _Request:
        return next(iter(self.requests.values()))


class SharedGroup:
    """What the members of a group share."""

    def __init__(self, fabric: Fabric, library: Collective, names: tuple[str, ...]) -> None:
        self.names = names
        self.library = library
        self.members: dict[str, SimGroup] = {}
        self.left: tuple[str, float] | None = None  # who broke the group, and when
        self._name = "+".join(names)
        self._fabric = fabric
        self._clock = fabric.clock
        self._calls: dict[int, _Call] = {}  # that are not over, by number
        self._turn = 0  # the number of the call that is served now, or next
        self._ended = -1.0  # when the call before was over
        self._ways: dict[tuple[str, bool], tuple[CollectiveModel, tuple[Path, ...]]] = {}
        for kind in ("plain", "symmetric"):  # a machine without a way has no group
            self._way(kind, 1)

    def _way(self, kind: str, times: int) -> tuple[CollectiveModel, tuple[Path, ...]]:
        # What a gather costs, and the ways of its bytes.  Those of a forward's layers are queued on a stream.  A
        # ring has a flow from every rank to the next at the rate of the model, direct copies one between any two at
        # a share of it.  Copies through staging buffers pass the target's memory once more each.
        queued = times > 1 or self.library.timing == "device"
        if (kind, queued) in self._ways:
            return self._ways[kind, queued]
        model = self.library.plain if kind == "plain" else self.library.symmetric
        model = model.queued() if queued else model
        names, topology, ends, paths = self.names, self._fabric.topology, self._fabric.endpoints, []
        if model.pattern == "ring":
            pairs = [*zip(names, (*names[1:], names[0]), strict=True)] if len(names) > 1 else []
        else:
            pairs = [(one, other) for one in names for other in names if one != other]
        cap = model.rate if model.pattern == "ring" else model.rate / max(1, len(names) - 1)
        for one, other in pairs:
            route = topology.route(model.path, ends[one].site, ends[other].site)
            copies = (topology.memory(ends[other].site),) * model.copies
            paths.append(self._fabric.network.path((*route.links, *copies), cap))
        self._ways[kind, queued] = model, tuple(paths)
        return self._ways[kind, queued]

    def call(self, request: _Request) -> None:
        member = request.member
        if self.left is not None:
            self._lose(request)
            return
        call = self._calls.setdefault(member.calls, _Call())
        member.calls += 1
        call.requests[member.clock.name] = request
        for buffer in request.buffers:
            buffer.hold()
        self._clock.call_at(request.submitted + request.timeout, self._expire, request)
        self._advance()

    def leave(self, name: str) -> None:
        # Flows stop, nothing lands any more, and the requests of the others fail after `DETECTION`.  A group stays
        # broken, as those of NCCL do: ranks that go on make a new one.
        if self.left is not None:
            return
        self.left = name, self._clock.now
        for call in self._calls.values():
            call.done = True
            for flow in call.flows:
                self._fabric.network.abort(flow)
            for request in call.requests.values():
                request.release()
                if request.member.clock.name != name:
                    self._lose(request)
                elif not request.over:
                    self._fail(request, TransferFailed(f"{name} left the group during the call"), call.began)
        self._calls.clear()

    def _advance(self) -> None:
        call = self._calls.get(self._turn)
        if call is None or call.began is not None or len(call.requests) < len(self.names):
            return
        call.began = self._clock.now
        if len({(request.kind, request.size, request.times) for request in call.requests.values()}) > 1:
            said = ", ".join(f"{name} {r.kind} of {r.size} bytes" for name, r in sorted(call.requests.items()))
            error: TransferError | None = InvalidBatch(
                f"the ranks of a group must call alike, got {said}; pad to the longest"
            )
        else:
            error = self._reserve(call) if call.one.kind == "reserve" else self._gather(call)
        if error is not None:
            self._finish(call, error)

    def _gather(self, call: _Call) -> TransferError | None:
        kind, times, now = call.one.kind, call.one.times, self._clock.now
        owners = {request.member.device.symmetric.owner for request in call.requests.values()}
        if kind == "symmetric" and owners != {self}:
            return RegistrationError(f"symmetric memory here was reserved by another group than {self._name}")
        model, _ = self._way(kind, times)
        grown = kind == "symmetric" and call.one.member.growths > 0
        call.busy = now + model.busy(paused=now > self._ended, grown=grown)
        self._clock.call_at(now + times * model.before(len(self.names), call.one.size), self._carry, call)
        return None

    def _carry(self, call: _Call) -> None:
        # Ring neighbours exchange all pieces but their own; direct peers send each other one piece.
        if call.done:
            return
        size = call.one.size * call.one.times
        model, paths = self._way(call.one.kind, call.one.times)
        share = size * (len(self.names) - 1) if model.pattern == "ring" else size
        call.left = len(paths)
        if not paths:  # a rank alone
            self._complete(call)
        call.flows = [self._fabric.network.start(path, share, self._on_carried, call) for path in paths]

    def _on_carried(self, call: _Call) -> None:
        call.left -= 1
        if not call.left:
            self._complete(call)

    def _complete(self, call: _Call) -> None:
        if call.done:
            return
        if call.busy > self._clock.now:
            self._clock.call_at(call.busy, self._complete, call)
            return
        size, ranks = call.one.size, len(self.names)
        for request in call.requests.values():
            if not request.member.device.holds_bytes or request.over:
                continue
            whole = request.buffers[1].touch()
            for index, name in enumerate(self.names):
                source, target = call.requests[name].buffers
                for start, end in repeated(ranks, source, target, size, call.one.times):
                    place = end + index * size
                    whole[place : place + size] = source.contents[start : start + size]
        self._finish(call)

    def _finish(self, call: _Call, error: TransferError | None = None) -> None:
        call.done = True
        del self._calls[self._turn]
        self._turn += 1
        self._ended = self._clock.now
        for request in call.requests.values():
            request.release()
            if request.over:
                continue
            if error is not None:
                self._fail(request, error, call.began)
            else:
                request.event.succeed(self._record(request, call.began, "ok"))
        self._advance()

    def _reserve(self, call: _Call) -> TransferError | None:
        size = call.one.size
        members = [request.member for request in call.requests.values()]
        pools = [member.device.symmetric for member in members]
        if any(pool.owner not in (None, self) for pool in pools):
            return RegistrationError(f"the symmetric pool of a rank of {self._name} belongs to another group")
        if not self.library.grow and any(pool.reserved for pool in pools):
            return OutOfMemory(
                f"the symmetric pool has {format_size(pools[0].reserved)} and may not grow by {format_size(size)} "
                f"(collective.grow=false); reserve more at the start with collective.pool"
            )
        for taken, pool in enumerate(pools):
            try:
                pool.reserve(size)
            except OutOfMemory as error:
                for other in pools[:taken]:
                    other.give_back()
                return error
        seconds = len(self.names) * self.library.grow_latency + size / self.library.grow_rate
        for pool in pools:
            pool.owner = self
        for member in members:
            member.device.compute(seconds)  # the allocation waits for the device, and it for that
        self._clock.call_at(self._clock.now + seconds, self._reserved, call)
        return None

    def _reserved(self, call: _Call) -> None:
        if call.done:
            return
        for request in call.requests.values():
            member = request.member
            if member.reserved > request.size:
                member.growths += 1
                member.growth_seconds += self._clock.now - request.submitted
        self._finish(call)

    def _expire(self, request: _Request) -> None:
        if request.over or self.left is not None:
            return
        waiting = sorted(set(self.names) - {n for c in self._calls.values() for n in c.requests})
        late = f"; {', '.join(waiting)} had not called" if waiting else ""
        error = TransferTimeout(f"a collective of {self._name} is not over after {request.timeout:g} s{late}")
        began = next((call.began for call in self._calls.values() if request in call.requests.values()), None)
        self._fail(request, error, began)
        self.leave(request.member.clock.name)

    def _lose(self, request: _Request) -> None:
        assert self.left is not None
        name, at = self.left

        def fail(_: None) -> None:
            if not request.over:
                self._fail(request, PeerLost(f"{name} has left the group {self._name}"), None)

        self._clock.call_at(max(self._clock.now, at + DETECTION), fail, None)

    def _fail(self, request: _Request, error: TransferError, began: float | None) -> None:
        self._record(request, began, type(error).__name__)
        request.event.fail(error)

    def _record(self, request: _Request, began: float | None, status: str) -> TransferRecord:
        # A collective is prepared when it is submitted and posted when it *began*, which is when the last rank came.
        # ``nbytes`` are those that a rank has at the end, ``descriptors`` the number of ranks.
        now, ranks = self._clock.now, len(self.names)
        nbytes = request.size * request.times * (ranks if request.buffers else 1)
        engine = f"model:{self.library.name}:{request.kind}"
        operation = "all_gather" if request.buffers else "reserve"
        times = request.submitted, request.submitted, now if began is None else began, now, now
        name = request.member.clock.name
        record = TransferRecord(engine, operation, self._name, name, nbytes, ranks, *times, status, request.label)
        request.member.recorder.transfer(record)
        return record
