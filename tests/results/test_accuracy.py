# SPDX-License-Identifier: Apache-2.0
"""Which measured servers the interval of a run is from, and how it is said."""

from dataclasses import asdict
from types import SimpleNamespace

import pytest

from pdsim.config.compose import compose
from pdsim.results.evidence import SERVERS, lines, of_servers, of_transfers

ONE = "for one transfer at a time, 1.13 from 10 MB on"
THREADED = "for one transfer at a time, 1.3 from 10 MB on, 2.88 for others at once, as sealed predictions (thread)"
COLOCATED = "experiment.deployment=colocated"


@pytest.mark.parametrize(
    ("words", "level"),
    [
        (("hw=2xh200", "engine=vllm", "model=qwen3-8b"), "measured"),
        (("hw=1xh100", "engine=sglang", "model=qwen3-8b", COLOCATED), "measured"),
        (("hw=1xh200", "engine=vllm", "model=qwen3-30b-a3b", COLOCATED), "measured"),
        (("hw=2xh200", "engine=vllm", "model=qwen3-30b-a3b"), "table"),  # pairs were of dense models
        (("hw=8xh200", "engine=sglang", "model=llama-3.1-70b", "parallel=tp4"), "table"),
        (("hw=1xb200", "engine=vllm", "model=qwen3-8b", COLOCATED), "table"),
        (("hw=8xh20",), "roofline"),
        (("hw=2x8xmi355x", "engine=sglang"), "roofline"),
        (("hw=8xh200", "experiment=transfer"), None),
        (("hw=loopback", "model=tiny", "backend=mooncake_tcp"), None),
    ],
)
def test_an_interval_follows_from_what_was_measured(words, level):
    assert of_servers(compose(list(words))) == (SERVERS[level] if level else None)


def test_an_interval_is_a_factor_both_ways():
    metrics = {"ttft_p50_s": 0.1, "tpot_p50_s": 0.01, "e2e_p50_s": None, "share_transfer": 0.2}
    about = asdict(SERVERS["measured"])
    (text,) = lines(about, metrics, between=False)
    assert text.startswith("95 % interval: TTFT p50 60.6 to 165 ms, TPOT p50 8 to 12.5 ms, by 158 loads of ")
    assert "not known" in lines(about, metrics, between=True)[0]
    assert lines(about, metrics | {"share_transfer": 0.05}, between=True) == [text]
    assert lines(about, dict.fromkeys(metrics), between=False) == []  # no request was served


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("hw=8xh200 backend=nvlink", f"over and times 1.34 {ONE}, 1.36 for several"),
        ("hw=8xh200 backend=nixl backend.options.progress_thread=true", f"over and times 1.36 {THREADED}"),
        ("hw=8xh20", "not known, no transfers of mooncake_nvlink on H20 were"),
        ("hw=2x8xh200", "not known, no transfers of mooncake between nodes were"),
    ],
)
def test_transfers_say_what_sealed_predictions_were_off(words, text):
    config = compose(["experiment=transfer", *words.split()])
    (one,) = of_transfers(config, [SimpleNamespace(operation="write")])
    assert one.startswith(f"95 % interval: {text} ")
    assert of_transfers(config, [SimpleNamespace(operation="all_gather")]) == []
