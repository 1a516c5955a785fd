# SPDX-License-Identifier: Apache-2.0
"""Requests to serving engines over HTTP, by aiohttp, which is imported with the first, and the APIs of the engines.

A `Format` is the JSON body of a request and the contents of one streamed chunk: OpenAI's ``/v1/completions`` and
``/v1/chat/completions`` with vLLM's and llama.cpp's additions, or SGLang's ``/generate``.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import msgspec

MOST = 1 << 40
"""The most that a number in an answer may be, in size: of a larger one no column of a table could be made."""

Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]


class StreamChunk(NamedTuple):
    """The contents of a chunk of a stream."""

    new: int  # tokens in it, as far as it tells
    total: int | None = None  # tokens so far, if the server counts
    finish: str = ""  # why generation ended
    reported: Mapping[str, Any] = {}  # what the server says of this request: usage, timings
    error: str = ""


class _Usage(msgspec.Struct):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    timings: dict[str, float] | None = None  # llama.cpp
    error: Any = None
    message: Any = None  # of an error, where it is not nested


class _Generated(msgspec.Struct):
    """Of a chunk of SGLang; ``output_ids`` repeat all tokens so far and are not read."""

    meta_info: dict[str, Any] = {}
    error: Any = None


_decode_completion = msgspec.json.Decoder(_Completion).decode
_decode_generated = msgspec.json.Decoder(_Generated).decode


class OpenAiCompletions:
    """OpenAI's ``/v1/completions``."""

    path = "/v1/completions"
    prompt = b'"prompt":%b'

    def __init__(self, model: str, *, ignore_eos: bool, continuous: bool, request: Mapping[str, Any]) -> None:
        usage = {"include_usage": True} | ({"continuous_usage_stats": True} if continuous else {})
        self._common = {"model": model, "temperature": 0.0} | ({"ignore_eos": True} if ignore_eos else {})
        self._stream = {"stream": True, "stream_options": usage}
        self._request = dict(request)

    def body(self, prompt: bytes, output: int, *, stream: bool, extra: Mapping[str, Any] = {}) -> bytes:
        """Return the JSON body that asks for *output* tokens after *prompt*, which is JSON already.

        *extra* is added at the top of the JSON object, and overrides what was there.
        """
        rest = {**self._common, "max_tokens": output, **(self._stream if stream else {}), **self._request, **extra}
        return b"{%b,%b" % (self.prompt % prompt, msgspec.json.encode(rest)[1:])

    def chunk(self, data: bytes) -> StreamChunk:
        """Return the contents of the JSON *data* of an event.  Raise a `msgspec.MsgspecError`.

        Without a count or token ids, a chunk with text counts as one token.
        """
        completion = _decode_completion(data)
        if completion.error or (completion.message and not completion.choices):
            return StreamChunk(0, error=reason(completion.error or completion.message))
        new, finish = 0, ""
        for choice in completion.choices:
            if choice.token_ids is not None:
                new += len(choice.token_ids)
            elif choice.text or (choice.delta and (choice.delta.content or choice.delta.reasoning_content)):
                new += 1
            finish = choice.finish_reason or finish
        total, reported = None, _numbers(completion.timings or {})
        if completion.usage is not None:
            total = completion.usage.completion_tokens
            if completion.usage.prompt_tokens is not None:
                reported["prompt_tokens"] = completion.usage.prompt_tokens
        return StreamChunk(new, total, finish, reported)


class OpenAiChat(OpenAiCompletions):
    """OpenAI's ``/v1/chat/completions``; the prompt is the text of one message."""

    path = "/v1/chat/completions"
    prompt = b'"messages":[{"role":"user","content":%b}]'


class SglangGenerate:
    """SGLang's ``/generate``, which takes token ids and says how many tokens there are so far."""

    path = "/generate"

    def __init__(self, *, ignore_eos: bool, prompts: str, request: Mapping[str, Any]) -> None:
        self._sampling = {"temperature": 0.0, "ignore_eos": ignore_eos}
        self._prompt = b"input_ids" if prompts == "ids" else b"text"
        self._request = dict(request)

    def body(self, prompt: bytes, output: int, *, stream: bool, extra: Mapping[str, Any] = {}) -> bytes:
        sampling = {**self._sampling, "max_new_tokens": output}
        rest = {"sampling_params": sampling, "stream": stream, **self._request, **extra}
        return b'{"%b":%b,%b' % (self._prompt, prompt, msgspec.json.encode(rest)[1:])

    def chunk(self, data: bytes) -> StreamChunk:
        """Return the contents of a chunk; the last one carries the request's times, if the server keeps metrics."""
        generated = _decode_generated(data)
        if generated.error:
            return StreamChunk(0, error=reason(generated.error))
        about = generated.meta_info
        total = msgspec.convert(about.get("completion_tokens"), Count | None)
        finish = about.get("finish_reason")
        if isinstance(finish, Mapping) and finish.get("type") == "abort":
            return StreamChunk(0, total, "abort", error=reason(finish))
        reported = _numbers(about) if finish else {}
        kind = finish.get("type", "") if isinstance(finish, Mapping) else finish or ""
        return StreamChunk(0, total, str(kind), reported)


def _numbers(about: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in about.items() if isinstance(value, int | float) and abs(value) <= MOST}


Format = OpenAiCompletions | SglangGenerate


def reason(error: Any) -> str:
    """Return the message in *error*, as servers nest it, in one line of at most 200 characters.

    >>> reason({"error": {"message": "no such  model", "code": 404}})
    'no such model'
    """
    while isinstance(error, Mapping):
        error = error.get("message") or error.get("error") or error.get("detail") or str(dict(error))
    return " ".join(str(error).split())[:200]


UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""What the decoding of a stranger's JSON raises."""

LARGEST = 1 << 24
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
    request.  Nothing is decompressed: a few bytes could become more lines than are read before any deadline.
    """
    import aiohttp

    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    headers |= {"Authorization": f"Bearer {key}"} if key else {}
    connector = aiohttp.TCPConnector(limit=connections, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=headers, read_bufsize=1 << 20, auto_decompress=False
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
    """Return the body of *response*.  Raise a `ValueError` if it is compressed or has more than `LARGEST` bytes."""
    _uncompressed(response)
    parts, size = [], 0
    async for part in response.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > LARGEST:
            raise ValueError(f"a body of more than {LARGEST >> 20} MiB")
    return b"".join(parts)


def _uncompressed(response: Any) -> None:
    if (coding := response.headers.get("Content-Encoding", "identity").lower()) != "identity":
        raise ValueError(f"a body in Content-Encoding {coding!r}, and none was asked for; have it send none")


async def events(
    opened: Any, server: LiveServer, path: str, body: bytes, name: str = ""
) -> AsyncIterator[tuple[float, bytes]]:
    """Post like `answer`; yield time and data of each server-sent event up to ``[DONE]``, timed as it is read.

    An answer without an event fails with what it says instead.
    """
    clock, said, event = asyncio.get_running_loop().time, b"", False
    async with _post(opened, server, path, body, name) as response:
        _uncompressed(response)
        async for line in response.content:
            if line.startswith(b"error:"):  # llama.cpp
                raise RequestFailed(f"Error: {server.name}: {_reason(line[6:])}")
            if not line.startswith(b"data:"):
                said += line if not event and len(said) < LARGEST >> 8 else b""
                continue
            event, data = True, line[5:].strip()
            if data == b"[DONE]":
                return
            yield clock(), data
        if said.strip() and not event:
            raise RequestFailed(f"Error: {server.name} sent no event: {_reason(said)}")


@asynccontextmanager
async def _post(opened: Any, server: LiveServer, path: str, body: bytes, name: str) -> AsyncIterator[Any]:
    import aiohttp
    from aiohttp.http_exceptions import HttpProcessingError  # of a line that is too long, no ClientError

    headers = {"X-Request-Id": name} if name else None
    try:  # a redirect is not followed: it would be measured with every request, and take its prompt elsewhere
        async with opened.post(server.url + path, data=body, headers=headers, allow_redirects=False) as response:
            if response.status != 200:
                said = _reason(await body_of(response))
                if 300 <= response.status < 400 and (location := response.headers.get("Location")):
                    said = f"moved to {location[:200]}; name that address instead"
                raise RequestFailed(f"HTTP {response.status}: {server.name}: {said or 'without a reason'}")
            yield response
    except (aiohttp.ClientError, HttpProcessingError, ConnectionError, OSError) as error:
        if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
            raise RequestFailed(f"Refused: {server.name} cannot be reached: {cause(error)}") from error
        if isinstance(error, TimeoutError):
            raise
        raise RequestFailed(f"ServerLost: {server.name} broke the connection: {cause(error)}") from error
    except ValueError as error:
        raise RequestFailed(f"Malformed: {server.name} sent {error}") from error


def cause(error: Exception) -> str:
    """Return class and words of *error*, which aiohttp raised, in one line."""
    words = " ".join(str(getattr(error, "message", "") or error).split())
    return f"{type(error).__name__}: {words[:200]}".rstrip(": ")


def _reason(body: bytes) -> str:
    try:
        return reason(msgspec.json.decode(body))
    except UNREADABLE:
        return reason(body.decode(errors="replace"))
