"""Transfers in flight tell what they share, and never change what one alone was found to take."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest

from pdsim.calibration import concurrency as crowds
from pdsim.calibration import fit
from pdsim.calibration.forms import Form, Points
from pdsim.calibration.from_samples import fitted
from pdsim.calibration.samples import Sample, Samples
from pdsim.config.compose import compose
from pdsim.hardware.costs import EngineModel

BASE = EngineModel(path="tcp", call=0.0, descriptor=2e-6, overlap=False, latency=0.0)
IN_ORDER = replace(BASE, in_order=True)
CELLS = [(n, size, crowd) for n, size in ((1, 4096), (1, 1 << 20), (1, 1 << 24), (16, 65536)) for crowd in (2, 4)]
ALONE = {"call": 20e-6, "latency": 0.0, "descriptor": 2e-6, "rate": 200e9, "queue_rate": inf, "wire_descriptor": 0.0}
ALONE |= {"read": 0.0, "read_descriptor": 0.0, "read_rate": inf, "in_order": 0.0}
ALONE |= {"saving": 0.0, "small_bytes": 1, "small_descriptors": 1}
ALONE |= {"workers": 0.0}
ALONE |= {"extra1": 0.0, "first1": 0.0, "extra2": 0.0, "first2": 0.0}
FORM = Form("sum", ("call", "descriptor", "rate"))
SPANS = {"call": (19e-6, 21e-6), "descriptor": (1.9e-6, 2.1e-6), "rate": (190e9, 210e9)}


def crowd(noise=0.005, **truth):
    """Return what transfers in flight take with the parameters of `ALONE`, or those of *truth* instead."""
    n, size, count = (np.array(column, dtype=float) for column in zip(*CELLS, strict=True))
    cells = Points(n, size, count, np.ones(len(n)))
    factors = np.exp(np.random.default_rng(3).normal(0.0, noise, len(n)))
    return replace(cells, seconds=FORM.seconds({**ALONE, **truth}, cells) * factors)


def told(points, base=BASE):
    return crowds.shared(fit.Fit(FORM, ALONE), SPANS, points, base)


def test_a_constant_that_keeps_the_poster_stays_the_call():
    found, spans = told(crowd(), IN_ORDER)
    assert (found, spans) == (fit.Fit(FORM, ALONE), SPANS)


def test_a_constant_that_transfers_have_side_by_side_is_latency():
    found, spans = told(crowd(call=0.0, latency=20e-6), IN_ORDER)
    assert (found.at["call"], found.at["latency"]) == (0.0, 20e-6)
    assert found.form.free == ("latency", "descriptor", "rate")
    assert spans["latency"] == SPANS["call"]
    assert "call" not in spans


def test_of_a_constant_that_is_both_each_part_has_its_interval():
    found, spans = told(crowd(call=12e-6, latency=8e-6), IN_ORDER)
    assert found.at["call"] == pytest.approx(12e-6, rel=0.05)
    assert found.at["call"] + found.at["latency"] == pytest.approx(20e-6, rel=1e-12)
    for name in ("call", "latency"):
        assert spans[name][0] <= found.at[name] <= spans[name][1]


def test_what_the_queues_carry_together_is_told_with_an_interval():
    found, spans = told(crowd(queue_rate=300e9))
    assert found.at["queue_rate"] == pytest.approx(300e9, rel=0.03)
    assert spans["queue_rate"][0] <= found.at["queue_rate"] <= spans["queue_rate"][1]


def test_queues_that_limit_nothing_are_not_told():
    found, spans = told(crowd())
    assert found.at["queue_rate"] == inf
    assert "queue_rate" not in spans


def test_a_copy_engine_that_takes_turns_has_no_queues_to_tell():
    found, _ = told(crowd(queue_rate=300e9), IN_ORDER)
    assert found.at["queue_rate"] == inf


def test_among_cells_of_equal_loss_rounding_does_not_choose():
    above, below = np.nextafter(1.0, 2.0), np.nextafter(1.0, 0.0)
    losses = np.array([[2.0, 1.0], [above, 0.5], [1.0, 1e-16], [below, 0.0]])
    assert crowds._least(losses, 10).tolist() == [1, 2]


def test_queues_whose_interval_is_just_as_wide_as_may_be_are_told():
    from_each = [(low, high) for low, high in zip(crowds.TIMES, crowds.TIMES[70:-1], strict=False)]
    assert {high > fit.WIDEST * low for low, high in from_each} == {False, True}  # by the last digit
    for low, high in from_each:
        _, spans = crowds._with_queues(fit.Fit(FORM, ALONE), SPANS, 200e9, (low * 200e9, high * 200e9))
        assert "queue_rate" in spans


def test_without_crowds_nothing_is_changed():
    nobody = Points(*(np.empty(0) for _ in range(4)))
    assert told(nobody) == (fit.Fit(FORM, ALONE), SPANS)


def test_crowds_whose_wait_is_in_no_sample_do_not_move_what_single_transfers_say():
    model = EngineModel(path="nvlink", call=20e-6, descriptor=3e-6, overlap=False, latency=0.0, rate=390e9)
    cells = [(n, size) for n in (1, 4, 16, 64, 256, 1024) for size in (4096, 65536, 1 << 20)]
    rows = [replace(sample(model, n, size), held=n == 64) for n, size in cells]  # else each is left out in turn
    waiting = [sample(model, n, size, crowd) for n, size, crowd in CELLS]  # each as long as one alone
    config = compose(["hw=2xh200", "backend=nvlink", "experiment=transfer", "calibration=none"])
    single, both = (
        fitted(Samples(each), config.hw, config.backend, "write", "intra", "mine", "test")
        for each in (rows, [*rows, *waiting])
    )
    assert both.found.at["rate"] == single.found.at["rate"] == pytest.approx(390e9, rel=1e-3)
    assert both.found.at["descriptor"] == single.found.at["descriptor"] == pytest.approx(3e-6, rel=1e-3)
    assert both.calibration.parameters["backend.intra.latency"] == "20us"  # what none of them waited for


def sample(model, blocks, size, concurrency=1):
    seconds = model.isolated_time(blocks, blocks * size)
    return Sample(blocks=blocks, size=size, concurrency=concurrency, seconds=seconds, low=seconds, high=seconds)
