"""The campaign's loads can be composed, sliced and measured, here on one llama.cpp server."""

import json

import pyarrow.parquet as pq
import pytest

from backends.live.commands import launches
from backends.live.live_deployment import deployed
from benchmarks import live_campaign, live_variants
from benchmarks.live_campaign import ARGUMENTS, BLIND, ENGINES, GPUS, LOADS, Campaign
from pdsim.config.compose import compose
from pdsim.serving.workload import load
from tests.backends.live.test_client import NO_CACHE


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_every_load_of_the_campaign_is_a_workload_that_the_model_can_run(engine):
    for name, words in live_campaign.scaled(",".join(LOADS), 5.0, 1.0):
        config = compose([*ENGINES[engine], *GPUS, *ARGUMENTS[engine], *words])
        requests = load(config.workload, config.seed, config.model.context)
        assert requests[-1].arrival == pytest.approx(5.0, rel=0.8)
        assert (len({request.input for request in requests}) > 1) == name.startswith("mixed")


def test_a_slice_of_a_trace_has_what_fits_at_half_the_capacity(tmp_path):
    trace = tmp_path / "whole.jsonl"
    rows = [
        {"timestamp": 1000 * n, "input_length": 1000 * n, "output_length": 10, "hash_ids": [n]} for n in range(1, 9)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = live_campaign.trace_load(trace, tmp_path, 4, 5000, 2000.0)
    assert words[1] == f"workload.trace={tmp_path / 'trace.jsonl'}"
    requests = load(compose(["model=tiny", "hw=loopback", *words]).workload, 0, 8192)
    assert [request.input for request in requests] == [1000, 2000, 3000, 4000]
    assert sum(request.input for request in requests) / requests[-1].arrival == pytest.approx(1000.0)


@pytest.mark.parametrize(("plan", "name"), [(p, n) for p, plan in live_variants.PLANS.items() for n in plan])
def test_every_variant_starts_servers_whose_pool_is_the_one_that_is_predicted(plan, name, tmp_path):
    variant = live_variants.PLANS[plan][name]
    line = live_variants.command(variant, tmp_path, 60.0, tmp_path / "trace", 0)
    asked = live_campaign._options(line[3:])
    own = [
        *ENGINES[variant.engine],
        *GPUS,
        *ARGUMENTS[variant.engine],
        f"live.engine={variant.engine}",
        *("target=live", "live.prefill=http://a:1", "live.decode=http://b:1"),
    ]
    config = compose([*own, *asked.words])
    servers = launches(config, variant.engine, tmp_path)
    model = config.model
    token = 2 * model.dtype_bytes * model.layers * model.kv_heads * model.head_dim
    sides = (config.parallel.prefill, config.parallel.decode)
    amounts = [
        variant.pool // (side.tp if variant.engine == "vllm" else token) for side in sides
    ]  # of a GPU, or all
    assert [str(n) in server.command for n, server in zip(amounts, servers, strict=True)] == [True, True]
    assert variant.token == token
    loads = {name.partition("@")[0] for name in asked.loads.split(",")}  # after an @, a repeat
    assert loads == {"none"} or loads <= set(BLIND)
    assert len({server.port for server in servers}) == 2
    model = [word for word in (*variant.words, *variant.model) if not word.startswith("live.")]
    if variant.predicted:
        compose([f"hw={variant.hw}", *GPUS[1:], *live_variants._system(variant.engine, variant), *model])


def test_a_change_is_the_ratio_of_what_both_have():
    one = {"loads": {"a": {"metrics": {"x": 2.0, "y": None}}, "b": {"metrics": {"x": 1.0}}}}
    other = {"loads": {"a": {"metrics": {"x": 3.0, "y": 1.0}}, "c": {"metrics": {"x": 1.0}}}}
    assert live_variants.changed(one, other) == {"a": {"x": 1.5}}


@pytest.mark.live
def test_singles_and_loads_are_kept_with_what_the_server_counted(llama, tmp_path):
    base = ["hw=loopback", "live.vocabulary=512", "live.warmup=0", NO_CACHE, f"live.url={llama.url}"]
    config = compose([*base, "target=live"])
    campaign = Campaign(tmp_path, {"not_run": {}}, 60.0)
    loads = {"few": ["workload=poisson", "workload.count=4", "workload.rate=20", "workload.input_mean=100"]}
    loads |= {"endless": ["workload=poisson", "workload.count=100", "workload.rate=0.1"]}
    with deployed(config, tmp_path, lambda *_: None) as server:
        live_campaign._run_singles(campaign, config, server, [20, 40], 2)
        live_campaign._run_loads(campaign, server, base, loads)
    assert [(one["length"], one["repetition"]) for one in campaign.singles] == [
        (20, -1), (20, 0), (20, 1), (40, -1), (40, 0), (40, 1),
    ]  # fmt: skip
    singles = json.loads((tmp_path / "singles.json").read_text())
    assert singles[4]["row"]["status"] == "ok"
    assert singles[4]["reported"]["server0"]["counters"]["llamacpp:prompt_tokens_total"] == 40
    rows = pq.read_table(tmp_path / "requests.parquet").to_pylist()
    assert {row["load"] for row in rows} == {"warmup-20", "single-20", "warmup-40", "single-40", "few"}
    assert list(json.loads((tmp_path / "summary.json").read_text())) == ["few"]
    assert campaign.about["not_run"]["endless"].startswith("needs ")
    assert campaign.failures == 0
