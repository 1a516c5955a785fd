# SPDX-License-Identifier: Apache-2.0
"""The open-loop client: every request is sent at its time in the trace, also while earlier ones go on.

A client that is slow would be measured as a slow server.  So prompts are encoded before they are due, the garbage
collector is off while requests are under way, and how late requests were sent is kept with each (`RequestRow.sent`).
"""

import asyncio
import gc
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from backends.live.http import RequestFailed
from backends.live.routes import RequestRoute, RequestRow
from pdsim.serving.workload import HASHED, Request

LEAD = 0.25  # seconds from the start of the clock to the first possible arrival
AHEAD = 64 << 20  # bytes of prompts that are made before they are due
SPARE = 0.02  # seconds before an arrival in which no prompt is made
Prompt = Callable[[int, Request], bytes]
Ids = npt.NDArray[np.int64]


async def replay(
    requests: Sequence[Request],
    route: RequestRoute,
    opened: Any,
    prompt: Prompt,
    connections: int,
    timeout: float,
    ended: Callable[[float, int, RequestRow], None] = lambda *_: None,
) -> tuple[float, list[RequestRow]]:
    """Send *requests* as they arrive; return the time at which the first could arrive, and a row for each.

    A request that finds all *connections* taken waits, and its latencies count from its arrival all the same; one
    that has not ended *timeout* seconds after that has failed.  Prompts are made ahead, by *prompt*, in the pauses.
    *opened* is the session that they are sent in.  *ended* is called with that time, the number of a request and its
    row as soon as it has ended.
    """
    loop = asyncio.get_running_loop()
    slots = asyncio.Semaphore(max(1, connections // route.connections))
    rows = [RequestRow() for _ in requests]
    ahead = _Ahead(requests, prompt)
    tasks: list[asyncio.Task[None]] = []
    while not ahead.full:
        ahead.make()
    with _uncollected():
        start = loop.time() + LEAD
        for number, request in enumerate(requests):
            while not ahead.full and start + request.arrival - loop.time() > SPARE:
                ahead.make()
                await asyncio.sleep(0)
            if (wait := start + request.arrival - loop.time()) > 0:
                await asyncio.sleep(wait)
            served = _one(request, rows[number], route, opened, ahead.take(), slots, start, timeout)
            tasks.append(loop.create_task(_then(served, partial(ended, start, number, rows[number]))))
        await asyncio.gather(*tasks)
    return start, rows


async def _then(served: Coroutine[Any, Any, None], ended: Callable[[], None]) -> None:
    await served
    ended()


async def _one(
    request: Request,
    row: RequestRow,
    route: RequestRoute,
    opened: Any,
    body: bytes,
    slots: asyncio.Semaphore,
    start: float,
    timeout: float,
) -> None:
    # A user with less patience than the timeout leaves when it is over, which is the status ``Aborted``.
    loop = asyncio.get_running_loop()
    patience = request.patience if request.patience is not None and request.patience < timeout else None
    try:
        async with asyncio.timeout_at(start + request.arrival + (timeout if patience is None else patience)), slots:
            row.sent = loop.time()
            await route.serve(opened, body, request, row)
            row.status = "ok"
    except TimeoutError:
        if patience is not None:
            row.status = f"Aborted: the user left after {patience:g} s"
        else:
            row.status = f"Timeout: {row.tokens} of {request.output} tokens within {timeout:g} s"
    except RequestFailed as error:
        row.status = str(error)


class _Ahead:
    """Prompts that are made before they are due, at most `AHEAD` bytes of them."""

    def __init__(self, requests: Sequence[Request], prompt: Prompt) -> None:
        self._requests, self._prompt = requests, prompt
        self._made: deque[bytes] = deque()
        self._size = self._next = 0

    @property
    def full(self) -> bool:
        return self._size >= AHEAD or self._next == len(self._requests)

    def make(self) -> None:
        body = self._prompt(self._next, self._requests[self._next])
        self._next += 1
        self._size += len(body)
        self._made.append(body)

    def take(self) -> bytes:
        if not self._made:
            self.make()
        body = self._made.popleft()
        self._size -= len(body)
        return body


@contextmanager
def _uncollected() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()


WORDS = ("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not")
"""Frequent words; most tokenizers make one token of each."""


def token_ids(request: Request, number: int, seed: int, vocabulary: int) -> Ids:
    """Return the prompt of the *number*-th request: ``request.input`` ids, int64.

    A block that `Request.hash_ids` names depends on its id and *seed* only; the rest also on *number*. The lower
    sixteenth of *vocabulary* is left out: special tokens are there.
    """
    low = vocabulary // 16
    names = islice(request.hash_ids, -(-request.input // HASHED))
    blocks = [_drawn(seed, "block", name, HASHED, low, vocabulary) for name in names]
    rest = request.input - HASHED * len(blocks)
    if rest > 0:
        blocks.append(_drawn(seed, "request", number, rest, low, vocabulary))
    return np.concatenate(blocks)[: request.input]


def encoded(request: Request, number: int, seed: int, vocabulary: int, prompts: str) -> bytes:
    """Return the prompt as JSON: a list of ids, or with *prompts* ``"text"`` a string of as many words."""
    ids = token_ids(request, number, seed, vocabulary).tolist()
    if prompts == "text":
        return msgspec.json.encode(" ".join(WORDS[one % len(WORDS)] for one in ids))
    return msgspec.json.encode(ids)


def _drawn(seed: int, kind: str, name: int, count: int, low: int, high: int) -> Ids:
    entropy = [seed, *kind.encode(), *divmod(name & (1 << 64) - 1, 1 << 32)]
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy))).integers(low, high, count)
