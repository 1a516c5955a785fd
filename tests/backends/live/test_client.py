"""The client against llama.cpp's server: what it measures, and how everything that goes wrong becomes a row."""

import threading
from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from backends.live.live_deployment import deployed
from pdsim.config.compose import compose
from pdsim.core.errors import BackendUnavailable
from pdsim.serving.workload import Request
from tests.backends.live.conftest import KEY, free_port

pytestmark = pytest.mark.live

NO_CACHE = "live.request={cache_prompt: false}"


def config(*words):
    return compose(["target=live", "hw=loopback", "live.vocabulary=512", "live.warmup=0", NO_CACHE, *words])


@pytest.fixture
def serve(tmp_path):
    """Serve requests on the servers of a configuration; *ended* is called with how many have ended."""

    def run(settings, *requests, ended=lambda _: None):
        with deployed(settings, tmp_path, lambda *_: None) as deployment:
            return deployment.serve(requests, lambda share, _: ended(round(share * len(requests))))

    return run


@pytest.fixture
def at_llama(llama, serve):
    return lambda words, *requests: serve(config(f"live.url={llama.url}", *words), *requests)


def test_a_request_gets_exactly_its_tokens_in_order_of_time(at_llama, tmp_path):
    served = at_llama([], Request(0.0, 100, 12), Request(0.05, 37, 1))
    first, second = served.rows
    assert [(row.status, row.tokens) for row in served.rows] == [("ok", 12), ("ok", 1)]
    assert served.start <= first.sent <= first.first <= first.last
    assert second.sent >= served.start + 0.05
    assert sum(first.gaps) == pytest.approx(first.last - first.first)
    assert first.finish == "length"
    assert (first.reported["prompt_tokens"], second.reported["prompt_tokens"]) == (100, 37)
    assert served.servers == {"server0": "llama.cpp"}
    # what the server counts is read before and after
    assert served.reported["server0"].counters["llamacpp:prompt_tokens_total"] == 137
    samples = pq.read_table(tmp_path / "metrics.parquet").to_pylist()
    assert {row["server"] for row in samples} == {"server0"}
    assert "llamacpp:requests_processing" in {row["metric"] for row in samples}


def test_prompts_of_equal_hash_ids_hit_the_servers_prefix_cache(at_llama):
    requests = Request(0.0, 700, 2, None, (5, 6)), Request(1.5, 700, 2, None, (5, 9)), Request(3.0, 700, 2)
    served = at_llama(["live.request={cache_prompt: true}", "seed=71"], *requests)
    assert [row.status for row in served.rows] == ["ok"] * 3
    cached = [row.reported["cache_n"] for row in served.rows]
    assert 0 <= cached[0] < 16
    assert 500 <= cached[1] <= 512  # the block that both have; a server may round
    assert cached[2] < 16


def test_a_text_is_counted_by_the_server_or_too_long(at_llama):
    long, short = at_llama(["live.prompts=text"], Request(0.0, 3000, 4), Request(0.0, 20, 4)).rows
    assert long.status.startswith("HTTP 400: server0: ")
    assert "context size" in long.status
    assert (short.status, short.reported["prompt_tokens"] > 20) == ("ok", True)


def test_a_user_who_leaves_and_a_deadline_end_the_stream(at_llama):
    (left,) = at_llama([], Request(0.0, 1000, 1000, 0.15)).rows
    assert left.status == "Aborted: the user left after 0.15 s"
    assert left.tokens < 1000
    (late,) = at_llama(["live.timeout=0.1s"], Request(0.0, 1000, 1000)).rows
    assert late.status.startswith("Timeout: ")
    assert late.status.endswith("of 1000 tokens within 0.1 s")


def test_a_request_that_finds_no_connection_free_waits(at_llama):
    first, second = at_llama(["live.connections=1"], Request(0.0, 400, 100), Request(0.0, 10, 2)).rows
    assert [first.status, second.status] == ["ok", "ok"]
    assert second.sent >= first.last


@pytest.mark.slow
def test_the_key_comes_from_the_environment(make_llama, serve, monkeypatch):
    settings = config(f"live.url={make_llama(key=KEY).url}", "live.key_variable=TINY_KEY", "live.model=tiny")
    monkeypatch.setenv("TINY_KEY", KEY)
    assert serve(settings, Request(0.0, 10, 2)).rows[0].status == "ok"
    monkeypatch.delenv("TINY_KEY")
    assert serve(settings, Request(0.0, 10, 2)).rows[0].status == "HTTP 401: server0: Invalid API Key"
    with pytest.raises(BackendUnavailable, match="HTTP 401; check the address and the API key"):
        serve(replace(settings, live=replace(settings.live, model="")), Request(0.0, 10, 2))


@pytest.mark.slow
def test_a_server_that_dies_and_returns_leaves_rows_with_reasons(make_llama, serve):
    port = free_port()
    server = make_llama(port=port)
    requests = [Request(0.0, 10, 2), Request(1.0, 1000, 1000), Request(3.0, 10, 2), Request(12.0, 10, 2)]
    threads = {
        1: threading.Timer(1.2, server.kill),  # the next one is under way a second after the first
        3: threading.Timer(0.0, make_llama, kwargs={"port": port}),
    }

    def ended(number):
        if number in threads:
            threads[number].start()

    served = serve(config(f"live.url={server.url}", "live.sample_every=0.1s"), *requests, ended=ended)
    for thread in threads.values():
        thread.join()
    ok, lost, refused, later = (row.status for row in served.rows)
    assert (ok, later) == ("ok", "ok")
    assert lost.startswith("ServerLost: server0 broke the connection")
    assert refused.startswith("Refused: server0 cannot be reached")
    assert "server0 was started again while it was measured" in served.notes


def test_nobody_at_the_address_is_said_before_anything_is_sent(serve):
    url = f"http://user:secret@127.0.0.1:{free_port()}"
    told = r"server0 at http://127\.0\.0\.1:\d+ does not answer: \[Errno 111\] Connect call failed"
    with pytest.raises(BackendUnavailable, match=told) as caught:
        serve(config(f"live.url={url}"), Request(0.0, 10, 2))
    assert "secret" not in str(caught.value)


@pytest.mark.slow
def test_two_servers_share_the_requests_by_tokens_outstanding(make_llama, serve):
    settings = config(f"live.url=[{make_llama().url},{make_llama().url}]")
    served = serve(settings, Request(0.0, 900, 300), Request(0.05, 20, 2), Request(0.1, 20, 2))
    assert [row.decode for row in served.rows] == ["server0", "server1", "server1"]


def test_a_server_outside_a_pair_is_detected(llama, serve):
    pair = f"live.prefill={llama.url}", f"live.decode={llama.url}"
    (vllm,) = serve(config("live.engine=vllm", *pair), Request(0.0, 10, 2)).rows
    assert vllm.status == "Error: prefill0 answered without kv_transfer_params; start it with --kv-transfer-config"
    (sglang,) = serve(config("live.engine=sglang", *pair), Request(0.0, 10, 2)).rows
    assert sglang.status.startswith("HTTP 404: ")
