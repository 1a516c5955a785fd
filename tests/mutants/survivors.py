"""Changes that an earlier trial did not see: incomplete pages, lost failures, leaks, mixed-up incarnations."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace as changed
from simpy.events import Event

from pdsim.core.errors import TransferFailed
from pdsim.kv import messages
from pdsim.kv.messages import encode
from pdsim.kv.plan import cut
from pdsim.kv.push import KvSender
from pdsim.serving import router
from pdsim.serving.decode import DecodeScheduler
from pdsim.serving.deployment import epoch_of
from pdsim.serving.handoff.push import PushDecodeLeader, PushPrefillLeader
from pdsim.serving.prefill import PrefillScheduler
from pdsim.serving.prefill_worker import PrefillWorker
from pdsim.transfer import Transfer


def sends_incomplete_pages(original: Any, self: PrefillScheduler, room: Any, tokens: int) -> Any:
    """Send a page with the chunk that begins it, and not again with the one that completes it."""
    before = room.done
    chunk = original(self, room, tokens)
    first, end = (max(chunk.held, self.job.page_count(done)) for done in (before, room.done))
    return changed(chunk, first_page=first, runs=cut(room.runs, first - chunk.held, end - first))


def leaves_the_last(original: Any, self: PrefillScheduler, room: Any, tokens: int) -> Any:
    """Take a request of which one token is left for computed."""
    left = room.request.input - room.done - tokens
    return original(self, room, tokens + 1 if left == 1 else tokens)


def sends_before(original: Any, self: PrefillWorker, message: Any) -> Any:
    """Send chunks when their forward begins."""
    forward = original(self, message)
    self.mover.computed(message.chunks, True)
    forward.callbacks.pop()
    return forward


def frees_when_complete(original: Any, self: PushDecodeLeader, *arguments: Any) -> None:
    """Give the slot of metadata back when all has arrived, before the scheduler has read it."""
    complete = self._scheduler.complete
    before = len(complete)
    original(self, *arguments)
    for room in complete[before:]:
        self.slots.release(room.request.room)


def quiet_with_the_first(self: DecodeScheduler, _: str, message: Any) -> None:
    """Give pages back when one rank has forgotten the room."""
    if message.room not in self.rooms:
        self.engine.ignore()
        return
    self._drop(message.room)
    self.wake()


def failure_is_success(original: Any, self: KvSender, write: Any, event: Transfer) -> None:
    """Take a write that the engine reports as failed for done."""
    if event.ok or not isinstance(event.value, TransferFailed):
        original(self, write, event)
        return
    self._under_way -= 1
    write.state.moving -= 1
    self._over(write.state)


def counts_metadata_twice(self: KvSender, state: Any, last: messages.Arrival) -> None:
    """Count, in the message at the end of a room, the messages with metadata that went before it twice."""
    for name in state.writes:
        arrival = changed(last, count=1 + 2 * state.controls.get(name, 0))
        self._rank.channel.send(name, encode(arrival))


def one_page_late(original: Any, tokens: int, window: int, page_size: int) -> tuple[int, int]:
    """Begin a window one token late."""
    first = max(0, tokens - window + 1) // page_size
    return first, -(-tokens // page_size) - first


def never_ready_again(original: Any, self: PushPrefillLeader, rank: int, message: Any) -> None:
    """Do not become ready in a second incarnation."""
    if epoch_of(message.incarnation) < 2:
        original(self, rank, message)


def fails_all(original: Any, self: router.Router, incarnation: str, reason: str, formed: bool) -> None:
    """Fail the requests of all instances with the loss of one."""
    original(self, incarnation, reason, formed)
    for request in tuple(self._rooms.values()):
        self._fail(request, reason)


def proven_at_once(self: Any, peer: str) -> Event:
    """Say that nothing of a peer moves any more, without a proof."""
    return self._clock.event().succeed()
