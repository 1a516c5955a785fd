"""What an engine's options change of its costs: chosen by the options, and as close to its samples as it says."""

import csv
import re
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import conf
from pdsim.cli.run import compose
from pdsim.config.typed import build
from pdsim.costs import EngineModel, OptionCosts, Ramp
from pdsim.errors import ConfigError
from pdsim.repository import data

OFF = EngineModel(
    path="nvlink",
    call=0.0,
    descriptor=3.23e-6,
    overlap=True,
    pipelined=True,
    latency=5.0e-6,
    rate=399e9,
    wire_descriptor=2.51e-6,
    read_descriptor=0.77e-6,
)
"""The bare library without its thread: fitted to the column "off" of the samples, mean error 3.0 %."""


def nixl(*options):
    return compose(["hw=2xh200", "backend=nixl", *(f"backend.options.{option}" for option in options)])


def samples(column):
    lines = data("calibration", "nixl_thread-2xh200.csv").read_text().splitlines()
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        count, size = int(row["descriptors"]), int(row["size"])
        yield count, count * size, row["operation"] == "read", float(row[column]) * 1e-6


def shipped(threads):
    file = OmegaConf.to_container(OmegaConf.load(Path(conf.__file__).parent / "backend" / "nixl.yaml"))
    for item in file["intra"]["by_option"]:
        if item["options"] == {"progress_thread": "true", "num_threads": str(threads)}:
            return build(OptionCosts, item)
    raise LookupError(threads)


def test_seconds_are_added_and_rates_are_shares():
    costs = OptionCosts(
        options={"a": "b"}, latency=1e-6, descriptor=2e-6, rate=0.5, read_rate=0.8, ramp=(Ramp(first=3, extra=1e-6),)
    )
    varied = replace(OFF, queue_rate=100e9, by_option=(costs,)).varied(costs)
    assert varied.latency == OFF.latency + 1e-6
    assert varied.posting(10) == pytest.approx(10 * (OFF.descriptor + 2e-6) + 3e-6)
    assert (varied.rate, varied.queue_rate, varied.read_rate) == (OFF.rate / 2, 50e9, OFF.rate * 0.4)
    assert varied.by_option == ()


def test_without_the_thread_nothing_changes():
    assert nixl().backend.intra == nixl("progress_thread=false", "num_threads=0").backend.intra
    assert nixl().calibration.intervals["backend.intra.rate"]


@pytest.mark.parametrize("threads", [0, 4, 8])
def test_the_thread_costs_what_was_measured_and_says_so(threads):
    config = nixl("progress_thread=true", f"num_threads={threads}")
    assert config.backend.intra.latency > nixl().backend.intra.latency + 20e-6
    assert config.backend.sources["intra.rate"].startswith("measured: nixl-cu13 1.5.1")
    assert "backend.intra.rate" not in config.calibration.intervals
    assert "backend.intra.read_descriptor" in config.calibration.intervals


@pytest.mark.parametrize("threads", [0, 4, 8])
def test_the_samples_are_met_as_well_as_the_evidence_says(threads):
    costs = shipped(threads)
    model = OFF.varied(costs)
    errors = [
        abs(model.alone(n, size, read=read) / seconds - 1.0) for n, size, read, seconds in samples(f"on_{threads}")
    ]
    said = float(re.search(r"within ([\d.]+) %", costs.evidence)[1]) / 100.0
    assert sum(errors) / len(errors) == pytest.approx(said, abs=0.01)


def test_a_number_set_by_hand_stays():
    config = nixl("progress_thread=true", "num_threads=4")
    by_hand = compose(
        [
            *("hw=2xh200", "backend=nixl", "backend.options.progress_thread=true", "backend.options.num_threads=4"),
            "backend.intra.rate=300GB/s",
        ]
    )
    assert by_hand.backend.intra.rate == 300e9
    assert by_hand.backend.intra.latency == config.backend.intra.latency


def test_options_that_nobody_measured_are_refused_on_the_model():
    with pytest.raises(ConfigError, match="has no costs in the model of backend=nixl; there are progress_thread=false"):
        nixl("progress_thread=true", "num_threads=3")
