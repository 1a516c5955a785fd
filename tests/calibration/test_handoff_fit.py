"""What hosts do in a handoff: the fit, and that the machine says what the committed records give."""

from __future__ import annotations

import pytest

from benchmarks import handoff_fit
from benchmarks.handoff_fit import FITTED, PIECE, Sample, bootstrap, fit_copies, fit_wake, medians, modelled, rests
from pdsim.fabric.machine import Copies
from pdsim.run import compose

RATE = 1e12
SIZES = (1 << 25, 1 << 27, 1 << 29)


@pytest.fixture(scope="module")
def machine():
    return compose(["hw=2xh200"]).hw


def test_what_made_the_samples_is_found_again():
    true = Copies(call=200e-6, piece=10e-9)
    made = [
        Sample("e", kind, size, modelled(true, 1e-3, RATE, kind, size))
        for kind in ("gather", "scatter")
        for size in SIZES
    ]
    copies, between = fit_copies(medians(made), RATE)
    assert (copies.call, copies.piece, between) == pytest.approx((true.call, true.piece, 1e-3), rel=1e-9)
    for interval, value in zip(bootstrap(made, RATE, runs=3), (true.call, true.piece), strict=True):
        assert interval == pytest.approx((value, value), rel=1e-9)


def test_a_wake_up_is_a_quarter_of_what_two_messages_leave():
    assert fit_wake({512: 900e-6, 2048: 900e-6}, latency=50e-6) == pytest.approx(200e-6)


def test_the_records_have_five_copies_of_each_size_and_the_last_scatter_has_no_end():
    mine = [sample for sample in handoff_fit.samples() if sample.engine == FITTED]
    assert len([sample for sample in mine if sample.kind == "gather"]) == 15
    assert len([sample for sample in mine if sample.kind == "scatter"]) == 14
    assert {sample.nbytes // PIECE for sample in mine} == {64 * tokens for tokens in (512, 2048, 8192)}


def test_the_machine_says_what_was_fitted(machine):
    mine = [sample for sample in handoff_fit.samples() if sample.engine == FITTED]
    copies, _ = fit_copies(medians(mine), machine.gpu.memory_rate)
    assert machine.gpu.copies.call == pytest.approx(copies.call, abs=0.5e-6)
    assert machine.gpu.copies.piece == pytest.approx(copies.piece, abs=0.05e-9)
    assert machine.host.wake == pytest.approx(fit_wake(rests(FITTED), machine.host.tcp_latency), abs=0.5e-6)
