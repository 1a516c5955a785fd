"""`experiment=serve` on the real engines: hybrid models between unlike ranks, every byte compared on arrival."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.serve import ServeOptions, run
from pdsim.compute.forward import Compute
from pdsim.core.progress import silent
from pdsim.models.parallel import Parallel, Side
from pdsim.results.record import Result
from pdsim.serving.settings import Kv, SchedulerLimits
from tests.experiments.test_serve_layouts import HYBRID, HYBRID_MLA, SMALL
from tests.support.configs import EIGHT, ENGINE, LOOPBACK, make_config
from tests.support.engines import COLLECTIVE, REAL, engine, make_target
from tests.support.serving import serve

ENGINES = [pytest.param(name, marks=getattr(pytest.mark, name.split("_")[0])) for name in REAL[:2]]


def moved(result: Result) -> int:
    return sum(record.nbytes for record in result.transfers)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize(
    ("prefill", "decode", "model"),
    [
        (Side(tp=2), Side(tp=1), HYBRID),
        (Side(tp=1), Side(tp=2), HYBRID),
        (Side(tp=1, pp=2), Side(tp=1), HYBRID_MLA),
        (Side(tp=1, cp=2), Side(tp=1), HYBRID_MLA),
    ],
    ids=["tp 2 to 1", "tp 1 to 2", "pp 2 to 1", "cp 2 to 1"],
)
def test_keys_values_state_and_metadata_arrive_as_they_were_sent(name, prefill, decode, model):
    config = make_config(
        Path("unused"),
        target="real",
        hw=LOOPBACK,
        backend=engine(name),
        model=model,
        parallel=Parallel(prefill=prefill, decode=decode),
        experiment=ServeOptions(deadline=30.0),
        workload=replace(SMALL, count=4),
        kv=Kv(page_size=16, pool=1 << 20, all_cp_ranks=True),
        scheduler=SchedulerLimits(chunk=64, decode_batch=4),
        compute=Compute(scale=0.1),
    )
    result = run(config, make_target(name), silent)
    assert result.failures == []
    assert set(result.requests["status"]) == {"ok"}
    model_run = serve(replace(config, target="model", hw=EIGHT, backend=ENGINE))
    assert moved(result) == moved(model_run) == sum(model_run.requests["nbytes"])
    # whichever of the two sides reports first that a request is over
    assert result.requests["nbytes"] == model_run.requests["nbytes"]


@pytest.mark.parametrize("gather", ["plain", "symmetric"])
@pytest.mark.parametrize("name", ENGINES)
def test_context_parallel_ranks_gather_through_gloo(name: str, gather: str):
    pytest.importorskip("torch")
    library = replace(COLLECTIVE, name="gloo", implementation="gloo", pool=1 << 20)
    config = make_config(
        Path("unused"),
        target="real",
        hw=LOOPBACK,
        backend=engine(name),
        model=HYBRID,
        parallel=Parallel(prefill=Side(tp=1, cp=2), decode=Side(tp=2)),
        collective=library,
        experiment=ServeOptions(deadline=60.0),
        workload=replace(SMALL, count=4),
        kv=Kv(page_size=16, pool=1 << 20, all_cp_ranks=True, gather=gather),
        scheduler=SchedulerLimits(chunk=64, decode_batch=4),
        compute=Compute(scale=0.1),
    )
    target = make_target(name)
    target.collective = library  # type: ignore[attr-defined]
    result = run(config, target, silent)
    assert result.failures == []
    engines = {record.engine for record in result.transfers if record.operation == "all_gather"}
    assert engines == {f"gloo:{gather}"}


@pytest.mark.parametrize("name", ENGINES)
def test_users_leave_as_the_workload_says(name):
    config = make_config(
        Path("unused"),
        target="real",
        hw=LOOPBACK,
        backend=engine(name),
        model=HYBRID,
        experiment=ServeOptions(deadline=30.0),
        workload=replace(SMALL, count=12, aborts=0.6, patience=0.002),
        kv=Kv(page_size=16, pool=1 << 20),
        scheduler=SchedulerLimits(chunk=64, decode_batch=4),
    )
    result = run(config, make_target(name), silent)
    assert result.failures == []
    patience = result.requests["patience"]
    assert patience == serve(replace(config, target="model", hw=EIGHT, backend=ENGINE)).requests["patience"]
    left = {
        status.partition(":")[0] for status, wait in zip(result.requests["status"], patience, strict=True) if wait
    }
    stayed = {status for status, wait in zip(result.requests["status"], patience, strict=True) if wait is None}
    assert "Aborted" in left
    assert (stayed, left - {"ok"}) == ({"ok"}, {"Aborted"})
