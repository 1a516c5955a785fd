"""Servers on loopback that answer what a test says: any bytes, or OpenAI's API."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any

from aiohttp import web

from backends.live import client
from backends.live.http import LiveServer, OpenAiCompletions, SglangGenerate, session
from backends.live.routes import Direct, RequestRow, VllmPair
from pdsim.serving.workload import Request

OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
VLLM = OpenAiCompletions("tiny", ignore_eos=True, continuous=True, request={})
SGLANG = SglangGenerate(ignore_eos=True, prompts="ids", request={})

Answer = Callable[[], Iterable[bytes | float | None]]
"""What a server sends; it waits as many seconds as a number says, and None resets the connection."""


@contextlib.asynccontextmanager
async def listening(answers: Sequence[Answer]) -> AsyncIterator[tuple[Any, list[LiveServer]]]:
    """Enter a session, and a server that gives the first of *answers*, then the next; the last one for ever."""
    left = list(answers)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await reader.readuntil(b"\r\n\r\n")
            for part in (left.pop(0) if len(left) > 1 else left[0])():
                if part is None:
                    writer.transport.abort()
                elif isinstance(part, float):
                    await asyncio.sleep(part)
                else:
                    writer.write(part)
                    await writer.drain()
        writer.close()

    listener = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    async with session(key="", connections=2, connect_timeout=2.0) as opened:
        yield opened, [LiveServer("server", "server0", url)]
    listener.close()


async def served(
    *answers: Answer, form: OpenAiCompletions | SglangGenerate = VLLM, patience: float = 1.0
) -> RequestRow:
    """Serve a request of 3 and 4 tokens by one server, or a pair, that answers so; return its row."""
    row = RequestRow()
    async with listening(answers) as (opened, servers):
        pair = VllmPair(form, "round_robin", True, servers, servers)
        route = pair if len(answers) > 1 else Direct(form, "round_robin", True, servers)
        slots, start = asyncio.Semaphore(1), asyncio.get_running_loop().time()
        await client._one(Request(0.0, 3, 4), row, route, opened, b"[1,2,3]", slots, start, patience)
    return row


@contextlib.asynccontextmanager
async def openai(
    complete: Callable[[web.Request], Awaitable[web.StreamResponse]], metrics: Callable[[], str] | None = None
) -> AsyncIterator[str]:
    """Serve completions by *complete* and, if they are given, *metrics*; enter with the address."""

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}]})

    async def page(_: web.Request) -> web.Response:
        if metrics is None:
            raise web.HTTPNotFound
        return web.Response(text=metrics(), content_type="text/plain")

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.get("/metrics", page), web.post("/v1/completions", complete)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


def chunk(*tokens: int, last: bool) -> bytes:
    """Return a chunk of a stream of completions, with its end if it is the *last*."""
    content = {"choices": [{"text": "a", "token_ids": tokens, "finish_reason": "length" if last else None}]}
    return f"data: {json.dumps(content)}\n\n{'data: [DONE]' if last else ''}\n\n".encode()
