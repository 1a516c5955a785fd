"""A fit finds the form and the parameters that made its samples, and does not name what they cannot tell."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest

from pdsim.calibration import transfers
from pdsim.calibration.calibrate import fitted
from pdsim.calibration.samples import Sample, Samples
from pdsim.calibration.transfers import Fit, Form, Points, points_of, start_of
from pdsim.config.compose import compose
from pdsim.core.units import parse_time
from pdsim.hardware.costs import EngineModel, InlineSaving, Ramp

BASE = EngineModel(path="nvlink", call=0.0, descriptor=1e-6, overlap=False, latency=0.0)
KINDS = {
    "sum": replace(BASE, call=11e-6, descriptor=2e-6, rate=390e9),
    "maximum": replace(BASE, path="rdma", descriptor=0.2e-6, overlap=True, latency=6e-6, rate=49e9),
    "pipeline": replace(BASE, call=9e-6, descriptor=5e-6, overlap=True, rate=370e9, pipelined=True),
}
CROSS = [(1, 4096 << power) for power in range(0, 16, 2)]
CROSS += [(n, size) for n in (4, 16, 64, 256, 1024) for size in (4096, 65536, 1 << 20)]
SUM = Form("sum", ("call", "descriptor", "rate"))


def made_by(model, cells=CROSS, noise=0.0, seed=0):
    """Return the samples that *model* gives, with a relative error of *noise*."""
    n, size = (np.array(column, dtype=float) for column in zip(*cells, strict=True))
    factors = np.exp(np.random.default_rng(seed).normal(0.0, noise, len(n)))
    return Points(n, size, np.ones(len(n)), model.isolated_time(n, n * size) * factors)


def sample(blocks, size, seconds, **more):
    return Sample(blocks=blocks, size=size, seconds=seconds, low=seconds, high=seconds, **more)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_form_that_made_the_samples_is_chosen(kind):
    chosen, truth = transfers.choose(made_by(KINDS[kind], noise=0.005), BASE), KINDS[kind]
    found = chosen.model.descriptor, chosen.model.rate, chosen.model.call + chosen.model.latency
    assert chosen.form.stages == kind
    assert found == pytest.approx((truth.descriptor, truth.rate, truth.call + truth.latency), rel=0.03)


@pytest.mark.parametrize(("first", "extra"), [(2, 5e-6), (16, 2e-6)])
def test_a_ramp_ends_at_a_whole_number_of_descriptors(first, extra):
    step = replace(KINDS["sum"], descriptor=0.5e-6, ramp=(Ramp(first=first, extra=extra),))
    cells = [(1 << power, size) for power in range(12) for size in (4096, 65536)]
    form = Form("sum", ("call", "descriptor", "extra1", "first1", "rate"))
    chosen = transfers.fit(form, made_by(step, cells, noise=0.01), BASE)
    assert chosen.at["first1"] == pytest.approx(first, abs=first // 16)
    assert chosen.at["first1"].is_integer()
    assert chosen.at["extra1"] == pytest.approx(extra, rel=0.1)


def test_single_descriptors_tell_neither_stages_nor_the_descriptor():
    samples = made_by(KINDS["maximum"], [(1, 4096 << power) for power in range(14)], noise=0.002)
    chosen = transfers.choose(samples, BASE)
    assert chosen.form == Form("sum", ("call", "rate"))  # the stages of BASE
    assert chosen.at["descriptor"] == BASE.descriptor


@pytest.mark.parametrize(
    ("cells", "lost"),
    [([(64, 4096 << power) for power in range(10)], "descriptor"), ([(1 << p, 4096) for p in range(10)], "rate")],
    ids=["one count", "one size"],
)
def test_of_two_parameters_that_are_one_number_one_is_lost(cells, lost):
    chosen = transfers.choose(made_by(KINDS["sum"], cells), BASE, [SUM])
    assert chosen.unidentified == (lost,)


def test_rounding_does_not_choose_between_two_equal_forms():
    points = made_by(KINDS["sum"], noise=0.02)
    twins = [Form("sum", (constant, "descriptor", "rate")) for constant in ("latency", "call")]
    for seed in range(8):  # as other processors may have them
        factors = 1.0 + np.random.default_rng(seed).uniform(-1e-12, 1e-12, len(points))
        rounded = replace(points, seconds=points.seconds * factors)
        assert transfers.simplest([transfers.fit(form, rounded, BASE) for form in twins], rounded).form == twins[0]


def test_what_is_held_out_is_never_seen():
    samples = made_by(KINDS["sum"], CROSS[::2], noise=0.01)
    spoiled = replace(samples, seconds=samples.seconds.copy())
    spoiled.seconds[3] *= 2.0
    clean, hurt = (transfers.held_out(points, BASE, (SUM,)) for points in (samples, spoiled))
    assert hurt[3] == pytest.approx((1.0 + clean[3]) / 2.0 - 1.0, rel=1e-6)


IN_ORDER = replace(BASE, in_order=True)
ALONE = start_of(BASE) | {"call": 20e-6, "descriptor": 2e-6, "rate": 200e9}
SPANS = {"call": (19e-6, 21e-6), "descriptor": (1.9e-6, 2.1e-6), "rate": (190e9, 210e9)}
FLIGHT = [(n, size, c) for n, size in ((1, 4096), (1, 1 << 20), (1, 1 << 24), (16, 65536)) for c in (2, 4)]


@pytest.mark.parametrize(
    ("truth", "base", "told"),
    [
        ({}, IN_ORDER, {"call": 20e-6, "descriptor": 2e-6, "rate": 200e9}),  # keeps the poster: stays the call
        ({"call": 0.0, "latency": 20e-6}, IN_ORDER, {"latency": 20e-6, "descriptor": 2e-6, "rate": 200e9}),
        ({"call": 12e-6, "latency": 8e-6}, IN_ORDER, {"call": 12e-6, "latency": 8e-6}),  # each with an interval
        ({"queue_rate": 300e9}, BASE, {"queue_rate": 300e9}),
        ({}, BASE, {"queue_rate": inf}),  # queues that limit nothing
        ({"queue_rate": 300e9}, IN_ORDER, {"queue_rate": inf}),  # transfers take turns
    ],
)
def test_transfers_in_flight_tell_call_latency_and_queues(truth, base, told):
    n, size, count = (np.array(column, dtype=float) for column in zip(*FLIGHT, strict=True))
    cells = Points(n, size, count, np.ones(len(n)))
    factors = np.exp(np.random.default_rng(3).normal(0.0, 0.005, len(n)))
    crowd = replace(cells, seconds=Fit(SUM, {**ALONE, **truth}, BASE).seconds(cells) * factors)
    fit = transfers.with_concurrency(Fit(SUM, ALONE, base, intervals=SPANS), crowd)
    assert fit.at["call"] + fit.at["latency"] == pytest.approx(20e-6, rel=1e-12)  # of one transfer, as it was
    assert set(fit.intervals) == set(fit.form.free)
    for name, value in told.items():
        assert fit.at[name] == pytest.approx(value, rel=0.05)
        low, high = fit.intervals.get(name, (inf, inf))
        assert low <= fit.at[name] <= high


def both_ways(more, noise, misfit=0.0):
    """Return writes and reads of an engine whose reads cost *more*; a *misfit* is of a configuration, so of both."""
    random = np.random.default_rng(3)
    rows = []
    for n, size in CROSS:
        both = np.exp(random.normal(0.0, misfit))
        for operation, extra in (("write", {}), ("read", more)):
            alone = replace(KINDS["sum"], **extra).isolated_time(n, n * size, read=operation == "read")
            rows.append(sample(n, size, alone * both * np.exp(random.normal(0.0, noise)), operation=operation))
    return rows


def read_fit(rows):
    writes = points_of([row for row in rows if row.operation == "write"])
    return transfers.read_overhead(transfers.fit(SUM, writes, BASE), rows)


MORE = [{"read": 5e-6}, {"read_descriptor": 1e-6}, {"read_rate": 150e9}]
BOTH = [{"read": 5e-6, "read_descriptor": 1e-6}, {"read": 5e-6, "read_rate": 150e9}]


@pytest.mark.parametrize("more", [*MORE, *(pytest.param(each, marks=pytest.mark.slow) for each in BOTH)])
def test_a_misfit_of_writes_is_no_cost_of_reads(more):
    fit = read_fit(both_ways(more, noise=0.01, misfit=0.1))
    assert {name: fit.at[name] for name in fit.form.free} == pytest.approx(more, rel=0.15)
    assert set(fit.intervals) == set(more)


@pytest.mark.parametrize("faster", [1.0, 1.2])
def test_reads_that_are_no_slower_cost_nothing_more(faster):
    rows = both_ways({}, noise=0.01)
    fit = read_fit([replace(row, seconds=row.seconds / faster) if row.operation == "read" else row for row in rows])
    assert (fit.form.free, fit.intervals) == ((), {})
    assert [fit.at[name] for name in transfers.OF_READS] == [0.0, 0.0, inf]


SMALL = InlineSaving(bytes=1 << 16, descriptors=16, saving=3e-6)
SAVES = replace(IN_ORDER, call=11e-6, descriptor=2e-6, rate=385e9, ramp=(Ramp(first=2, extra=3.3e-6),), small=SMALL)
SIZES = [(1, 4096 << power) for power in range(17)]
SIZES += [(1 << power, size) for size in (4096, 1 << 16, 1 << 18, 1 << 20) for power in range(1, 11)]


@pytest.mark.slow
def test_a_saving_and_a_ramp_are_fitted_with_both_ends():
    held = ((1, 16384), (4, 4096), (32, 1 << 16))
    seconds = made_by(SAVES, SIZES, noise=0.01, seed=5).seconds.tolist()
    rows = [sample(*cell, time, held=cell in held) for cell, time in zip(SIZES, seconds, strict=True)]
    config = compose(["hw=2xh200", "backend=mooncake_nvlink", "experiment=transfer", "calibration=none"])
    done = fitted(Samples(rows), config.hw, config.backend, "write", "intra", "mine", "a test")
    assert fitted(Samples(rows[::-1]), config.hw, config.backend, "write", "intra", "mine", "a test").fit == done.fit
    made, key = done.calibration, "backend.intra.small.saving"
    assert made.form == "sum(call, descriptor, extra1, first1, rate, saving)"
    assert parse_time(made.parameters[key]) == pytest.approx(3e-6, rel=0.15)
    assert (made.held_out.points, made.held_out.p95 < 0.05) == (len(held), True)
    low, high = map(parse_time, made.intervals[key])
    assert low < 3e-6 < high
    (ramp,) = made.parameters["backend.intra.ramp"]
    assert (ramp["first"], parse_time(ramp["extra"])) == (2, pytest.approx(3.3e-6, rel=0.15))
    assert "backend.intra.ramp" in made.intervals
    assert "backend.intra.ramp" not in made.unidentified  # though a second step is
