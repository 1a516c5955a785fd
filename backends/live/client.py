# SPDX-License-Identifier: Apache-2.0
"""The open-loop client: every request is sent when the trace says, whatever became of those before.

Times are those of one clock, `time.monotonic`, in one process; a chunk's time is when its bytes
were read here.

A client that is slow would be measured as a slow server.  So prompts are encoded before they are
due, the garbage collector is off while requests are under way, and how late requests were sent is
kept with each (`RequestRow.sent`).
"""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NamedTuple

from backends.live.formats import reason
from backends.live.routes import LiveServer, RequestFailed, RequestRoute, RequestRow
from pdsim.serving.workload import Request

__all__ = ["Http", "Limits", "replay", "session"]

LEAD = 0.25
"""Seconds from the start of the clock to the first possible arrival."""

AHEAD = 64 << 20
"""Bytes of prompts that are made before they are due."""

SPARE = 0.02
"""Seconds before an arrival in which no prompt is made."""

Prompt = Callable[[int, Request], bytes]


class Limits(NamedTuple):
    """The client's limits.

    A request that waits for a connection is sent late, and one that takes too long has failed.
    """

    connections: int  # to all servers together
    timeout: float  # seconds from a request's arrival to its end


@asynccontextmanager
async def session(*, key: str, connections: int, connect_timeout: float) -> AsyncIterator[Any]:
    """Yield an aiohttp session of at most *connections* that sends *key*, if there is one, as the bearer's token.

    No connection is used twice: a server that closes an idle one just when a request is sent would fail that
    request.
    """
    import aiohttp

    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    connector = aiohttp.TCPConnector(limit=connections, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=headers, read_bufsize=1 << 20
    ) as opened:
        yield opened


class Http:
    """Posts bodies with an aiohttp session; a `backends.live.routes.Post`.

    An instance is made for each run, within `session`.  What goes wrong is a `RequestFailed` whose message is the
    status of the request: ``HTTP 503: ...``, ``Refused: ...`` or ``ServerLost: ...``.
    """

    def __init__(self, opened: Any) -> None:
        self._session = opened

    async def answer(self, server: LiveServer, path: str, body: bytes, name: str = "") -> bytes:
        """Return the whole answer.  Raise a `RequestFailed`."""
        with _failures(server):
            async with self._session.post(server.url + path, data=body, headers=_named(name)) as response:
                data: bytes = await response.read()
                _check(response.status, server, data)
                return data

    async def events(
        self, server: LiveServer, path: str, body: bytes, name: str = ""
    ) -> AsyncIterator[tuple[float, bytes]]:
        """Yield time and data of each server-sent event up to ``[DONE]``.  Raise a `RequestFailed`."""
        clock = asyncio.get_running_loop().time
        with _failures(server):
            async with self._session.post(server.url + path, data=body, headers=_named(name)) as response:
                if response.status != 200:
                    _check(response.status, server, await response.read())
                async for line in response.content:
                    if not line.startswith(b"data:"):
                        if line.startswith(b"error:"):  # llama.cpp
                            raise RequestFailed(
                                f"Error: {server.name}: {line[6:].decode(errors='replace').strip()[:200]}"
                            )
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    yield clock(), data


def _named(name: str) -> dict[str, str] | None:
    return {"X-Request-Id": name} if name else None


def _check(status: int, server: LiveServer, data: bytes) -> None:
    if status == 200:
        return
    import msgspec

    try:
        said = msgspec.json.decode(data)
    except (msgspec.MsgspecError, ValueError):
        said = data.decode(errors="replace")
    raise RequestFailed(f"HTTP {status}: {server.name}: {reason(said) or 'without a reason'}")


@contextmanager
def _failures(server: LiveServer) -> Iterator[None]:
    import aiohttp

    try:
        yield
    except (aiohttp.ClientError, ConnectionError, OSError, ValueError) as error:
        text = f"{type(error).__name__}: {error}".rstrip(": ")
        if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
            raise RequestFailed(f"Refused: {server.name} cannot be reached: {text}") from error
        if isinstance(error, TimeoutError):
            raise
        raise RequestFailed(f"ServerLost: {server.name} broke the connection: {text}") from error


async def replay(
    requests: Sequence[Request],
    route: RequestRoute,
    http: Http,
    prompt: Prompt,
    limits: Limits,
    progress: Callable[[int], None] = lambda _: None,
) -> tuple[float, list[RequestRow]]:
    """Send *requests* as they arrive; return the time at which the first could arrive, and a row for each.

    A request that finds all connections taken waits, and its latencies count from its arrival all the same.
    *progress* is called with the number of requests that have ended.

    *requests* are in order of arrival, in seconds after the start.  Prompts are made ahead, by *prompt*, in the
    pauses between arrivals.  The garbage collector is off meanwhile.  *limits* bound connections and the time of
    each request.
    """
    loop = asyncio.get_running_loop()
    slots = asyncio.Semaphore(max(1, limits.connections // route.connections))
    rows = [RequestRow() for _ in requests]
    ahead = _Ahead(requests, prompt)
    tasks: list[asyncio.Task[None]] = []
    ended = itertools.count(1)
    ahead.fill()
    with _uncollected():
        start = loop.time() + LEAD
        for number, request in enumerate(requests):
            while not ahead.full and start + request.arrival - loop.time() > SPARE:
                ahead.make()
                await asyncio.sleep(0)
            if (wait := start + request.arrival - loop.time()) > 0:
                await asyncio.sleep(wait)
            served = _one(request, rows[number], route, http, ahead.take(), slots, start, limits.timeout)
            task = loop.create_task(served)
            task.add_done_callback(lambda _: progress(next(ended)))
            tasks.append(task)
        await asyncio.gather(*tasks)
    return start, rows


async def _one(
    request: Request,
    row: RequestRow,
    route: RequestRoute,
    http: Http,
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
            await route.serve(http, body, request, row)
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

    def fill(self) -> None:
        while not self.full:
            self.make()

    def take(self) -> bytes:
        if not self._made:
            self.make()
        body = self._made.popleft()
        self._size -= len(body)
        return body


@contextmanager
def _uncollected() -> Iterator[None]:
    gc.collect()
    was = gc.isenabled()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was:
            gc.enable()
