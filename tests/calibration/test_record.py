"""A calibration lays its parameters over machine and engine, says where they come from, and gives way to a hand."""

from dataclasses import asdict

import pytest

from pdsim.config import ON_THE_COMMAND_LINE, as_written, load, plain
from pdsim.core.errors import ConfigError
from pdsim.results.terminal import spread
from tests.test_config import CONFIG, changed

CALIBRATION = {
    "name": "engine-box",
    "hw": ["box"],
    "backend": ["engine"],
    "date": "2026-01-31",
    "source": "two boxes",
    "parameters": {"backend.intra.call": "4us", "hw.nic.rate": "40GB/s"},
    "intervals": {"backend.intra.call": ["3.5us", "4.5us"], "hw.nic.rate": ["39GB/s", "41GB/s"]},
    "held_out": {"points": 12, "how": "at random", "mean": 0.02, "median": 0.01, "p95": 0.08, "bias": 0.001},
}


def calibrated(overridden=(), values=CONFIG, **changes):
    return load({**values, "calibration": CALIBRATION | changes}, overridden)


def test_its_parameters_replace_those_of_machine_and_engine():
    config = calibrated()
    assert (config.backend.intra.call, config.backend.intra.descriptor, config.hw.nic.rate) == (4e-6, 2e-6, 40e9)
    evidence = "measured: two boxes, 2026-01-31, calibration engine-box, 95 % 3.5us to 4.5us"
    assert config.backend.sources["intra.call"] == evidence
    assert config.hw.sources["nic.rate"].startswith("measured: two boxes")
    assert config.hw.sources["gpu"] == "datasheet: G"
    assert calibrated(kind="published").backend.sources["intra.call"].startswith("published: two boxes")
    assert load({**CONFIG, "calibration": {"name": "none"}}) == load(CONFIG)


def test_the_command_line_wins_and_takes_the_interval_away():
    config = calibrated(["backend.intra.call"], changed(CONFIG, "backend.intra.call", "9us"))
    assert config.backend.intra.call == 9e-6
    assert config.backend.sources["intra.call"] == ON_THE_COMMAND_LINE
    assert set(config.calibration.intervals) == {"hw.nic.rate"}
    assert load(plain(as_written(config))) == config  # repeated from what it keeps


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hw": ["shelf"]}, "is for hw=shelf, not for hw="),
        ({"backend": ["motor"]}, "is for backend=motor, not for backend="),
        ({"parameters": {"seed": 1}}, r"calibration\.parameters\.seed must begin with one of hw, backend"),
        ({"parameters": {"backend.inter.call": "1us"}}, r"parameters\.backend\.inter\.call: this configuration"),
    ],
)
def test_a_calibration_of_something_else_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        calibrated(**changes)


def test_results_say_how_far_the_calibration_is_off():
    assert spread(asdict(calibrated().calibration)) == (
        "calibration: engine-box, two boxes, 2026-01-31; transfer times of 12 samples left out of the fit (at "
        "random) are met within 2.0% in the mean and 8.0% at the 95th percentile"
    )
