"""Bodies and chunks of each HTTP API.  The chunks are as vLLM 0.32.0, llama.cpp and SGLang 0.5.12 send them."""

import json

import pytest

from backends.live.formats import OpenAiChat, OpenAiCompletions, SglangGenerate, reason

VLLM = OpenAiCompletions("tiny", ignore_eos=True, continuous=True, request={"top_k": 1})


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


def test_a_count_of_vllm_is_of_all_tokens_so_far():
    chunk = VLLM.chunk(
        b'{"id":"cmpl-1","object":"text_completion","created":1,"model":"tiny","choices":[{"index":0,"text":"",'
        b'"logprobs":null,"finish_reason":null}],"usage":{"prompt_tokens":10,"total_tokens":13,"completion_tokens":3}}'
    )
    assert (chunk.new, chunk.total, chunk.finish, chunk.reported) == (0, 3, "", {"prompt_tokens": 10})


def test_times_of_llama_cpp_are_kept():
    chunk = OpenAiCompletions("m", ignore_eos=True, continuous=False, request={}).chunk(
        b'{"choices":[{"text":"","index":0,"finish_reason":"length"}],"usage":{"completion_tokens":3,'
        b'"prompt_tokens":4},"timings":{"prompt_ms":27.859,"predicted_ms":0.75}}'
    )
    assert (chunk.new, chunk.total, chunk.finish) == (0, 3, "length")
    assert chunk.reported == {"prompt_ms": 27.859, "predicted_ms": 0.75, "prompt_tokens": 4}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"error":{"message":"too\\nlong","type":"BadRequestError","code":400}}', "too long"),
        (b'{"object":"error","message":"gone"}', "gone"),
        (b'{"error":"no"}', "no"),
    ],
)
def test_an_error_in_a_stream_is_told(data, message):
    assert VLLM.chunk(data).error == message


def test_sglang_takes_ids_and_meets_in_a_room():
    form = SglangGenerate(ignore_eos=True, prompts="ids", request={})
    body = json.loads(form.body(b"[1,2]", 4, stream=True, extra={"bootstrap_room": 7}))
    assert body["input_ids"] == [1, 2]
    assert body["sampling_params"] == {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 4}
    assert body["bootstrap_room"] == 7


def test_sglang_counts_and_reports_its_times_at_the_end():
    form = SglangGenerate(ignore_eos=True, prompts="ids", request={})
    under_way = form.chunk(b'{"output_ids":[7,8],"meta_info":{"id":"x","finish_reason":null,"completion_tokens":2}}')
    assert (under_way.total, under_way.finish, under_way.reported) == (2, "", {})
    last = form.chunk(
        b'{"output_ids":[7,8,9],"meta_info":{"id":"x","finish_reason":{"type":"length","length":3},'
        b'"completion_tokens":3,"queue_time":0.25,"e2e_latency":1.5}}'
    )
    assert (last.total, last.finish) == (3, "length")
    assert last.reported == {"completion_tokens": 3, "queue_time": 0.25, "e2e_latency": 1.5}


def test_an_abort_of_sglang_is_an_error():
    form = SglangGenerate(ignore_eos=True, prompts="ids", request={})
    chunk = form.chunk(
        b'{"meta_info":{"finish_reason":{"type":"abort","message":"KVTransferError(bootstrap_room=7): gone"}}}'
    )
    assert chunk.error == "KVTransferError(bootstrap_room=7): gone"


def test_reasons_are_one_short_line():
    assert reason({"detail": {"message": "a\n b"}}) == "a b"
    assert len(reason("x" * 900)) == 200
