# SPDX-License-Identifier: Apache-2.0
"""What a request is, many of them in columns, and the streams of random numbers that workloads are drawn from.

A workload makes requests (`pdsim.serving.workload`, `traces`, `sessions`), the router serves them, and results
have a row for each, in the same order.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from pdsim.transfer.compact import Compact

__all__ = ["HASHED", "Request", "RequestTable", "stream"]

HASHED = 512
"""Tokens of a block that one of a Mooncake trace's `hash_ids` names."""

_BLOCK = 1 << 14
"""Rows that are made at a time where all are read."""


class Request(NamedTuple):
    """One request.

    Tokens are counts, not ids.  A request of *output* 1 ends with its prefill.

    Sessions and traces with *after* are closed loops: such a request comes *arrival* seconds after the one it
    waits for has ended, whenever that is.
    """

    arrival: float  # seconds after the first could arrive
    input: int  # tokens
    output: int  # tokens, the first included
    patience: float | None = None  # seconds after its arrival at which its user leaves; None stays to the end
    hash_ids: tuple[int, ...] = ()  # of its prompt's blocks of `HASHED` tokens: equal ids are equal tokens
    after: int = -1  # the request whose end its user waits for; *arrival* is then the think time from there on
    priority: int = 0  # the higher goes first


class RequestTable(Sequence[Request], Compact):
    """Requests in columns: 24 bytes each, and those of what only some workloads have; equal to a list of them.

    Columns are arrays of one length, in the order of the requests: *arrival* and *patience* (seconds; NaN: stays),
    the *prompt* as `input` and *output* (tokens), *after*, *priority*.  Those that are None have `Request`'s
    default. *ends* and *hash_ids* are how many hashes there are up to the end of each request, and all of them.

    A million requests as tuples take 100 MB and more, here 24.  Reading a request makes it; a slice shares the
    columns.
    """

    def __init__(
        self,
        arrival: npt.NDArray[np.float64],
        prompt: npt.NDArray[np.int64],
        output: npt.NDArray[np.int64],
        *,
        patience: npt.NDArray[np.float64] | None = None,
        after: npt.NDArray[np.int64] | None = None,
        priority: npt.NDArray[np.int64] | None = None,
        ends: npt.NDArray[np.int64] | None = None,
        hash_ids: npt.NDArray[Any] | None = None,
    ) -> None:
        self.arrival = arrival
        self.input = prompt
        self.output = output
        self.patience = patience
        self.after = after
        self.priority = priority
        self.ends = ends
        self.hash_ids = hash_ids

    @classmethod
    def of(cls, requests: Iterable[Request]) -> RequestTable:
        """Return *requests*, read one by one; themselves if they are a table.

        Columns in which all requests have the default become None.  Hashes of more than 63 bits, which some
        traces have, are kept as Python's numbers.
        """
        if isinstance(requests, RequestTable):
            return requests
        arrival, patience = array("d"), array("d")
        given, wanted, after, priority, ends = (array("q") for _ in range(5))
        hashes: list[int] | array[int] = array("q")
        for one in requests:
            arrival.append(one.arrival)
            given.append(one.input)
            wanted.append(one.output)
            patience.append(np.nan if one.patience is None else one.patience)
            after.append(one.after)
            priority.append(one.priority)
            try:
                hashes.extend(one.hash_ids)
            except OverflowError:  # a trace may have names of more than 63 bits
                hashes = [*hashes[: ends[-1] if ends else 0], *one.hash_ids]
            ends.append(len(hashes))
        waits, names = (
            np.array(patience, np.float64),
            np.array(hashes, object if isinstance(hashes, list) else np.int64),
        )
        ranks, follows = np.array(priority, np.int64), np.array(after, np.int64)
        return cls(
            np.array(arrival, np.float64),
            np.array(given, np.int64),
            np.array(wanted, np.int64),
            patience=None if np.isnan(waits).all() else waits,
            after=follows if (follows >= 0).any() else None,
            priority=ranks if ranks.any() else None,
            ends=np.array(ends, np.int64) if len(names) else None,
            hash_ids=names if len(names) else None,
        )

    def but(self, **columns: npt.NDArray[Any] | None) -> RequestTable:
        """Return the same requests with other *columns*; the arrays of the others are shared.

        Columns are named as the attributes, such as ``arrival``; each must have the table's length, but for
        ``hash_ids``, or be None.
        """
        own = {"prompt" if name == "input" else name: values for name, values in vars(self).items()}
        return RequestTable(**(own | columns))

    def taken(self, which: npt.NDArray[Any]) -> RequestTable:
        """Return the requests for which *which* is true, in order; ``after`` still counts in the old order."""
        places = np.flatnonzero(which)
        if len(places) and places[-1] - places[0] + 1 == len(places):
            return self[int(places[0]) : int(places[-1]) + 1]
        optional = {
            name: None if (values := getattr(self, name)) is None else values[places]
            for name in ("patience", "after", "priority")
        }
        found = RequestTable(self.arrival[places], self.input[places], self.output[places], **optional)
        if self.ends is not None and self.hash_ids is not None:
            spans = [self.blocks(place) for place in places.tolist()]
            found.ends = np.cumsum([len(span) for span in spans], dtype=np.int64)
            flat = [one for span in spans for one in span]
            found.hash_ids = np.array(flat, self.hash_ids.dtype)
        return found

    def blocks(self, number: int) -> tuple[int, ...]:
        """Return the hashes of the blocks of request *number*."""
        if self.ends is None or self.hash_ids is None:
            return ()
        first = int(self.ends[number - 1]) if number else 0
        return tuple(self.hash_ids[first : int(self.ends[number])].tolist())

    def _spans(self, first: int, end: int) -> list[tuple[int, ...]]:
        """Return `blocks` of the requests from *first* to before *end*, from one look at either column."""
        assert self.ends is not None
        assert self.hash_ids is not None
        before = int(self.ends[first - 1]) if first else 0
        ends = (self.ends[first:end] - before).tolist()
        hashes = tuple(self.hash_ids[before : before + ends[-1]].tolist())
        return [hashes[start:stop] for start, stop in zip([0, *ends], ends, strict=False)]

    def plain(self) -> list[list[float]]:
        """Return rows of arrival, input and output: what a router is given.

        Its other arguments (patience, hashes, *after*, priorities) are read from the columns, where there are
        any.
        """
        columns = self.arrival.tolist(), self.input.tolist(), self.output.tolist()
        return [list(row) for row in zip(*columns, strict=True)]

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.arrival)

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests, made as they are read."""
        for first in range(0, len(self), _BLOCK):
            part = slice(first, first + _BLOCK)
            size = len(self.arrival[part])
            patience = [None] * size if self.patience is None else map(_or_none, self.patience[part].tolist())
            after = [-1] * size if self.after is None else self.after[part].tolist()
            priority = [0] * size if self.priority is None else self.priority[part].tolist()
            blocks = [()] * size if self.ends is None else self._spans(first, first + size)
            numbers = (column[part].tolist() for column in (self.arrival, self.input, self.output))
            yield from (Request(*row) for row in zip(*numbers, patience, blocks, after, priority, strict=True))

    @overload
    def __getitem__(self, index: int) -> Request: ...
    @overload
    def __getitem__(self, index: slice) -> RequestTable: ...
    def __getitem__(self, index: int | slice) -> Request | RequestTable:
        """Return a request, or a table of them."""
        if isinstance(index, int):
            number = range(len(self))[index]
            patience = None if self.patience is None else _or_none(float(self.patience[number]))
            after = -1 if self.after is None else int(self.after[number])
            priority = 0 if self.priority is None else int(self.priority[number])
            numbers = float(self.arrival[number]), int(self.input[number]), int(self.output[number])
            return Request(*numbers, patience, self.blocks(number), after, priority)
        if index.step not in (None, 1):
            return RequestTable.of([self[number] for number in range(len(self))[index]])
        own: dict[str, Any] = {
            name: None if column is None else column[index] for name, column in vars(self).items()
        }
        own["prompt"] = own.pop("input")
        if self.ends is not None and self.hash_ids is not None:
            first = range(len(self))[index].start
            before = int(self.ends[first - 1]) if first else 0
            last = int(own["ends"][-1]) if len(own["ends"]) else before
            own |= {"ends": own["ends"] - before, "hash_ids": self.hash_ids[before:last]}
        return RequestTable(**own)

    def __eq__(self, other: object) -> bool:
        """Compare with any sequence of requests, one by one."""
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(_equal, self, other))

    __hash__ = None  # type: ignore[assignment]  # an array can change

    def __repr__(self) -> str:
        return f"<RequestTable of {len(self)} requests>"


def _or_none(value: float) -> float | None:
    return None if value != value else value


def _equal(one: Request, other: object) -> bool:
    return one == other


def stream(seed: int, name: str) -> np.random.Generator:
    """Return the stream of random numbers called *name*: the same for one seed and name, whatever else is drawn.

    The name's bytes are part of the seed sequence, so two names never share numbers.

    >>> stream(0, "a").random() == stream(0, "a").random(), stream(0, "a").random() == stream(0, "b").random()
    (True, False)
    """
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *name.encode()])))
