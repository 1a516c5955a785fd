"""A calibration lays its parameters over machine and engine, says where they come from, and gives way to a hand."""

import pytest

from pdsim.config.loading import ON_THE_COMMAND_LINE, as_written, load, plain
from pdsim.core.errors import ConfigError
from pdsim.results.evidence import gather
from pdsim.results.terminal import spread
from tests.test_config import CONFIG

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


def test_its_parameters_replace_those_of_the_machine_and_the_engine():
    config = calibrated()
    assert (config.backend.intra.call, config.backend.intra.descriptor) == (4e-6, 2e-6)
    assert config.hw.nic.rate == 40e9


def test_what_it_set_is_measured_by_it_with_its_interval():
    config = calibrated()
    assert config.backend.sources["intra.call"] == (
        "measured: two boxes, 2026-01-31, calibration engine-box, 95 % 3.5us to 4.5us"
    )
    assert config.hw.sources["nic.rate"].startswith("measured: two boxes")
    assert config.hw.sources["gpu"] == "datasheet: G"


def test_what_was_published_stays_published():
    assert calibrated(kind="published").backend.sources["intra.call"].startswith("published: two boxes")


def test_the_command_line_wins_and_takes_the_interval_away():
    hand = {**CONFIG, "backend": {**CONFIG["backend"], "intra": {**CONFIG["backend"]["intra"], "call": "9us"}}}
    config = calibrated(["backend.intra.call"], hand)
    assert config.backend.intra.call == 9e-6
    assert config.backend.sources["intra.call"] == ON_THE_COMMAND_LINE
    assert set(config.calibration.intervals) == {"hw.nic.rate"}


def test_a_run_is_repeated_from_its_own_configuration_unchanged():
    hand = {**CONFIG, "backend": {**CONFIG["backend"], "intra": {**CONFIG["backend"]["intra"], "call": "9us"}}}
    config = calibrated(["backend.intra.call"], hand)
    assert load(plain(as_written(config))) == config


@pytest.mark.parametrize(("group", "name"), [("hw", "shelf"), ("backend", "motor")])
def test_a_calibration_for_another_machine_or_engine_is_refused_with_both_names(group, name):
    with pytest.raises(ConfigError, match=f"is for {group}={name}, not for {group}="):
        calibrated(**{group: [name]})


def test_none_is_no_calibration():
    assert load({**CONFIG, "calibration": {"name": "none"}}) == load(CONFIG)


def test_a_parameter_of_neither_machine_nor_engine_is_refused():
    with pytest.raises(ConfigError, match=r"calibration\.parameters\.seed must begin with one of hw, backend"):
        calibrated(parameters={"seed": 1})


def test_a_parameter_of_an_engine_that_has_no_such_path_is_refused():
    with pytest.raises(ConfigError, match=r"parameters\.backend\.inter\.call: this configuration has no inter"):
        calibrated(parameters={"backend.inter.call": "1us"})


def test_a_result_says_how_far_the_calibration_is_from_what_it_has_not_seen():
    proof = gather(calibrated(), serving=False).as_dict()
    assert spread(proof["calibration"]) == (
        "calibration: engine-box, two boxes, 2026-01-31; transfer times of 12 samples left out of the fit (at "
        "random) are met within 2.0% in the mean and 8.0% at the 95th percentile"
    )


def test_a_real_run_rests_on_no_calibration():
    config = load({**CONFIG, "target": "real", "calibration": CALIBRATION})
    assert "calibration" not in gather(config, serving=False).as_dict()
