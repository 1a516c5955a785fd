"""The host's part of a transfer on another host: what is scaled, what is not, and what results say of it."""

import re

import numpy as np
import pytest

from experiments import transfer
from pdsim.calibration import samples
from pdsim.calibration.definition import drawn, measure
from pdsim.cli.doctor import host
from pdsim.config.compose import compose
from pdsim.core.errors import ConfigError
from pdsim.core.repository import data
from pdsim.results.evidence import extrapolations, host_note, host_spread
from pdsim.sim.model import Model
from pdsim.transfer import TransferRecord

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


def test_results_say_how_far_other_hosts_move_their_transfers():
    small = ["experiment.blocks=[1000]", "experiment.size=[4KiB]", "experiment.repeat=1"]
    factors = sorted(drawn((0.93, 1.0, 1.24), seed=0, count=1000))
    (line,), spread = said(small)  # all posting
    assert (spread.low, spread.high) == (pytest.approx(factors[25], rel=0.01), pytest.approx(factors[975], rel=0.01))
    assert f"take {spread.low:.2f} to {spread.high:.2f} times as long on 95 of 100 hosts" in line
    large = ["experiment.blocks=[1]", "experiment.size=[256MiB]", "experiment.repeat=1"]
    _, spread = said(large)  # all wire
    assert 0.99 < spread.low < 1.0 < spread.high < 1.01
    assert said([*small, "host_factor=1.1"]) == ([], None)


def said(words):
    config = compose([*WORDS, *words, "experiment.patterns=[pair]"])
    result = transfer.run(config, Model(config.hw, config.backend), lambda *_: None)
    return host_note(config, result.transfers), host_spread(config, result.transfers)


def test_a_host_is_drawn_from_the_seed():
    usual = intra()
    for seed in (1, 2):
        config = compose([*WORDS, "draw_host=true", f"seed={seed}"])
        (factor,) = drawn((0.93, 1.0, 1.24), seed, 1)
        assert config.backend.intra.descriptor == pytest.approx(usual.descriptor * factor, rel=1e-12)
        assert (config.calibration.host, config.draw_host) == (factor, False)
        source = config.backend.sources["intra.descriptor"]
        assert source == f"assumed: times host_factor={factor:g}, drawn from seed={seed} as 3 hosts differ"


@pytest.mark.parametrize(
    ("words", "why"),
    [(["calibration=none"], "knows none; set host_factor="), (["host_factor=2"], "leave out draw_host or host_f")],
)
def test_a_host_is_not_drawn_from_nothing_nor_beside_one_that_is_given(words, why):
    with pytest.raises(ConfigError, match=why):
        intra("draw_host=true", *words)


def test_a_host_that_nobody_knows_is_a_warning_with_the_factor():
    config = compose([*WORDS, "host_factor=2.48"])
    (warning,) = extrapolations(config, [TransferRecord("m", "write", "a", "b", 4096, 1, *(0.0,) * 5)])
    assert "is that of no host of calibration=mooncake_nvlink-2xh200, 0.93 to 1.24" in warning
    assert "by a factor of 2; take its error there, 5.1 % at 95 of 100 held-out points, 2 times" in warning


def test_doctor_times_a_loop_beside_the_hosts_of_the_calibrations():
    least, middle, most = measure(3)
    assert 1e-9 < least <= middle <= most < 1e-5
    text = host()
    assert "a turn of a Python loop takes" in text
    assert re.search(r"calibration=nixl-2xh200: host_factor=\d", text)
    assert "calibration=nvlink-2xh200: nobody timed the loop on its host" in text


@pytest.mark.parametrize(("backend", "median", "p95"), [("mooncake_nvlink", 0.025, 0.05), ("nixl", 0.06, 0.13)])
def test_the_calibrations_meet_a_host_that_they_have_not_seen(backend, median, p95):
    rows = samples.read(data("calibration", f"{backend}-2xh200-host2.csv")).rows
    model = compose(["hw=2xh200", f"backend={backend}", "experiment=transfer", "experiment.ranks=2"]).backend.intra
    pairs = [row for row in rows if row.concurrency == 1]
    modelled = [
        model.isolated_time(row.blocks, row.blocks * row.size, read=row.operation == "read") for row in pairs
    ]
    errors = np.abs(np.array(modelled) / [row.seconds for row in pairs] - 1.0)
    assert len(pairs) > 100
    assert np.median(errors) < median
    assert np.percentile(errors, 95.0) < p95
