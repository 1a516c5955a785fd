# SPDX-License-Identifier: Apache-2.0
"""Routes of requests: the servers that each visits, and their order.

`Direct` sends it to one server.  `VllmPair` does what vLLM's proxy does: the prompt to prefill with
one token to generate, then the same prompt with the parameters that prefill returned to decode.
`SglangPair` does what SGLang's router does: the prompt to both sides at once, with one
``bootstrap_room``.

A route knows no HTTP: it posts with a `Post`, so that it can be tested without servers, and reads
answers with a `backends.live.formats.Format`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit
from uuid import uuid4

import msgspec

from backends.live.formats import Format, reason
from pdsim.serving.workload import Request

__all__ = ["Direct", "LiveServer", "Post", "RequestFailed", "RequestRoute", "RequestRow", "SglangPair", "VllmPair"]


class RequestFailed(Exception):
    """A request that ended without all its tokens; the message is its status."""


@dataclass(slots=True)
class RequestRow:
    """The outcome of a request; times are seconds on the client's clock.

    *gaps* and *sizes* have one entry for each chunk with tokens but the first; a time is None if that never came.
    """

    prefill: str = ""
    decode: str = ""
    status: str = ""
    sent: float | None = None
    prefilled: float | None = None  # when prefill's answer was there
    first: float | None = None  # token
    last: float | None = None
    tokens: int = 0
    gaps: list[float] = field(default_factory=list)  # between chunks with tokens
    sizes: list[int] = field(default_factory=list)  # tokens in each chunk but the first
    finish: str = ""
    reported: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class LiveServer:
    """A server, and the tokens of the requests that it has, by the client's own account."""

    name: str  # of its role and number, such as "decode0"
    url: str  # without a path
    load: int = 0  # tokens of requests that are there now
    sent: int = 0  # requests so far


class Post(Protocol):
    """Sends a body to a server; every failure is a `RequestFailed`."""

    async def answer(self, server: LiveServer, path: str, body: bytes, name: str = "") -> bytes:
        """Return the whole answer.  *name*, if there is one, is what the server is to call the request."""

    def events(
        self, server: LiveServer, path: str, body: bytes, name: str = ""
    ) -> AsyncIterator[tuple[float, bytes]]:
        """Yield the data of each event of the stream that is the answer, with the time at which it was read."""


class RequestRoute(Protocol):
    """The way of a request.

    An object serves many requests at a time and keeps the account of load of its servers.
    """

    connections: int  # that a request holds at a time

    async def serve(self, post: Post, prompt: bytes, request: Request, row: RequestRow) -> None:
        """Have *request* served and fill in *row*.

        *prompt* is encoded JSON. What was seen before a failure stays in *row*. Raise a `RequestFailed` if it does
        not get all its tokens.
        """


def _choose(servers: Sequence[LiveServer], policy: str) -> LiveServer:
    if policy == "round_robin":
        return min(servers, key=lambda server: server.sent)
    return min(servers, key=lambda server: (server.load, server.sent))


@contextmanager
def _visit(server: LiveServer, tokens: int) -> Iterator[LiveServer]:
    server.load += tokens
    server.sent += 1
    try:
        yield server
    finally:
        server.load -= tokens


async def _stream(
    post: Post,
    server: LiveServer,
    form: Format,
    body: bytes,
    row: RequestRow,
    output: int,
    *,
    exact: bool,
    name: str = "",
) -> None:
    # Raise a `RequestFailed` if there are fewer than *output*, unless it says why; with *exact*, if not just as
    # many.  A server that counts in its first chunk counts in all; of another one a final count corrects how many
    # there were, not when they came.
    counts: bool | None = None
    now = 0.0
    async for now, data in post.events(server, form.path, body, name):
        try:
            chunk = form.chunk(data)
        except msgspec.MsgspecError as error:
            raise RequestFailed(f"Malformed: {server.name} sent {data[:80]!r}: {error}") from None
        if chunk.error:
            raise RequestFailed(f"Error: {server.name} after {row.tokens} of {output} tokens: {chunk.error}")
        if counts is None:
            counts = chunk.total is not None
        row.finish = chunk.finish or row.finish
        row.reported |= chunk.reported
        new = chunk.total - row.tokens if counts and chunk.total is not None else chunk.new
        if new > 0:
            _arrived(row, now, new)
        row.tokens = max(row.tokens, chunk.total or 0)
    if row.tokens and row.first is None:  # no chunk had text of its own
        row.first = row.last = now
    if row.tokens != output and (exact or not row.finish or not row.tokens):
        because = f" (finish_reason={row.finish})" if row.finish else ""
        raise RequestFailed(
            f"Aborted: {server.name} ended the stream after {row.tokens} of {output} tokens{because}"
        )


def _arrived(row: RequestRow, now: float, new: int) -> None:
    if row.last is None:
        row.first = now
    else:
        row.gaps.append(now - row.last)
        row.sizes.append(new)
    row.last = now
    row.tokens += new


class Direct:
    """One server does everything, or is a router that sees to it.

    *exact* says that an answer must have just as many tokens as asked for.
    """

    connections = 1

    def __init__(self, servers: Sequence[LiveServer], form: Format, *, policy: str, exact: bool) -> None:
        self._servers, self._format, self._policy, self._exact = servers, form, policy, exact

    async def serve(self, post: Post, prompt: bytes, request: Request, row: RequestRow) -> None:
        """Stream from one server; see `RequestRoute`."""
        with _visit(_choose(self._servers, self._policy), request.input + request.output) as server:
            row.prefill = row.decode = server.name
            body = self._format.body(prompt, request.output, stream=True)
            await _stream(post, server, self._format, body, row, request.output, exact=self._exact)


class _Answer(msgspec.Struct):
    """The part of an answer of vLLM's prefill that is read."""

    kv_transfer_params: dict[str, Any] | None = None
    error: Any = None


_NEW = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""Parameters that vLLM's proxy sends to prefill, which answers with the values for decode."""


class VllmPair:
    """Prefill, then decode, in series, under one name of the request.

    vLLM's `NixlPushConnector` finds by that name, the header ``X-Request-Id``, which prefill belongs to what decode
    has registered: without it each server makes up a name of its own, and nothing is ever written.
    The load of a server counts the prompt for prefill, and prompt and output for decode.
    """

    connections = 1

    def __init__(
        self,
        prefills: Sequence[LiveServer],
        decodes: Sequence[LiveServer],
        form: Format,
        *,
        policy: str,
        exact: bool,
    ) -> None:
        self._prefills, self._decodes, self._policy = prefills, decodes, policy
        self._format, self._exact = form, exact

    async def serve(self, post: Post, prompt: bytes, request: Request, row: RequestRow) -> None:
        """Ask prefill for one token, and decode for all with the parameters in its answer; see `RequestRoute`."""
        form, clock, name = self._format, asyncio.get_running_loop().time, uuid4().hex
        with _visit(_choose(self._prefills, self._policy), request.input) as server:
            row.prefill = server.name
            body = form.body(prompt, 1, stream=False, extra={"kv_transfer_params": _NEW})
            data = await post.answer(server, form.path, body, name)
            row.prefilled = clock()
        params = self._params(server, data)
        with _visit(_choose(self._decodes, self._policy), request.input + request.output) as server:
            row.decode = server.name
            body = form.body(prompt, request.output, stream=True, extra={"kv_transfer_params": params})
            await _stream(post, server, form, body, row, request.output, exact=self._exact, name=name)

    @staticmethod
    def _params(server: LiveServer, data: bytes) -> dict[str, Any]:
        # Raise a `RequestFailed` if the answer is an error or has none.
        try:
            answer = msgspec.json.decode(data, type=_Answer)
        except (msgspec.MsgspecError, ValueError) as error:
            raise RequestFailed(f"Malformed: {server.name} answered {data[:80]!r}: {error}") from None
        if answer.error:
            raise RequestFailed(f"Error: {server.name}: {reason(answer.error)}")
        if not answer.kv_transfer_params:
            raise RequestFailed(
                f"Error: {server.name} answered without kv_transfer_params; start it with --kv-transfer-config"
            )
        return answer.kv_transfer_params


class SglangPair:
    """Prefill and decode at once, in one bootstrap room.

    *bootstrap* has the port of each prefill server's bootstrap, by the server's name.
    """

    connections = 2

    def __init__(
        self,
        prefills: Sequence[LiveServer],
        decodes: Sequence[LiveServer],
        form: Format,
        bootstrap: Mapping[str, int],
        *,
        policy: str,
        exact: bool,
    ) -> None:
        self._prefills, self._decodes, self._policy = prefills, decodes, policy
        self._format, self._bootstrap, self._exact = form, bootstrap, exact
        self._rooms = random.SystemRandom()  # a room must not have been used before on these servers

    async def serve(self, post: Post, prompt: bytes, request: Request, row: RequestRow) -> None:
        """Send to both sides and stream from decode; what fails first ends the request; see `RequestRoute`."""
        prefill, decode = _choose(self._prefills, self._policy), _choose(self._decodes, self._policy)
        row.prefill, row.decode = prefill.name, decode.name
        room = {
            "bootstrap_host": urlsplit(prefill.url).hostname,
            "bootstrap_port": self._bootstrap[prefill.name],
            "bootstrap_room": self._rooms.getrandbits(62),
        }
        asked, streamed = (self._format.body(prompt, request.output, stream=s, extra=room) for s in (False, True))
        sides = (
            asyncio.ensure_future(self._prefill(post, prefill, asked, request, row)),
            asyncio.ensure_future(self._decode(post, decode, streamed, request, row)),
        )
        try:
            done, _ = await asyncio.wait(sides, return_when=asyncio.FIRST_EXCEPTION)
            for side in done:
                side.result()
        finally:
            for side in sides:
                side.cancel()
            await asyncio.gather(*sides, return_exceptions=True)

    async def _prefill(self, post: Post, server: LiveServer, body: bytes, request: Request, row: RequestRow) -> None:
        with _visit(server, request.input):
            data = await post.answer(server, self._format.path, body)
            row.prefilled = asyncio.get_running_loop().time()
            try:
                chunk = self._format.chunk(data)
            except msgspec.MsgspecError as error:
                raise RequestFailed(f"Malformed: {server.name} answered {data[:80]!r}: {error}") from None
            if chunk.error:
                raise RequestFailed(f"Error: {server.name}: {chunk.error}")
            row.reported |= {f"prefill_{name}": value for name, value in chunk.reported.items()}

    async def _decode(self, post: Post, server: LiveServer, body: bytes, request: Request, row: RequestRow) -> None:
        with _visit(server, request.input + request.output):
            await _stream(post, server, self._format, body, row, request.output, exact=self._exact)
