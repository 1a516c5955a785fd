"""What hosts and GPUs do in a handoff: the fit, and that the machine says what the committed records give."""

from __future__ import annotations

import numpy as np
import pytest

from pdsim.config import Config
from pdsim.hardware.machine import Copies
from pdsim.sim.memory import LAUNCH
from tools import handoff_fit
from tools.handoff_fit import (
    FITTED,
    PIECE,
    CopySample,
    bootstrap,
    copy_wakes,
    fit_copies,
    fit_idle_wake,
    fit_wake,
    medians,
    modelled,
    times,
    waking,
)
from tools.refit import handoff_config, served, with_idle_wake

RATE = 1e12
SIZES = (1 << 25, 1 << 27, 1 << 29)
ENGINE, HOSTS = FITTED


@pytest.fixture(scope="module")
def config() -> Config:
    return handoff_config(ENGINE)


@pytest.fixture(scope="module")
def mine() -> list[CopySample]:
    return [sample for sample in handoff_fit.samples() if sample.engine == ENGINE and sample.host in HOSTS]


def test_what_made_the_samples_is_found_again():
    true = Copies(call=200e-6, descriptor=10e-9, context_switch=300e-6)
    made = [
        CopySample("h", "e", kind, size, modelled(true, 1e-3, RATE, LAUNCH, kind, size))
        for kind in ("gather", "scatter", "switch")
        for size in SIZES
    ]
    copies, between = fit_copies(medians(made), RATE, LAUNCH)
    given = true.call, true.descriptor, true.context_switch
    assert (copies.call, copies.descriptor, copies.context_switch, between) == pytest.approx(
        (*given, 1e-3), rel=1e-9
    )
    for interval, value in zip(bootstrap(made, RATE, LAUNCH, runs=3), given, strict=True):
        assert interval == pytest.approx((value, value), rel=1e-9)


def test_a_wake_up_is_a_quarter_of_what_two_messages_leave():
    assert fit_wake([900e-6, 900e-6], latency=50e-6) == pytest.approx(200e-6)


def test_the_records_of_a_host_have_five_copies_of_each_size_and_the_last_scatter_has_no_end(mine: list[CopySample]):
    for host in HOSTS:
        kinds = [sample.kind for sample in mine if sample.host == host]
        assert (kinds.count("gather"), kinds.count("scatter"), kinds.count("switch")) == (15, 14, 15)
    assert {sample.nbytes // PIECE for sample in mine} == {64 * tokens for tokens in (512, 2048, 8192)}


def test_what_is_fitted_is_not_all_that_there_is():
    assert {(host, engine) for host, engine, _ in times()} > {(host, ENGINE) for host in HOSTS}


def test_the_machine_says_what_was_fitted(config: Config, mine: list[CopySample]):
    gpu, host = config.hw.gpu, config.hw.host
    assert gpu is not None
    copies, _ = fit_copies(medians(mine), gpu.memory_rate, LAUNCH)
    assert gpu.copies.call == pytest.approx(copies.call, abs=0.5e-6)
    assert gpu.copies.descriptor == pytest.approx(copies.descriptor, abs=0.05e-9)
    assert gpu.copies.context_switch == pytest.approx(copies.context_switch, abs=0.5e-6)
    woken = [seconds for (name, engine, _), seconds in waking().items() if engine == ENGINE and name in HOSTS]
    assert host.wake == pytest.approx(fit_wake(woken, host.tcp_latency), abs=0.5e-6)
    copying = copy_wakes(config.hw.interconnect.rate)
    assert gpu.idle_wake == pytest.approx(
        float(np.median([each for name in HOSTS for each in copying[name]])), abs=0.5e-6
    )
    first = [times()[name, ENGINE, "median ttft"] for name in HOSTS]
    found = fit_idle_wake(lambda seconds: served(with_idle_wake(config, seconds))["median ttft"], first)
    assert host.idle_wake == pytest.approx(found, abs=50e-6)  # which moves with the calibration
