"""Prompts, bodies and chunks of each HTTP API, and metrics, as vLLM 0.32.0, llama.cpp and SGLang 0.5.12 send."""

import asyncio
import json

import numpy as np
import pytest
from aiohttp import web

from backends.live.client import encoded, token_ids
from backends.live.http import LiveServer, OpenAiChat, OpenAiCompletions, SglangGenerate, reason, session
from backends.live.metrics import Histogram, Page, difference, parse
from backends.live.routes import RequestRow, VllmPair
from pdsim.serving.workload import Request
from tests.support.answering import chunk, openai

VLLM = OpenAiCompletions("tiny", ignore_eos=True, continuous=True, request={"top_k": 1})
SGLANG = SglangGenerate(ignore_eos=True, prompts="ids", request={})


def test_prompts_differ_but_for_blocks_of_equal_hash_ids():
    one = token_ids(Request(0.0, 1300, 1, None, (4, 9, 11)), 0, 7, 512)
    two = token_ids(Request(0.0, 1400, 1, None, (4, 9, 12)), 1, 7, 512)
    assert (len(one), len(two)) == (1300, 1400)
    assert np.array_equal(one[:1024], two[:1024])
    assert not np.array_equal(one[1024:], two[1024:1300])
    request = Request(0.0, 5000, 1, None, ())
    same, other, seed = (token_ids(request, *how, 512) for how in ((3, 7), (4, 7), (3, 8)))
    assert not np.array_equal(same, other)
    assert not np.array_equal(same, seed)
    assert (same.min() >= 32, same.max() < 512) == (True, True)  # special tokens are below
    assert json.loads(encoded(request, 3, 7, 512, "ids")) == same.tolist()
    assert len(json.loads(encoded(request, 3, 7, 512, "text")).split()) == 5000
    assert len(token_ids(Request(0.0, 700, 1, None, (1,)), 0, 0, 512)) == 700  # longer than its ids


CHAT = OpenAiChat("m", ignore_eos=False, continuous=False, request={})
GREEDY = {"temperature": 0.0, "ignore_eos": True}
ASKED = {"model": "tiny", **GREEDY, "max_tokens": 9, "top_k": 1}
SAMPLED = {"sampling_params": GREEDY | {"max_new_tokens": 9}, "stream": True}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
COUNTED = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
SAID = {"messages": [{"role": "user", "content": "the of"}]}


@pytest.mark.parametrize(
    ("form", "prompt", "stream", "body"),
    [
        (VLLM, b"[5,6]", True, {"prompt": [5, 6], **ASKED, **COUNTED}),
        (VLLM, b"[5]", False, {"prompt": [5], **ASKED}),
        (CHAT, b'"the of"', True, {**SAID, "model": "m", "temperature": 0.0, "max_tokens": 9, **USAGE}),
        (SGLANG, b"[1]", True, {"input_ids": [1], **SAMPLED}),
    ],
)
def test_a_body_asks_for_just_this(form, prompt, stream, body):
    assert json.loads(form.body(prompt, 9, stream=stream, extra={"room": 7})) == body | {"room": 7}


@pytest.mark.parametrize(
    ("form", "data", "chunk"),
    [
        (
            VLLM,
            b'{"id":"cmpl-1","created":1,"model":"tiny","choices":[{"index":0,"text":"","finish_reason":null}],'
            b'"usage":{"prompt_tokens":10,"total_tokens":13,"completion_tokens":3}}',
            (0, 3, "", {"prompt_tokens": 10}, ""),
        ),
        (
            OpenAiCompletions("llama.cpp", ignore_eos=True, continuous=False, request={}),
            b'{"choices":[{"text":"","index":0,"finish_reason":"length"}],"usage":{"completion_tokens":3,'
            b'"prompt_tokens":4},"timings":{"prompt_ms":27.859,"predicted_ms":0.75}}',
            (0, 3, "length", {"prompt_ms": 27.859, "predicted_ms": 0.75, "prompt_tokens": 4}, ""),
        ),
        (CHAT, b'{"choices":[{"delta":{"role":"assistant","content":""}}]}', (0, None, "", {}, "")),
        (CHAT, b'{"choices":[{"delta":{"content":"the"}}]}', (1, None, "", {}, "")),
        (SGLANG, b'{"output_ids":[7],"meta_info":{"finish_reason":null,"completion_tokens":2}}', (0, 2, "", {}, "")),
        (
            SGLANG,
            b'{"output_ids":[7,8,9],"meta_info":{"id":"x","finish_reason":{"type":"length","length":3},'
            b'"completion_tokens":3,"queue_time":0.25,"e2e_latency":1.5}}',
            (0, 3, "length", {"completion_tokens": 3, "queue_time": 0.25, "e2e_latency": 1.5}, ""),
        ),
        (
            SGLANG,
            b'{"meta_info":{"finish_reason":{"type":"abort","message":"KVTransferError(bootstrap_room=7): gone"}}}',
            (0, None, "abort", {}, "KVTransferError(bootstrap_room=7): gone"),
        ),
        (VLLM, b'{"error":{"message":"too\\nlong","type":"BadRequestError"}}', (0, None, "", {}, "too long")),
        (VLLM, b'{"object":"error","message":"gone"}', (0, None, "", {}, "gone")),
        (VLLM, b'{"error":"no"}', (0, None, "", {}, "no")),
    ],
)
def test_a_chunk_says_tokens_end_times_and_errors(form, data, chunk):
    assert form.chunk(data) == chunk


def test_reasons_are_one_short_line():
    assert reason({"detail": {"message": "a\n b" * 900}}) == ("a b" * 900)[:200]


async def exchange(count: int) -> list[tuple[str, dict, str]]:
    """Serve *count* requests by a pair of vLLM; return role, body and name of all that arrived, in order."""
    seen = []

    async def listen(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        role = "prefill" if body["max_tokens"] == 1 else "decode"
        seen.append((role, body, request.headers.get("X-Request-Id", "")))
        if role == "prefill":
            return web.json_response({"kv_transfer_params": {"remote_request_id": f"cmpl-{seen[-1][2]}-0"}})
        return web.Response(body=chunk(1, 2, last=True), content_type="text/event-stream")

    async with openai(listen) as url, session(key="", connections=4, connect_timeout=10.0) as opened:
        servers = [LiveServer(role, f"{role}0", url) for role in ("prefill", "decode")]
        pair = VllmPair(VLLM, "round_robin", False, servers[:1], servers[1:])
        for _ in range(count):
            await pair.serve(opened, b"[1,2,3]", Request(0.0, 3, 2), RequestRow())
    return seen


def test_both_halves_share_a_request_name_that_is_unique():
    # the push connector of vLLM 0.26 pairs decode's blocks and prefill's by it, less "-" and 8 digits at the end
    seen = asyncio.run(exchange(2))
    assert [role for role, _, _ in seen] == ["prefill", "decode"] * 2
    first, again, other, _ = [name for _, _, name in seen]
    assert first == again != other
    assert "-" not in first
    assert seen[1][1]["kv_transfer_params"] == {"remote_request_id": f"cmpl-{first}-0"}


def metrics(counts: tuple[int, int], total: float, counter: str, tokens: tuple[int, ...], running: int) -> Page:
    """Return a page of vLLM's with a histogram, a counter called *counter* by its type, and a gauge."""
    name, labels = "vllm:request_queue_time_seconds", 'engine="0",model_name="m"'
    buckets = zip(("0.3", "0.5", "+Inf"), (*counts, counts[-1]), strict=True)
    lines = [
        f"# HELP {name} Histogram of time spent in WAITING phase for request.",
        f"# TYPE {name} histogram",
        *(f'{name}_bucket{{engine="0",le="{bound}",model_name="m"}} {count}.0' for bound, count in buckets),
        f"{name}_count{{{labels}}} {counts[-1]}.0",
        f"{name}_sum{{{labels}}} {total}",
        f"# TYPE {counter} counter",
        *(f'vllm:prompt_tokens_total{{engine="{n}",model_name="m"}} {count}.0' for n, count in enumerate(tokens)),
        "# TYPE vllm:num_requests_running gauge",
        f"vllm:num_requests_running{{{labels}}} {running}.0",
        "this is no sample",
    ]
    return parse("\n".join(lines))


BEFORE = metrics((1, 1), 0.1, "vllm:prompt_tokens_total", (100, 20), 3)
AFTER = metrics((3, 5), 1.3, "vllm:prompt_tokens", (300,), 0)  # whose type does not have the suffix


def test_a_difference_is_what_happened_in_between():
    assert BEFORE.counters == {"vllm:prompt_tokens_total": 120.0}  # of all labels
    assert BEFORE.gauges == {"vllm:num_requests_running": 3.0}
    page = difference(BEFORE, AFTER)
    assert page.counters == {"vllm:prompt_tokens_total": 180.0}
    assert page.gauges == {"vllm:num_requests_running": 0.0}
    waits = page.histograms["vllm:request_queue_time_seconds"]
    assert (waits.count, waits.mean) == (4.0, pytest.approx(0.3))
    assert waits.quantile(0.5) == pytest.approx(0.3)  # two of four are at most 0.3
    assert waits.quantile(0.75) == pytest.approx(0.4)
    assert difference(Page(), BEFORE).counters == BEFORE.counters
    assert Histogram(9.0, 2.0, {1.0: 1.0, float("inf"): 2.0}).quantile(0.99) == 1.0
    assert (Histogram().quantile(0.5), Histogram().mean) == (None, None)
