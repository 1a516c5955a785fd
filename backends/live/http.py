# SPDX-License-Identifier: Apache-2.0
"""Requests to serving engines over HTTP, by aiohttp, which is imported with the first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from backends.live.formats import reason

UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""What the decoding of a stranger's JSON raises."""

MOST = 1 << 24
"""Bytes of an answer, of a page of metrics or of an error that are read."""


class RequestFailed(Exception):
    """A request that ended without all its tokens; the message is its status."""


@dataclass(slots=True)
class LiveServer:
    """A server, and the tokens of the requests that it has, by the client's own account."""

    role: str  # "prefill", "decode" or "server"
    name: str  # of its role and number, such as "decode0"
    url: str  # without a path
    bootstrap: int = 0  # the port of the bootstrap server of an SGLang prefill server
    load: int = 0  # tokens of requests that are there now
    sent: int = 0  # requests so far


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


async def answer(opened: Any, server: LiveServer, path: str, body: bytes, name: str = "") -> bytes:
    """Post *body* within the session *opened* and return the whole answer.

    *name*, if there is one, is what the server is to call the request.  Every failure is a `RequestFailed`, such as
    ``HTTP 503: ...`` or ``Refused: ...``.
    """
    async with _post(opened, server, path, body, name) as response:
        return await body_of(response)


async def body_of(response: Any) -> bytes:
    """Return the body of *response*.  Raise a `ValueError` if it has more than `MOST` bytes."""
    parts, size = [], 0
    async for part in response.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > MOST:
            raise ValueError(f"a body of more than {MOST >> 20} MiB")
    return b"".join(parts)


async def events(
    opened: Any, server: LiveServer, path: str, body: bytes, name: str = ""
) -> AsyncIterator[tuple[float, bytes]]:
    """Post like `answer`; yield time and data of each server-sent event up to ``[DONE]``, timed as it is read."""
    clock = asyncio.get_running_loop().time
    async with _post(opened, server, path, body, name) as response:
        async for line in response.content:
            if line.startswith(b"error:"):  # llama.cpp
                said = line[6:].decode(errors="replace").strip()[:200]
                raise RequestFailed(f"Error: {server.name}: {said}")
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            yield clock(), data


@asynccontextmanager
async def _post(opened: Any, server: LiveServer, path: str, body: bytes, name: str) -> AsyncIterator[Any]:
    import aiohttp
    from aiohttp.http_exceptions import HttpProcessingError  # of a line that is too long, no ClientError

    headers = {"X-Request-Id": name} if name else None
    try:
        async with opened.post(server.url + path, data=body, headers=headers) as response:
            if response.status != 200:
                data = await body_of(response)
                try:
                    said = msgspec.json.decode(data)
                except UNREADABLE:
                    said = data.decode(errors="replace")
                because = reason(said) or "without a reason"
                raise RequestFailed(f"HTTP {response.status}: {server.name}: {because}")
            yield response
    except (aiohttp.ClientError, HttpProcessingError, ConnectionError, OSError, ValueError) as error:
        text = f"{type(error).__name__}: {str(error)[:200]}".rstrip(": ")
        if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
            raise RequestFailed(f"Refused: {server.name} cannot be reached: {text}") from error
        if isinstance(error, TimeoutError):
            raise
        raise RequestFailed(f"ServerLost: {server.name} broke the connection: {text}") from error
