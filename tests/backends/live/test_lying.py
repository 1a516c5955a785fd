"""Servers that lie: each request ends with a reason, soon, and the run goes on."""

import asyncio
from collections.abc import Callable, Iterator
from itertools import repeat

import pytest

from backends.live import client
from backends.live.http import LiveServer, OpenAiCompletions, SglangGenerate, session
from backends.live.metrics import Sampler
from backends.live.routes import Direct, RequestRow
from pdsim.serving.workload import Request

VLLM = OpenAiCompletions("tiny", ignore_eos=True, continuous=True, request={})
SGLANG = SglangGenerate(ignore_eos=True, prompts="ids", request={})
OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
LONG = b"x" * (1 << 20)


def chunk(usage: str, tokens: int = 1) -> bytes:
    ids = ",".join(["7"] * tokens)
    return f'data: {{"choices":[{{"text":"a","token_ids":[{ids}]}}],"usage":{{{usage}}}}}\n\n'.encode()


def slow(data: bytes) -> Iterator[bytes]:
    return (bytes([byte]) for byte in data * 100)


async def served(answer: Callable[[], Iterator[bytes]], form: OpenAiCompletions | SglangGenerate, pause: float):
    """Serve one request by a server that answers just this, and read its metrics; return its row."""

    async def lie(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            for part in answer():
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(pause)
        except ConnectionError:
            pass
        finally:
            writer.close()

    listener = await asyncio.start_server(lie, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    server, row = LiveServer("server", "server0", url), RequestRow()
    route = Direct(form, "round_robin", True, [server])
    async with session(key="", connections=2, connect_timeout=2.0) as opened:
        slots, start = asyncio.Semaphore(1), asyncio.get_running_loop().time()
        await client._one(Request(0.0, 3, 4), row, route, opened, b"[1,2,3]", slots, start, 1.0)
        if pause == 0.0:
            async with Sampler(opened, [server], 9.0) as sampler:
                assert sampler.samples == []
    listener.close()
    return row


HUGE = 10**30
LIES = [
    ("no JSON", lambda: [OK, b"data: {no\n\n"], "Malformed: server0 sent "),
    ("no text", lambda: [OK, b'data: {"error":"\xff\xfe"}\n\n'], "Malformed: server0 sent "),
    ("too deep", lambda: [OK, b'data: {"error":' + b"[" * 100_000 + b"\n\n"], "Malformed: server0 sent "),
    ("a page", lambda: [OK, b"<html></html>"], "Aborted: server0 ended the stream after 0 of 4 tokens"),
    ("too large a count", lambda: [OK, chunk(f'"completion_tokens":{HUGE}')], "Malformed: server0 sent "),
    ("too large a prompt", lambda: [OK, chunk(f'"prompt_tokens":{HUGE}', 4)], "Malformed: server0 sent "),
    ("a negative count", lambda: [OK, chunk('"completion_tokens":-5')], "Malformed: server0 sent "),
    ("too many tokens", lambda: [OK, chunk("", 9)], "Aborted: server0 ended the stream after 9 of 4 tokens"),
    ("a count that falls", lambda: [OK, *(chunk(f'"completion_tokens":{n}') for n in (3, 1, 4))], "ok"),
    ("less than it says", lambda: [OK.replace(b"\r\n\r\n", b"\r\nContent-Length: 9999\r\n\r\n")], "ServerLost: "),
    ("a reset", lambda: [OK, chunk('"completion_tokens":1')], "Aborted: server0 ended the stream after 1 of 4"),
    ("an endless line", lambda: [OK, b"data: ", *repeat(LONG, 99)], "ServerLost: server0 broke the connection: "),
    ("an endless error", lambda: [OK.replace(b"200", b"500"), *repeat(LONG, 99)], "ServerLost: server0 broke the "),
    ("endless headers", lambda: [OK[:-2], *repeat(b"X: " + b"y" * 999 + b"\r\n", 99_999)], "ServerLost: server0 "),
    ("a circle", lambda: [b"HTTP/1.1 307 x\r\nLocation: /\r\nContent-Length: 0\r\n\r\n"], "ServerLost: server0 "),
    ("nothing", list, "ServerLost: server0 broke the connection: "),
]


@pytest.mark.parametrize(("answer", "status"), [lie[1:] for lie in LIES], ids=[lie[0] for lie in LIES])
def test_a_server_that_lies_gives_the_request_a_reason(answer, status):
    row = asyncio.run(served(answer, VLLM, 0.0))
    assert row.status.startswith(status)
    assert len(row.status) < 400
    assert row.tokens <= 9


def test_a_body_that_trickles_ends_at_the_timeout():
    row = asyncio.run(served(lambda: slow(OK + chunk("")), VLLM, 0.05))
    assert row.status == "Timeout: 0 of 4 tokens within 1 s"


@pytest.mark.parametrize("count", [str(HUGE), "-1", '"four"', "[4]"])
def test_what_sglang_counts_is_a_number_of_tokens(count):
    said = f'data: {{"meta_info":{{"completion_tokens":{count},"queue_time":{HUGE}}}}}\n\n'.encode()
    row = asyncio.run(served(lambda: [OK, said], SGLANG, 0.0))
    assert row.status.startswith("Malformed: server0 sent ")
