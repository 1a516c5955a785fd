# SPDX-License-Identifier: Apache-2.0
"""Which prefill instance a room went to, asked of the bootstrap service where nobody said so."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from pdsim.core.clock import Clock
from pdsim.kv.messages import Submit

__all__ = ["PATIENCE", "RETRY", "RoomLookup"]

RETRY = 0.01
"""Seconds after which a room is asked for again that the service did not know.

Assumed: about an iteration of a decode scheduler, which is when SGLang's asks again.
"""

PATIENCE = 15.0
"""Seconds after which a room that nobody knows is given up; assumed: as long as SGLang's asks for a server."""


class RoomLookup:
    """Requests whose prefill instance is not known yet.

    *ask* is called with all rooms that have come since the last question, once that is answered; *found* with a
    request that names its instance, *lost* with one that the service has not known for `PATIENCE` seconds.

    One question is under way at a time; rooms that come meanwhile are in the next.  Used where ``query_dp`` leaves
    the choice of a prefill group to the engine.
    """

    def __init__(
        self,
        clock: Clock,
        ask: Callable[[tuple[int, ...]], None],
        found: Callable[[Submit], None],
        lost: Callable[[Submit], None],
    ) -> None:
        self._clock = clock
        self._ask = ask
        self._found = found
        self._lost = lost
        self._open: dict[int, Submit] = {}
        self._until: dict[int, float] = {}  # when to give up
        self._fresh: dict[int, None] = {}  # to be asked for, in order
        self._asked: tuple[int, ...] = ()  # the question that is not answered yet

    def __len__(self) -> int:
        """Return how many requests are open."""
        return len(self._open)

    def add(self, request: Submit) -> None:
        """Find out where *request* went; *found* or *lost* is called with it, unless it is dropped before."""
        self._open[request.room] = request
        self._until[request.room] = self._clock.now + PATIENCE
        self._again(request.room)

    def drop(self, room: int) -> bool:
        """Give *room* up; return whether it was open."""
        self._until.pop(room, None)
        self._fresh.pop(room, None)
        return self._open.pop(room, None) is not None

    def answer(self, lives: Mapping[int, str]) -> None:
        """Take note of where the rooms of the last question are.

        Those that are not in *lives* are not known yet: they are asked for again after `RETRY` seconds, and lost
        after `PATIENCE`.  The next question is asked at once, if rooms have come meanwhile.
        """
        asked, self._asked = self._asked, ()
        for room in asked:
            request = self._open.get(room)
            if request is None:
                continue
            if room in lives:
                self.drop(room)
                self._found(replace(request, prefill=lives[room]))
            elif self._clock.now >= self._until[room]:
                self.drop(room)
                self._lost(request)
            else:
                self._clock.call_at(self._clock.now + RETRY, self._again, room)
        self._next()

    def _again(self, room: int) -> None:
        """Have *room* be in the next question, which is asked now if none is under way."""
        if room in self._open:  # or it was dropped while its time to be asked for again came
            self._fresh[room] = None
            self._next()

    def _next(self) -> None:
        if self._fresh and not self._asked:
            self._asked = tuple(self._fresh)
            self._fresh.clear()
            self._ask(self._asked)
