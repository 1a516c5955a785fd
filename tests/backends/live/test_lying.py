"""Servers that lie: each request ends with a reason, soon, and the run goes on."""

import asyncio
import gzip
from itertools import repeat
from pathlib import Path

import pytest

from backends.live import live_deployment
from backends.live.metrics import Sampler
from pdsim.cli.diagnose import _fetched
from pdsim.core.errors import BackendUnavailable, ConfigError
from tests.support.answering import OK, SGLANG, listening, served
from tests.support.composed import composed

LONG = b"x" * (1 << 20)


def chunk(usage: str, tokens: int = 1) -> bytes:
    ids = ",".join(["7"] * tokens)
    return f'data: {{"choices":[{{"text":"a","token_ids":[{ids}]}}],"usage":{{{usage}}}}}\n\n'.encode()


async def sampled(answer):
    async with listening([answer]) as (opened, servers), Sampler(opened, servers, 9.0) as sampler:
        return sampler.samples


HUGE = 10**30
PACKED = b"Content-Encoding: gzip"
NO_MODELS = [
    b"[]",
    b'{"data":5}',
    b'{"data":[]}',
    b'{"data":["tiny"]}',
    b'{"data":[{"id":[1]}]}',
    b'{"data":{"a":1}}',
]
LINES = gzip.compress(b": \n" * (16 << 20))  # which hung the client for minutes
LIES = [
    ("no JSON", lambda: [OK, b"data: {no\n\n"], "Malformed: server0 sent "),
    ("no text", lambda: [OK, b'data: {"error":"\xff\xfe"}\n\n'], "Malformed: server0 sent "),
    ("too deep", lambda: [OK, b'data: {"error":' + b"[" * 100_000 + b"\n\n"], "Malformed: server0 sent "),
    ("a page", lambda: [OK, b"<html></html>"], "Error: server0 sent no event: <html></html>"),
    ("too large a count", lambda: [OK, chunk(f'"completion_tokens":{HUGE}')], "Malformed: server0 sent "),
    ("too large a prompt", lambda: [OK, chunk(f'"prompt_tokens":{HUGE}', 4)], "Malformed: server0 sent "),
    ("a negative count", lambda: [OK, chunk('"completion_tokens":-5')], "Malformed: server0 sent "),
    ("too many tokens", lambda: [OK, chunk("", 9)], "Aborted: server0 ended the stream after 9 of 4 tokens"),
    ("a count that falls", lambda: [OK, *(chunk(f'"completion_tokens":{n}') for n in (3, 1, 4))], "ok"),
    ("less than it says", lambda: [OK.replace(b"\r\n\r\n", b"\r\nContent-Length: 9999\r\n\r\n")], "ServerLost: "),
    ("a reset", lambda: [OK, chunk('"completion_tokens":1')], "Aborted: server0 ended the stream after 1 of 4"),
    (
        "an error as a page",
        lambda: [OK, b'{\n"error":{"message":"no KV\\nis left"}}'],
        "Error: server0 sent no event: no KV is",
    ),
    (
        "endless tokens",
        lambda: repeat(OK + chunk("") * 999, 99),
        "Aborted: server0 has sent 10005 of 4 tokens and goes",
    ),
    ("an endless line", lambda: [OK, b"data: ", *repeat(LONG, 99)], "ServerLost: server0 broke the connection: "),
    (
        "an endless error",
        lambda: [OK.replace(b"200", b"500"), *repeat(LONG, 99)],
        "Malformed: server0 sent a body of mo",
    ),
    (
        "no HTTP",
        lambda: [b"<html>"],
        "ServerLost: server0 broke the connection: ClientResponseError: Bad status line: ",
    ),
    (
        "packed lines",
        lambda: [OK[:-2] + PACKED + b"\r\n\r\n", LINES],
        "Malformed: server0 sent a body in Content-Enc",
    ),
    ("endless headers", lambda: [OK[:-2], *repeat(b"X: " + b"y" * 999 + b"\r\n", 99_999)], "ServerLost: server0 "),
    (
        "elsewhere",
        lambda: [b"HTTP/1.1 307 x\r\nLocation: /\r\nContent-Length: 0\r\n\r\n"],
        "HTTP 307: server0: moved to /",
    ),
    ("nothing", list, "ServerLost: server0 broke the connection: "),
]


@pytest.mark.parametrize(("answer", "status"), [lie[1:] for lie in LIES], ids=[lie[0] for lie in LIES])
def test_a_server_that_lies_gives_the_request_a_reason(answer, status):
    row = asyncio.run(served(answer))
    assert row.status.startswith(status)
    assert len(row.status) < 400
    assert "\n" not in row.status
    assert row.tokens <= 9 or "goes on" in row.status
    assert asyncio.run(sampled(answer)) == []


def test_a_body_that_trickles_ends_at_the_timeout():
    row = asyncio.run(served(lambda: (part for byte in (OK + chunk("")) * 9 for part in (bytes([byte]), 0.05))))
    assert row.status == "Timeout: 0 of 4 tokens within 1 s"


@pytest.mark.parametrize("count", [str(HUGE), "-1", '"four"', "[4]"])
def test_what_sglang_counts_is_a_number_of_tokens(count):
    said = f'data: {{"meta_info":{{"completion_tokens":{count},"queue_time":{HUGE}}}}}\n\n'.encode()
    row = asyncio.run(served(lambda: [OK, said], form=SGLANG))
    assert row.status.startswith("Malformed: server0 sent ")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda: [60.0], "does not answer: nothing whole within 0.3 s; start it, or correct its address"),
        (lambda: [None], "does not answer: ServerDisconnectedError: Server disconnected; start it, or correct its"),
        (lambda: [b"<html>"], "does not answer: ClientResponseError: Bad status line: Expected HTTP/"),
        (lambda: [OK, b"<html>"], "/v1/models: no JSON: JSON is malformed: invalid character (byte 0); check the"),
        *(
            (lambda data=data: [OK, data], "/v1/models lists no model; name it with live.model")
            for data in NO_MODELS
        ),
    ],
)
def test_a_server_that_says_nothing_of_itself_is_one_line(answer, said, monkeypatch):
    monkeypatch.setattr(live_deployment, "PATIENCE", 0.3)

    async def asked():
        async with listening([answer]) as (opened, servers):
            deployment = live_deployment.LiveDeployment(composed("target=live"), "", servers, Path(), bool)
            await live_deployment._version(opened, servers[0])
            await deployment._model(opened)

    with pytest.raises((BackendUnavailable, ConfigError)) as refused:
        asyncio.run(asked())
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda: [b"<html>"], "no HTTP: <html>; name the address"),
        (lambda: (part for byte in OK * 9 for part in (bytes([byte]), 0.05)), "not all of it has come within 0.5 s"),
        (lambda: [b"HTTP/1.1 302 x\r\nLocation: /\r\n\r\n"], "would lead to an infinite loop. The last 30x"),
        (lambda: [OK, b"nothing"], "is in no format that is recognised"),
    ],
)
def test_a_page_that_lies_to_diagnose_is_one_line(answer, said, monkeypatch):
    monkeypatch.setattr("pdsim.cli.diagnose._PATIENCE", 0.5)

    async def asked():
        async with listening([answer]) as (_, servers):
            await asyncio.to_thread(_fetched, servers[0].url, "")

    with pytest.raises(ConfigError) as refused:
        asyncio.run(asked())
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
