"""`experiment=handoff`: one request at a time, in every way, of exact length on the model and intact on both."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.handoff import HandoffOptions, Way, check, run, specs
from experiments.validate.steps import values
from pdsim.config import Config
from pdsim.config.compose import compose
from pdsim.core.errors import ConfigError
from pdsim.core.files import data
from pdsim.core.progress import silent
from pdsim.hardware.machine import Copies
from pdsim.kv.policy import Policy
from pdsim.results.record import Result
from pdsim.serving.settings import Kv
from pdsim.sim.model import Model
from pdsim.transfer.job import Place, Target
from pdsim.validation.sealed import values_in
from tests.support.configs import EIGHT, LOOPBACK, make_config
from tests.support.engines import MARKED, engine, make_target
from tests.support.serving import GQA


def configured(**options: Any) -> Config:
    settings = {"hw": EIGHT, "model": GQA, "kv": Kv(page_size=16), "policy": Policy(queues=2, staging=True)}
    experiment = HandoffOptions(**{"tokens": (64, 256), "repeat": 4} | options)
    return make_config(Path("unused"), **settings, experiment=experiment, memory="tracked")


def measure(config: Config, target: Target | None = None) -> Result:
    return run(config, target or Model(config.hw, config.backend, memory=config.memory), silent)


def rows(result: Result, table: int = 0) -> list[dict[str, Any]]:
    found = result.tables[table]
    return [dict(zip(found.columns, row, strict=True)) for row in found.rows]


def test_every_way_and_shape_has_a_row_and_arrives_intact():
    result = measure(configured())
    ways = [("1to2", "sliced"), ("1to2", "staged"), ("2to1", "sliced"), ("2to1", "staged"), ("2to2", "whole")]
    assert [(row["way"], row["tokens"], row["path"]) for row in rows(result)] == [
        (f"{tp} {way}", tokens, "grouped" if way == "whole" else way) for tp, way in ways for tokens in (64, 256)
    ]
    assert {(row["n"], row["status"]) for row in rows(result)} == {(4, "ok")}
    assert result.failures == []


def test_a_handoff_takes_what_the_engine_and_the_port_take():
    result = measure(configured(tp=("1to1",), tokens=(256,)))
    (row,), (stages,) = rows(result), rows(result, 1)
    assert (row["bytes"], row["descriptors"]) == (256 * 1024 + 1600, 14)  # KV, then metadata
    # a queue's worker posts each when the one before is done: 5 us a call and 1 us a descriptor, then 10 GB/s
    assert row["p25 us"] == pytest.approx(2 * 5 + 14 + 263_744 / 10e3)
    assert row["p75"] == pytest.approx(row["p50"]) == pytest.approx(stages["wire us"])
    assert (stages["plan us"], stages["finish us"]) == (0, 0)


def test_contents_that_are_compared_take_no_time_on_the_model():
    """Copies that cost something for each piece included, of which a descriptor stands for many without contents."""
    dear = replace(EIGHT, gpu=replace(EIGHT.gpu, copies=Copies(call=1e-6, descriptor=50e-9)))
    tracked, timed, cheap = (
        rows(measure(replace(configured(), memory=memory, hw=hw)))
        for hw, memory in ((dear, "tracked"), (dear, "timing"), (EIGHT, "timing"))
    )
    assert timed == tracked
    assert timed[2]["p50"] - cheap[2]["p50"] > 0.05 * 64 * 4  # us: 64 tokens in four planes, staged


def test_metadata_goes_the_way_that_is_asked_for():
    data, control = rows(measure(configured(tp=("1to1",), tokens=(64,), metadata=("data", "control"))))
    assert data["bytes"] - control["bytes"] == 1600  # the rows of metadata
    assert data["status"] == control["status"] == "ok"


def test_sides_share_the_gpus_of_a_pair():
    options = HandoffOptions(placement="sides")
    two = replace(configured(placement="sides"), hw=replace(EIGHT, gpus=2))
    where = {rank.name: rank.place for rank in specs(two, options, Way(2, 2, "whole", "policy"))}
    assert [where[f"{side}0.{index}"] for side in ("prefill", "decode") for index in (0, 1)] == [
        Place(0, 0), Place(0, 0), Place(0, 1), Place(0, 1),
    ]  # fmt: skip
    assert {row["status"] for row in rows(measure(two))} == {"ok"}


def test_what_the_machine_or_the_backend_lacks_is_refused():
    with pytest.raises(ConfigError, match=r"8to1 needs more than the 8 GPUs of hw=toy; set experiment.tp=\[1to2\]"):
        measure(configured(tp=("8to1", "1to2")))
    (problem,) = set(check(replace(configured(tp=("1to2",)), policy=Policy())))
    assert problem == "1to2 staged: backend=fast has no staged path; set experiment.paths=[sliced]"


@pytest.mark.slow
@pytest.mark.parametrize("name", MARKED)
def test_real_bytes_arrive_as_they_were_sent(name):
    config = configured(tp=("2to1",), tokens=(64,), repeat=2)
    real = replace(config, target="real", hw=LOOPBACK, backend=engine(name), memory="timing")
    result = rows(measure(real, make_target(name)))
    assert [(row["path"], row["n"], row["status"]) for row in result] == [("sliced", 2, "ok"), ("staged", 2, "ok")]
    assert [row["bytes"] for row in result] == [row["bytes"] for row in rows(measure(config))]


def test_staged_handoffs_of_h100_take_what_was_measured():
    """Planning a descriptor takes longer than on hosts with H200: 4 x H100, three engines."""
    measured = values_in(data("validation/nvlink-4xh100/measurements.json"), "measured")
    words = ["hw=4xh100", "backend=nvlink", "model=llama-3.1-70b", "experiment=handoff", "experiment.paths=[staged]"]
    words += ["experiment.tp=[1to2,2to1]", "experiment.tokens=[512,2048]", "experiment.repeat=2"]
    config = compose([*words, "experiment.verify=false", "memory=timing", "workload=smoke"])
    result = run(config, Model(config.hw, config.backend), silent)
    times = {value.label: value.value for value in values("handoff", result)}
    errors = [abs(times[one.label] / one.value - 1.0) for one in measured if one.label in times]
    assert len(errors) == 4
    assert sum(errors) / 4 < 0.1
