"""The host's part of a transfer on another host: what is scaled, what is not, and what results say of it."""

import pytest

from experiments import transfer
from pdsim.calibration.host_factor import measure
from pdsim.cli.doctor import host
from pdsim.cli.run import compose
from pdsim.errors import ConfigError
from pdsim.fabric.model import Model
from pdsim.results.evidence import host_spread

WORDS = ["hw=2xh200", "backend=mooncake_nvlink", "experiment=transfer", "experiment.ranks=2"]


def intra(*words):
    return compose([*WORDS, *words]).backend.intra


def test_a_slow_host_posts_slower_and_moves_bytes_as_fast():
    usual, slow = intra(), intra("host_factor=2")
    assert slow.posting(100) == pytest.approx(2 * usual.posting(100))
    assert slow.latency == 2 * usual.latency
    assert slow.rate == usual.rate


def test_a_factor_is_applied_once_and_is_assumed():
    config = compose([*WORDS, "host_factor=1.5"])
    assert config.host_factor == 1.0
    assert config.backend.sources["intra.descriptor"] == "assumed: times host_factor=1.5"
    assert config.backend.sources["intra.rate"].startswith("measured:")


def test_what_is_set_by_hand_is_scaled_no_less_and_says_that_it_was_set():
    config = compose([*WORDS, "host_factor=2", "backend.intra.descriptor=3us"])
    assert config.backend.intra.descriptor == pytest.approx(6e-6)
    assert config.backend.sources["intra.descriptor"] == "assumed: set on the command line"


@pytest.mark.parametrize("factor", ["0", "-1", "11"])
def test_a_factor_that_no_host_has_is_refused(factor):
    with pytest.raises(ConfigError, match=r"host_factor must be 0\.1 to 10"):
        intra(f"host_factor={factor}")


def test_results_say_how_far_other_hosts_move_their_transfers():
    small = ["experiment.blocks=[1000]", "experiment.size=[4KiB]", "experiment.repeat=1"]
    (line,) = notes(small)
    assert "take 0.93 to 1.24 times as long" in line  # all posting
    large = ["experiment.blocks=[1]", "experiment.size=[256MiB]", "experiment.repeat=1"]
    (line,) = notes(large)
    assert "take 1.00 to 1.01 times as long" in line  # all wire


def notes(words):
    config = compose([*WORDS, *words, "experiment.patterns=[pair]"])
    result = transfer.run(config, Model(config.hw, config.backend), lambda *_: None)
    return host_spread(config, result.transfers)


def test_doctor_times_a_loop_beside_the_hosts_of_the_calibrations():
    least, middle, most = measure(3)
    assert 1e-9 < least <= middle <= most < 1e-5
    text = host()
    assert "a turn of a Python loop takes" in text
    assert "calibration=nixl-2xh200: nobody timed the loop on its host" in text
