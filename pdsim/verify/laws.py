# SPDX-License-Identifier: Apache-2.0
"""Laws of simulation: what holds in every run, whatever is simulated; ``checks=on`` checks them while a run goes on.

`LAWS` names them; `docs/reliability.md` has the table.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from pdsim.core.errors import MessageError
from pdsim.kv.messages import Finished, Submit, decode
from pdsim.serving.decode import DecodeScheduler
from pdsim.serving.prefill import PrefillScheduler
from pdsim.serving.router import Router
from pdsim.sim.faults import Observer
from pdsim.transfer import Batch, TransferRecord
from pdsim.transfer.job import Outcome
from pdsim.verify import refuse_compiled

LAWS = {
    "capacity": "No link carries more than its capacity; no pool lends more than it has.",
    "bytes": "What is read and lands is what was posted, and no more; a transfer that succeeds has landed.",
    "tokens": "Prefill computes each input token once, in order; decode ends with input plus output.",
    "pages": "At every leader, free pages and owned pages are all pages.",
    "requests": "Every request that is sent out ends, once.",
    "causality": "The stages of a request follow each other, as do those of a transfer.",
    "names": "The order in which links, paths and flows are listed changes nothing.",
}
"""In the order of `docs/reliability.md`.  The last is about two runs, so no single run can check it."""

_ROUNDING = 1e-9
"""Share by which a mean utilisation may exceed 1: sums of many intervals are rounded."""

_INTERVAL = 1e-3
"""Seconds, at least, over which the use of links is looked at while a run goes on."""


class LawChecker(Observer):
    """Watches the jobs of one run, one after the other; `violations` has a line for each law that was broken.

    When bytes land it looks at what all links have carried.  Of schedulers it wraps the methods that plan a forward
    and that enter the batch, on the object; it changes nothing: a run has the same times with and without.
    """

    def __init__(self) -> None:
        refuse_compiled("checks=on")
        self.violations: list[str] = []
        self.landed_bytes = 0
        self._posted: dict[str, int] = {}  # by label: bytes
        self._moved: dict[tuple[str, str], int] = {}  # by verb and label
        self._rooms: dict[int, Submit] = {}
        self._computed: dict[int, int] = {}  # by room: tokens
        self._members: dict[str, Any] = {}
        self._network: Any = None
        self._since, self._carried = 0.0, [0.0]  # when links were looked at last, and the bytes of each until then

    def joined(self, member: Any) -> None:
        """Watch *member*, a rank's program; a router is the first of a new job, whose rooms are numbered anew."""
        if isinstance(member, Router):
            self._rooms, self._computed, self._members = {}, {}, {}
            device: Any = member.rank.device  # the model's
            self._network = device.network
            self._since, self._carried = member.rank.clock.now, self._network.carried()
            return
        self._members[member.rank.name] = member
        scheduler: Any = member.scheduler
        if isinstance(member.scheduler, PrefillScheduler):
            scheduler.next_forward = partial(self._planned, scheduler.next_forward, self._pieces_of(scheduler))
        elif isinstance(member.scheduler, DecodeScheduler):
            scheduler.batch.join = partial(self._entered, member, scheduler.batch.join)

    def sent(self, sender: str, receiver: str, payload: bytes) -> None:  # noqa: ARG002
        """Look at a control message."""
        try:
            message = decode(payload)
        except MessageError:
            return
        if isinstance(message, Submit):
            self._rooms[message.room] = message
        elif isinstance(message, Finished):
            self._finished(sender, message)

    def posted(self, batch: Batch, label: str) -> None:
        """Count what is to move."""
        self._posted[label] = self._posted.get(label, 0) + batch.nbytes

    def read(self, batch: Batch, label: str) -> None:
        """Count what is read."""
        self._move("read", batch, label)

    def landed(self, batch: Batch, label: str) -> None:
        """Count what lands."""
        self.landed_bytes += batch.nbytes
        self._move("stored", batch, label)
        if self._network is not None and self._network.clock.now - self._since >= _INTERVAL:
            self._look()

    def _look(self) -> None:
        now, before = self._network.clock.now, self._carried
        self._carried = self._network.carried()
        for link, carried, until in zip(self._network.links, self._carried, before, strict=False):
            most = link.nominal * (now - self._since)
            if carried - until > most + _ROUNDING * carried + 1.0:
                what = f"{carried - until:.0f} bytes from {self._since!r} to {now!r} s, of {most:.0f}"
                self._report("capacity", f"{link.name} carried {what}")
        self._since = now

    def _move(self, verb: str, batch: Batch, label: str) -> None:
        moved = self._moved[verb, label] = self._moved.get((verb, label), 0) + batch.nbytes
        if moved > self._posted.get(label, 0):
            what = f"{moved} bytes of {label!r} were {verb}, and {self._posted.get(label, 0)} posted"
            self._report("bytes", what)

    def _pieces_of(self, scheduler: Any) -> list[tuple[int, int]]:
        pieces: list[tuple[int, int]] = []
        seconds = scheduler.iteration_seconds

        def watch(planned: list[tuple[int, int]]) -> Any:
            pieces[:] = planned
            return seconds(planned)

        scheduler.iteration_seconds = watch
        return pieces

    def _planned(self, plan: Callable[[bool], Any], pieces: list[tuple[int, int]], ahead: bool = False) -> Any:
        # A room's first forward may begin after tokens that were cached; from there on, each token is computed
        # once, in order.
        forward = plan(ahead)
        for chunk, (context, tokens) in zip(forward.chunks if forward is not None else (), pieces, strict=False):
            before = self._computed.get(chunk.room, context)
            if context != before:
                what = f"room {chunk.room} is computed from token {context} on, and {before} were computed before"
                self._report("tokens", what)
            self._computed[chunk.room] = context + tokens
        return forward

    def _entered(self, member: Any, join: Callable[..., None], number: int, context: int, steps: int) -> None:
        request = self._rooms.get(number)
        if request is not None and context + steps != request.input + request.output:
            what = f"room {number} is decoded to {context + steps} tokens on {member.rank.name}, of "
            self._report("tokens", f"{what}{request.input} + {request.output}")
        join(number, context, steps)

    def _finished(self, sender: str, message: Finished) -> None:
        request = self._rooms.get(message.room)
        if request is None:
            self._report("requests", f"room {message.room} ended on {sender}, and was never sent out")
            return
        computed = self._computed.get(message.room, 0)
        if computed != request.input:
            what = f"room {message.room} is decoded with {computed} of {request.input} tokens computed"
            self._report("tokens", what)
        times = [(name, getattr(message, name)) for name in _PHASES]
        for (first, one), (then, other) in pairwise(times):
            if one > other:
                self._report("causality", f"room {message.room}: {then} at {other!r} s, before {first} at {one!r} s")
        for name, member in self._members.items():
            pool = None if member.scheduler is None else member.scheduler.pages.pool
            if pool is not None and not pool.is_whole():
                owned = sum(count for runs in pool.owners.values() for _, count in runs)
                self._report("pages", f"{name} has {pool.free} free and {owned} owned pages of {pool.pages}")

    def _report(self, law: str, what: str) -> None:
        self.violations.append(f"law of {law}: {what}")


_PHASES = ("noticed", "started", "prefilled", "arrived", "polled", "joined", "finished")
"""Times of `Finished` that follow each other in a pushed and in a pulled handoff."""

_STAGES = ("submitted", "prepared", "posted", "completed", "seen")


def broken(
    outcome: Outcome | None,
    requests: Mapping[str, Sequence[Any]],
    transfers: Sequence[TransferRecord],
    landed: int | None = None,
) -> Iterator[str]:
    """Yield a line for each law that the results of a run break.

    *requests* are columns of `pdsim.results.schema.REQUESTS`; *landed* is how many bytes have landed, if known.
    """
    for name, share in {**outcome.links, **outcome.pools}.items() if outcome is not None else ():
        if share > 1 + _ROUNDING:
            yield f"law of capacity: {name} was used to {share:.9f} of what it has"
    for number, status in enumerate(requests.get("status", ())):
        if not status:
            yield f"law of requests: request {number} never ended"
    for record in transfers:
        times = [getattr(record, name) for name in _STAGES]
        if times != sorted(times):
            yield f"law of causality: stages of {record.label!r} from {record.source} to {record.target}: {times}"
    moved = sum(one.nbytes for one in transfers if one.status == "ok" and one.operation in ("write", "read"))
    if landed is not None and moved > landed:
        yield f"law of bytes: transfers of {moved} bytes succeeded, {landed} bytes have landed"
