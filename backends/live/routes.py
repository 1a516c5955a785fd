# SPDX-License-Identifier: Apache-2.0
"""Routes of requests: the servers that each visits, and their order.

`Direct` sends it to one server.  `VllmPair` does what vLLM's proxy does: the prompt to prefill with one token to
generate, then the same prompt with the parameters that prefill returned to decode.  `SglangPair` does what SGLang's
router does: the prompt to both sides at once, with one ``bootstrap_room``.
"""

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import msgspec

from backends.live.http import UNREADABLE, Format, LiveServer, RequestFailed, StreamChunk, answer, events, reason
from pdsim.serving.workload import Request

BEYOND = 10_000
"""Tokens more than asked for after which a stream that goes on is given up: times of all are kept."""


@dataclass(slots=True)
class RequestRow:
    """The outcome of a request; times are seconds on the client's clock, None if that never came."""

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


@dataclass
class RequestRoute(ABC):
    """The servers that a request visits; serves many requests at a time and counts the load of each server."""

    form: Format
    policy: str  # "least_tokens" or "round_robin", among servers of one role
    exact: bool  # whether an answer must have just as many tokens as asked for
    connections = 1  # that a request holds at a time

    @abstractmethod
    async def serve(self, opened: Any, prompt: bytes, request: Request, row: RequestRow) -> None:
        """Have *request* served within the session *opened* and fill in *row*; *prompt* is encoded JSON.

        What was seen before a failure stays in *row*.  Raise a `RequestFailed` if it does not get all its tokens.
        """

    def _choose(self, servers: Sequence[LiveServer]) -> LiveServer:
        if self.policy == "round_robin":
            return min(servers, key=lambda server: server.sent)
        return min(servers, key=lambda server: (server.load, server.sent))

    def _chunk(self, server: LiveServer, data: bytes) -> StreamChunk:
        try:
            return self.form.chunk(data)
        except UNREADABLE as error:
            raise _malformed(server, data, error) from None

    async def _stream(
        self, opened: Any, server: LiveServer, body: bytes, row: RequestRow, output: int, name: str = ""
    ) -> None:
        # A server that counts in its first chunk counts in all; of another one a final count corrects how many there
        # were, not when they came.
        counts: bool | None = None
        now = 0.0
        async for now, data in events(opened, server, self.form.path, body, name):
            chunk = self._chunk(server, data)
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
            if row.tokens > output + BEYOND and self.exact:
                raise RequestFailed(f"Aborted: {server.name} has sent {row.tokens} of {output} tokens and goes on")
        if row.tokens and row.first is None:  # no chunk had text of its own
            row.first = row.last = now
        if row.tokens != output and (self.exact or not row.finish or not row.tokens):
            because = f" (finish_reason={row.finish})" if row.finish else ""
            raise RequestFailed(
                f"Aborted: {server.name} ended the stream after {row.tokens} of {output} tokens{because}"
            )


@contextmanager
def _visit(server: LiveServer, tokens: int) -> Iterator[LiveServer]:
    server.load += tokens
    server.sent += 1
    try:
        yield server
    finally:
        server.load -= tokens


def _arrived(row: RequestRow, now: float, new: int) -> None:
    if row.last is None:
        row.first = now
    else:
        row.gaps.append(now - row.last)
        row.sizes.append(new)
    row.last = now
    row.tokens += new


def _malformed(server: LiveServer, data: bytes, error: Exception) -> RequestFailed:
    return RequestFailed(f"Malformed: {server.name} sent {data[:80]!r}: {error}")


@dataclass
class Direct(RequestRoute):
    """One server does everything, or is a router that sees to it."""

    servers: Sequence[LiveServer]

    async def serve(self, opened: Any, prompt: bytes, request: Request, row: RequestRow) -> None:
        with _visit(self._choose(self.servers), request.input + request.output) as server:
            row.prefill = row.decode = server.name
            body = self.form.body(prompt, request.output, stream=True)
            await self._stream(opened, server, body, row, request.output)


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


@dataclass
class VllmPair(RequestRoute):
    """Prefill, then decode, in series, under one name of the request.

    vLLM's `NixlPushConnector` pairs by that name, the header ``X-Request-Id``, what prefill and decode have: without
    it each server makes up a name of its own, and nothing is ever written.
    """

    prefills: Sequence[LiveServer]
    decodes: Sequence[LiveServer]

    async def serve(self, opened: Any, prompt: bytes, request: Request, row: RequestRow) -> None:
        form, name = self.form, uuid4().hex
        with _visit(self._choose(self.prefills), request.input) as server:
            row.prefill = server.name
            body = form.body(prompt, 1, stream=False, extra={"kv_transfer_params": _NEW})
            data = await answer(opened, server, form.path, body, name)
            row.prefilled = asyncio.get_running_loop().time()
        params = _params(server, data)
        with _visit(self._choose(self.decodes), request.input + request.output) as server:
            row.decode = server.name
            body = form.body(prompt, request.output, stream=True, extra={"kv_transfer_params": params})
            await self._stream(opened, server, body, row, request.output, name)


def _params(server: LiveServer, data: bytes) -> dict[str, Any]:
    try:
        answered = msgspec.json.decode(data, type=_Answer)
    except UNREADABLE as error:
        raise _malformed(server, data, error) from None
    if answered.error:
        raise RequestFailed(f"Error: {server.name}: {reason(answered.error)}")
    if not answered.kv_transfer_params:
        raise RequestFailed(
            f"Error: {server.name} answered without kv_transfer_params; start it with --kv-transfer-config"
        )
    return answered.kv_transfer_params


@dataclass
class SglangPair(RequestRoute):
    """Prefill and decode at once, in one bootstrap room."""

    prefills: Sequence[LiveServer]
    decodes: Sequence[LiveServer]
    connections = 2

    async def serve(self, opened: Any, prompt: bytes, request: Request, row: RequestRow) -> None:
        prefill, decode = self._choose(self.prefills), self._choose(self.decodes)
        row.prefill, row.decode = prefill.name, decode.name
        room = {
            "bootstrap_host": urlsplit(prefill.url).hostname,
            "bootstrap_port": prefill.bootstrap,
            "bootstrap_room": random.SystemRandom().getrandbits(62),  # not used before on these servers
        }
        asked, streamed = (self.form.body(prompt, request.output, stream=s, extra=room) for s in (False, True))
        sides = (
            asyncio.ensure_future(self._prefill(opened, prefill, asked, request.input, row)),
            asyncio.ensure_future(self._decode(opened, decode, streamed, request, row)),
        )
        try:
            done, _ = await asyncio.wait(sides, return_when=asyncio.FIRST_EXCEPTION)
            for side in done:
                side.result()
        finally:
            for side in sides:
                side.cancel()
            await asyncio.gather(*sides, return_exceptions=True)

    async def _prefill(self, opened: Any, server: LiveServer, body: bytes, tokens: int, row: RequestRow) -> None:
        with _visit(server, tokens):
            data = await answer(opened, server, self.form.path, body)
            row.prefilled = asyncio.get_running_loop().time()
            chunk = self._chunk(server, data)
            if chunk.error:
                raise RequestFailed(f"Error: {server.name}: {chunk.error}")
            row.reported |= {f"prefill_{name}": value for name, value in chunk.reported.items()}

    async def _decode(self, opened: Any, server: LiveServer, body: bytes, request: Request, row: RequestRow) -> None:
        with _visit(server, request.input + request.output):
            await self._stream(opened, server, body, row, request.output)
