"""`pdsim run target=live`, end to end, and its comparison with the model."""

import json
import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pdsim.results.schema import INSTANTS, LIVE, REQUESTS

LLAMA = ("hw=loopback", "live.vocabulary=512", "live.request={cache_prompt: false}")


def only(folder: Path) -> Path:
    (found,) = folder.iterdir()
    return found


@pytest.mark.live
def test_a_live_run_has_every_column(llama, tmp_path, pdsim_prints):
    words = ["workload.count=6", "workload.rate=20", *LLAMA, f"live.url={llama.url}/v1/"]
    for target in ("live", "model"):
        pdsim_prints("run", "-q", f"target={target}", *words, f"output={tmp_path / target}")
    live, model = only(tmp_path / "live"), only(tmp_path / "model")
    rows = pq.read_table(live / "requests.parquet").to_pylist()
    modelled = pq.read_table(model / "requests.parquet").to_pylist()
    assert [*rows[0]] == [column.name for column in (*REQUESTS, *LIVE)]
    assert [*modelled[0]] == [column.name for column in (*REQUESTS, *INSTANTS)]
    for name in ("id", "arrival", "input", "output"):
        assert [row[name] for row in rows] == [row[name] for row in modelled]
    for row in rows:
        assert row["status"] == "ok"
        assert row["tokens"] == row["output"]
        assert 0 < row["ttft"] <= row["e2e"]
        assert row["sent"] >= row["arrival"]
    about = json.loads((live / "run.json").read_text())
    assert about["evidence"]["weakest"] == "measured"
    assert about["engine"] == ["llama.cpp"]
    metrics = json.loads(pdsim_prints("compare", "--json", model, live))["metrics"]
    assert all(value > 0 for name in ("ttft_p50_s", "tpot_p50_s", "e2e_p50_s") for value in metrics[name]["values"])


@pytest.mark.live
def test_requests_that_fail_are_named_and_make_the_run_partial(llama, tmp_path, pdsim_says):
    words = ["workload.count=3", "workload.rate=20", "workload.input_mean=4000", "workload.input_cv=0"]
    status, out, _ = pdsim_says("run", "target=live", *words, *LLAMA, f"live.url={llama.url}", f"output={tmp_path}")
    assert (status, "request 0: HTTP 400: server0: " in out) == (1, True)
    rows = pq.read_table(only(tmp_path) / "requests.parquet").to_pylist()
    assert {(row["ttft"], row["tokens"]) for row in rows} == {(None, 0)}


@pytest.mark.live
@pytest.mark.skipif("PDSIM_VLLM_PYTHON" not in os.environ, reason="PDSIM_VLLM_PYTHON names no interpreter with vLLM")
@pytest.mark.timeout(600)
def test_a_pair_of_vllm_is_launched_hands_over_and_ends(tmp_path, pdsim_prints):
    words = ["target=live", "hw=loopback", "backend=nixl_tcp", "live.engine=vllm", "live.launch=true"]
    words += ["kv.page_size=32", "scheduler.chunk=2048", "scheduler.decode_batch=16", "kv.pool=512MiB"]
    words += [f"live.python={os.environ['PDSIM_VLLM_PYTHON']}", "live.arguments=['--enforce-eager']"]
    words += ["live.environment={VLLM_CPU_OMP_THREADS_BIND: nobind, OMP_NUM_THREADS: '1'}", f"output={tmp_path}"]
    pdsim_prints("run", "-q", *words)
    folder = only(tmp_path)
    rows = pq.read_table(folder / "requests.parquet").to_pylist()
    assert {row["status"] for row in rows} == {"ok"}
    assert all(row["prefilled"] > 0 and row["handoff"] > 0 for row in rows)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["metrics"]["decode0_transfer_mean_s"]["value"] > 0
    assert "KV" in (folder / "decode0.log").read_text()


def test_other_experiments_do_not_run_live(tmp_path, pdsim_refuses):
    words = ["target=live", "experiment=transfer", "live.url=http://127.0.0.1:9", f"output={tmp_path / 'none'}"]
    said = "experiment=transfer does not run on target=live; use target=model or target=real"
    assert said in pdsim_refuses("run", *words)
    assert not (tmp_path / "none").exists()
