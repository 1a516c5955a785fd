"""Prompts, bodies and chunks of each HTTP API, and metrics, as vLLM 0.32.0, llama.cpp and SGLang 0.5.12 send."""

import asyncio
import json

import numpy as np
import pytest
from aiohttp import web

from backends.live.formats import OpenAiChat, OpenAiCompletions, SglangGenerate, reason
from backends.live.http import Http, LiveServer, session
from backends.live.metrics import Histogram, Page, difference, parse
from backends.live.prompts import encoded, token_ids
from backends.live.routes import RequestRow, VllmPair
from pdsim.serving.workload import Request

VLLM = OpenAiCompletions("tiny", ignore_eos=True, continuous=True, request={"top_k": 1})
SGLANG = SglangGenerate(ignore_eos=True, prompts="ids", request={})


def test_equal_hash_ids_are_equal_blocks_and_the_rest_differs():
    one = token_ids(Request(0.0, 1300, 1, None, (4, 9, 11)), 0, 7, 32000)
    two = token_ids(Request(0.0, 1400, 1, None, (4, 9, 12)), 1, 7, 32000)
    assert (len(one), len(two)) == (1300, 1400)
    assert np.array_equal(one[:1024], two[:1024])
    assert not np.array_equal(one[1024:], two[1024:1300])
    assert len(token_ids(Request(0.0, 700, 1, None, (1,)), 0, 0, 512)) == 700  # longer than its ids


def test_a_prompt_without_hash_ids_is_its_own_and_ordinary():
    request = Request(0.0, 5000, 1)
    ids = token_ids(request, 3, 7, 512)
    assert np.array_equal(ids, token_ids(request, 3, 7, 512))
    assert not np.array_equal(ids, token_ids(request, 4, 7, 512))
    assert not np.array_equal(ids, token_ids(request, 3, 8, 512))
    assert (ids.min() >= 32, ids.max() < 512) == (True, True)  # special tokens are below
    assert json.loads(encoded(request, 3, 7, 512, "ids")) == ids.tolist()
    assert len(json.loads(encoded(request, 3, 7, 512, "text")).split()) == 5000


def test_a_completion_asks_for_ids_counts_and_what_the_user_adds():
    body = json.loads(VLLM.body(b"[5,6,7]", 9, stream=True, extra={"kv_transfer_params": {"a": 1}}))
    assert body == {
        "prompt": [5, 6, 7],
        "model": "tiny",
        "temperature": 0.0,
        "ignore_eos": True,
        "max_tokens": 9,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "top_k": 1,
        "kv_transfer_params": {"a": 1},
    }
    assert "stream" not in json.loads(VLLM.body(b"[5]", 1, stream=False))


def test_a_chat_wraps_its_prompt_in_one_message():
    form = OpenAiChat("m", ignore_eos=False, continuous=False, request={})
    body = json.loads(form.body(b'"the of"', 3, stream=True))
    assert body["messages"] == [{"role": "user", "content": "the of"}]
    assert "ignore_eos" not in body
    assert form.chunk(b'{"choices":[{"delta":{"role":"assistant","content":""}}]}').new == 0
    assert form.chunk(b'{"choices":[{"delta":{"content":"the"}}]}').new == 1


def test_sglang_takes_ids_and_meets_in_a_room():
    body = json.loads(SGLANG.body(b"[1,2]", 4, stream=True, extra={"bootstrap_room": 7}))
    assert body["input_ids"] == [1, 2]
    assert body["sampling_params"] == {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 4}
    assert body["bootstrap_room"] == 7


@pytest.mark.parametrize(
    ("form", "data", "chunk"),
    [
        (
            VLLM,
            b'{"id":"cmpl-1","object":"text_completion","created":1,"model":"tiny","choices":[{"index":0,"text":"",'
            b'"logprobs":null,"finish_reason":null}],'
            b'"usage":{"prompt_tokens":10,"total_tokens":13,"completion_tokens":3}}',
            (0, 3, "", {"prompt_tokens": 10}, ""),
        ),
        (
            OpenAiCompletions("llama.cpp", ignore_eos=True, continuous=False, request={}),
            b'{"choices":[{"text":"","index":0,"finish_reason":"length"}],"usage":{"completion_tokens":3,'
            b'"prompt_tokens":4},"timings":{"prompt_ms":27.859,"predicted_ms":0.75}}',
            (0, 3, "length", {"prompt_ms": 27.859, "predicted_ms": 0.75, "prompt_tokens": 4}, ""),
        ),
        (
            SGLANG,
            b'{"output_ids":[7,8],"meta_info":{"id":"x","finish_reason":null,"completion_tokens":2}}',
            (0, 2, "", {}, ""),
        ),
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
    assert reason({"detail": {"message": "a\n b"}}) == "a b"
    assert len(reason("x" * 900)) == 200


async def exchange(count: int) -> list[tuple[str, dict, str]]:
    """Serve *count* requests by a pair of vLLM; return role, body and name of all that arrived, in order."""
    seen = []

    async def listen(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        role = "prefill" if body["max_tokens"] == 1 else "decode"
        seen.append((role, body, request.headers.get("X-Request-Id", "")))
        if role == "prefill":
            return web.json_response({"kv_transfer_params": {"remote_request_id": f"cmpl-{seen[-1][2]}-0"}})
        chunk = {"choices": [{"text": "a", "token_ids": [1, 2], "finish_reason": "length"}]}
        text = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
        return web.Response(text=text, content_type="text/event-stream")

    app = web.Application()
    app.router.add_post("/v1/completions", listen)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    (port,) = {address[1] for address in runner.addresses}
    servers = [LiveServer(name, f"http://127.0.0.1:{port}") for name in ("prefill0", "decode0")]
    pair = VllmPair(VLLM, "round_robin", False, servers[:1], servers[1:])
    async with session(key="", connections=4, connect_timeout=10.0) as opened:
        for _ in range(count):
            await pair.serve(Http(opened), b"[1,2,3]", Request(0.0, 3, 2), RequestRow())
    await runner.cleanup()
    return seen


def test_both_halves_share_a_request_name_that_is_unique():
    # the push connector of vLLM 0.26 pairs decode's blocks and prefill's by it, less "-" and 8 digits at the end
    seen = asyncio.run(exchange(2))
    assert [role for role, _, _ in seen] == ["prefill", "decode"] * 2
    first, again, other, _ = [name for _, _, name in seen]
    assert first == again != other
    assert "-" not in first
    assert seen[1][1]["kv_transfer_params"] == {"remote_request_id": f"cmpl-{first}-0"}


# --- metrics -------------------------------------------------------------------------------------------------------


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


def test_labels_are_summed_and_kinds_told_apart():
    assert BEFORE.counters == {"vllm:prompt_tokens_total": 120.0}
    assert BEFORE.gauges == {"vllm:num_requests_running": 3.0}
    assert BEFORE.histograms["vllm:request_queue_time_seconds"].count == 1.0


def test_a_difference_is_what_happened_in_between():
    page = difference(BEFORE, AFTER)
    assert page.counters == {"vllm:prompt_tokens_total": 180.0}
    assert page.gauges == {"vllm:num_requests_running": 0.0}
    waits = page.histograms["vllm:request_queue_time_seconds"]
    assert (waits.count, waits.mean) == (4.0, pytest.approx(0.3))
    assert waits.quantile(0.5) == pytest.approx(0.3)  # two of four are at most 0.3
    assert waits.quantile(0.75) == pytest.approx(0.4)
    assert difference(Page(), BEFORE).counters == BEFORE.counters


def test_quantiles_end_at_the_last_bound():
    assert Histogram(9.0, 2.0, {1.0: 1.0, float("inf"): 2.0}).quantile(0.99) == 1.0
    assert (Histogram().quantile(0.5), Histogram().mean) == (None, None)
