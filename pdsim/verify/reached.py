# SPDX-License-Identifier: Apache-2.0
"""What a scenario reached: transitions of the protocol's state diagrams, and its messages, counted by name.

The diagrams are those of `PrefillRequest`, `DecodeRequest` and `Status`; ``over`` is when a scheduler lets a room
go.  What no scenario reaches, no invariant has checked.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pdsim.kv import messages, push
from pdsim.kv.messages import Status
from pdsim.serving.decode import DecodeRequest
from pdsim.serving.prefill import PrefillRequest
from pdsim.serving.rank_process import Room

DIAGRAMS = {
    "prefill": "waiting>queued queued>running running>over running>kept kept>over kept>revoked revoked>over "
    "waiting>failed queued>failed running>failed failed>over",
    "decode": "reserved>arrived arrived>ready ready>running running>over running>preempted preempted>running "
    "preempted>over reserved>failed failed>over",
    "slot": "new>waiting new>given waiting>given waiting>over given>arrived given>scattering "
    "arrived>scattering arrived>over given>over scattering>over",
    "sender": "WAITING>TRANSFERRING TRANSFERRING>SUCCESS WAITING>FAILED TRANSFERRING>FAILED",
}
"""The transitions of each diagram, as ``from>to``."""

MESSAGES = tuple(sorted(kind.__name__ for kind in messages.KvMessage.__subclasses__()))
"""The kinds of messages."""


class Rooms(dict[int, Room]):
    """The rooms of a scheduler, which tells *entered* of those that come, and *changes* of those that leave."""

    entered: Callable[[Room], None]
    changes: Callable[[Room, str], None]

    def __setitem__(self, number: int, room: Room) -> None:
        super().__setitem__(number, room)
        self.entered(room)

    def pop(self, number: int, *default: Any) -> Any:
        """Return room *number*, which is over."""
        room = super().pop(number, *default)
        if isinstance(room, Room):
            self.changes(room, "over")
        return room

    def __delitem__(self, number: int) -> None:
        self.pop(number)


def transition(room: Room, state: str) -> str:
    """Return the name of the transition of *room* to another *state*."""
    return f"{'prefill' if isinstance(room, PrefillRequest) else 'decode'} {room.state}>{state}"


@contextmanager
def counted(reached: Counter[str], changes: Callable[[Room, str], None]) -> Iterator[None]:
    """Tell *changes* of the transitions of all rooms of this process, while the block runs.

    Those of senders are counted in *reached*.
    """

    def set_state(room: Room, name: str, value: Any) -> None:
        if name == "state" and isinstance(room, PrefillRequest | DecodeRequest) and name in vars(room):
            changes(room, value)
        object.__setattr__(room, name, value)

    advanced = vars(push)["advance"]  # which a test may have replaced

    def sender(old: Status, new: Status) -> Status:
        status: Status = advanced(old, new)
        if status is not old:
            reached[f"sender {old.name}>{status.name}"] += 1
        return status

    Room.__setattr__ = set_state  # type: ignore[method-assign,assignment]
    vars(push)["advance"] = sender
    try:
        yield
    finally:
        del Room.__setattr__
        vars(push)["advance"] = advanced
