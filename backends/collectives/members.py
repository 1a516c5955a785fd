# SPDX-License-Identifier: Apache-2.0
"""The ranks of a group: who has said hello, what each is about to do, who has left, and who has died.

What ranks tell each other goes over their control channels, in order, so a rank hears of another's calls in the
order in which that one makes them.  A message may come before this rank has begun the call that it is about: intents
are kept by the number of the call until it is over.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from backends.base.processes import is_dead
from backends.base.zmq_channel import ZmqChannel
from backends.collectives.base import TOPIC, Bye, GatherCall, Hello, Intent, encode

__all__ = ["Members"]


class Members:
    """What one rank knows of the members of its group.

    Attributes:
        names: All members, in the order of their pieces in a gathered buffer.
        others: All but this rank.
        title: The names joined by plus signs, for messages and records.
        hello: What each other rank has said of itself, by name; empty at the start.
        intents: By number of a call, what each rank, this one included, is about to do.
        done: By number of a reservation, whether each rank has its memory.
        gone: The others that have left in order.
    """

    def __init__(self, names: tuple[str, ...], rank: str, channel: ZmqChannel) -> None:
        self.names = names
        self.others = [name for name in names if name != rank]
        self.title = "+".join(names)
        self.hello: dict[str, Hello] = {}
        self.intents: dict[int, dict[str, Intent]] = defaultdict(dict)
        self.done: dict[int, dict[str, Intent]] = defaultdict(dict)
        self.gone: dict[str, Bye] = {}
        self._rank = rank
        self._channel = channel

    @property
    def complete(self) -> bool:
        """Whether every other rank has said hello."""
        return len(self.hello) == len(self.others)

    def tell(self, message: Any) -> None:
        """Send *message* to all other members, in the order of all that is sent to them."""
        for name in self.others:
            self._channel.tell(name, TOPIC, encode(message))

    def tell_intent(self, intent: Intent) -> None:
        """Say to the others, and note for this rank, what it is about to do or has done."""
        (self.done if intent.done else self.intents)[intent.number][self._rank] = intent
        self.tell(intent)

    def forget(self, call: GatherCall) -> None:
        """Drop what was said about *call*, which is over."""
        self.intents.pop(call.number, None)
        self.done.pop(call.number, None)

    def missing_from(self, call: GatherCall | None) -> str:
        """Return why *call* can never be over, because a rank left before it; or nothing.

        A rank that says goodbye has taken part in as many calls as it says, so only later ones suffer.
        """
        for name, bye in self.gone.items():
            if call is not None and call.number >= bye.calls:
                return f"{name} has left the group {self.title}: {bye.why}"
        return ""

    def dead(self) -> str:
        """Return the name of a rank whose process has ended without a goodbye; or nothing."""
        return next((n for n, hello in self.hello.items() if n not in self.gone and is_dead(hello.identity)), "")

    def late_for(self, call: GatherCall) -> list[str]:
        """Return the ranks that *call* waits for.

        Those that never said hello, or if all have, those that did not announce the call.
        """
        unheard = [name for name in self.others if name not in self.hello]
        return unheard or [name for name in self.others if call.announced and name not in self.intents[call.number]]
