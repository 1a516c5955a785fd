# SPDX-License-Identifier: Apache-2.0
"""What a router knows of the requests that it is given, from their arrival until they are over.

A request is an object only while it is under way: those to come are made of rows when they arrive, those that are
over are rows of a `RequestLog`.  So a run of millions has as many objects as requests are served at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

from pdsim.kv.messages import Finished, Submit
from pdsim.serving.requests import RequestTable

__all__ = ["ComingRequests", "RoutedRequest"]


@dataclass(slots=True)
class RoutedRequest:
    """What the router knows of a request.

    Life: made when it arrives; each try has a *room* and two lives, *prefill* and *decode*; *answered* and
    *prefilled* say how far it is, *finished* has its times; *status* is set once, when it is over.  *lost* and
    *asked* are set between the loss of an instance and the answer of the other.
    """

    arrival: float
    input: int
    output: int
    patience: float | None = None  # of its user
    blocks: tuple[int, ...] = ()  # hashes of its prompt's, where prefixes are cached
    priority: int = 0
    number: int = 0  # its place in the list
    room: int = 0  # a new one each time that it is sent out
    tries: int = 0
    prefill: str = ""  # life
    decode: str = ""  # life
    nbytes: int = 0
    answered: bool = False  # prefill has computed it, and decode is asked to pull it
    prefilled: bool = False
    counted: bool = False  # among the tokens outstanding
    expected: int = 0  # tokens of its output that are counted
    lost: str = ""  # why it cannot go on; its other instance is asked whether it can start anew
    asked: str = ""  # the leader of that
    status: str = ""  # "" while it is under way
    finished: Finished | None = None

    def submission(self) -> Submit:
        """Return the message that sends this request to its two lives."""
        return Submit(self.room, self.input, self.output, self.prefill, self.decode)


class ComingRequests(Sequence[RoutedRequest]):
    """The requests that a router is given, each made when it is asked for: a new one each time.

    *rows* are arrival in seconds, input and output in tokens; *leaves*, *blocks* and *priorities* are those of
    the router's program, and empty where no request has any.
    """

    def __init__(
        self,
        rows: Sequence[Sequence[float]],
        leaves: Sequence[Sequence[float]],
        blocks: Sequence[Sequence[int]],
        priorities: Sequence[int],
    ) -> None:
        self._rows = rows
        self._leaves = {int(which): patience for which, patience in leaves}
        self._blocks = blocks
        self._priorities = priorities

    def most(self) -> tuple[int, int]:
        """Return the most tokens of any prompt, and of any output; 1 if there are no requests."""
        rows = self._rows
        if isinstance(rows, RequestTable) and len(rows):
            return int(rows.input.max()), int(rows.output.max())
        return max((int(row[1]) for row in rows), default=1), max((int(row[2]) for row in rows), default=1)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> RoutedRequest: ...
    @overload
    def __getitem__(self, index: slice) -> list[RoutedRequest]: ...
    def __getitem__(self, index: int | slice) -> RoutedRequest | list[RoutedRequest]:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        rows = self._rows
        if isinstance(rows, RequestTable):  # not by its rows, whose hashes would be most of the work
            arrival, given, wanted = float(rows.arrival[index]), int(rows.input[index]), int(rows.output[index])
        else:
            first, *lengths = rows[index][:3]
            arrival, (given, wanted) = first, map(int, lengths)
        blocks = tuple(self._blocks[index]) if self._blocks else ()
        priority = self._priorities[index] if self._priorities else 0
        return RoutedRequest(
            arrival, given, wanted, self._leaves.get(index), blocks, priority, range(len(self))[index]
        )
