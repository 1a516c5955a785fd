"""Servers that lie: each request ends with a reason, soon, and the run goes on."""

import asyncio
from itertools import repeat

import pytest

from backends.live.metrics import Sampler
from tests.support.answering import OK, SGLANG, listening, served

LONG = b"x" * (1 << 20)


def chunk(usage: str, tokens: int = 1) -> bytes:
    ids = ",".join(["7"] * tokens)
    return f'data: {{"choices":[{{"text":"a","token_ids":[{ids}]}}],"usage":{{{usage}}}}}\n\n'.encode()


async def sampled(answer):
    async with listening([answer]) as (opened, servers), Sampler(opened, servers, 9.0) as sampler:
        return sampler.samples


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
    row = asyncio.run(served(answer))
    assert row.status.startswith(status)
    assert len(row.status) < 400
    assert row.tokens <= 9
    assert asyncio.run(sampled(answer)) == []


def test_a_body_that_trickles_ends_at_the_timeout():
    row = asyncio.run(served(lambda: (part for byte in (OK + chunk("")) * 9 for part in (bytes([byte]), 0.05))))
    assert row.status == "Timeout: 0 of 4 tokens within 1 s"


@pytest.mark.parametrize("count", [str(HUGE), "-1", '"four"', "[4]"])
def test_what_sglang_counts_is_a_number_of_tokens(count):
    said = f'data: {{"meta_info":{{"completion_tokens":{count},"queue_time":{HUGE}}}}}\n\n'.encode()
    row = asyncio.run(served(lambda: [OK, said], form=SGLANG))
    assert row.status.startswith("Malformed: server0 sent ")
