"""A fit finds the form and the parameters that made its samples, and does not name what they cannot tell."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest

from pdsim.calibration import calibrate, transfers
from pdsim.calibration.calibrate import fitted
from pdsim.calibration.samples import Sample, Samples
from pdsim.calibration.transfers import Fit, Form, Points, points_of, start_of
from pdsim.config.compose import compose
from pdsim.core.units import parse_time
from pdsim.hardware.costs import EngineModel, InlineSaving, Ramp
from pdsim.validation.intervals import variants

BASE = EngineModel(path="nvlink", call=0.0, descriptor=1e-6, overlap=False, latency=0.0)
KINDS = {
    "sum": EngineModel(path="nvlink", call=11e-6, descriptor=2e-6, overlap=False, latency=0.0, rate=390e9),
    "maximum": EngineModel(path="rdma", call=0.0, descriptor=0.2e-6, overlap=True, latency=6e-6, rate=49e9),
    "pipeline": EngineModel(
        path="nvlink", call=9e-6, descriptor=5e-6, overlap=True, latency=0.0, rate=370e9, pipelined=True
    ),
}
CROSS = [(1, 4096 << power) for power in range(0, 16, 2)]
CROSS += [(n, size) for n in (4, 16, 64, 256, 1024) for size in (4096, 65536, 1 << 20)]
SUM = Form("sum", ("call", "descriptor", "rate"))


def made_by(model, cells=CROSS, noise=0.0, seed=0):
    """Return the samples that *model* gives, with a relative error of *noise*."""
    n, size = (np.array(column, dtype=float) for column in zip(*cells, strict=True))
    factors = np.exp(np.random.default_rng(seed).normal(0.0, noise, len(n)))
    return Points(n, size, np.ones(len(n)), model.isolated_times(n, n * size) * factors)


def sample(blocks, size, seconds, **more):
    return Sample(blocks=blocks, size=size, seconds=seconds, low=seconds, high=seconds, **more)


def samples_of(points, held=()):
    cells = zip(map(int, points.blocks), map(int, points.size), map(float, points.seconds), strict=True)
    return [sample(n, size, seconds, held=(n, size) in held) for n, size, seconds in cells]


def calibration(rows, backend="nvlink"):
    config = compose(["hw=2xh200", f"backend={backend}", "experiment=transfer", "calibration=none"])
    return config, fitted(Samples(rows), config.hw, config.backend, "write", "intra", "mine", "a test")


# --- forms ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_form_that_made_the_samples_is_chosen(kind):
    chosen = transfers.choose(made_by(KINDS[kind], noise=0.005), BASE)
    assert chosen.form.stages == kind
    assert chosen.model.descriptor == pytest.approx(KINDS[kind].descriptor, rel=0.03)
    assert chosen.model.rate == pytest.approx(KINDS[kind].rate, rel=0.03)
    constants = KINDS[kind].call + KINDS[kind].latency
    assert chosen.model.call + chosen.model.latency == pytest.approx(constants, rel=0.03)


def test_a_ramp_ends_at_a_whole_number_of_descriptors():
    for first, extra in ((2, 5e-6), (16, 2e-6)):
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
    samples = made_by(KINDS["sum"], cells)
    assert transfers._identified(transfers.fit(SUM, samples, BASE), samples).unidentified == (lost,)


# --- choices that rounding may not make ----------------------------------------------------------------------------


def rounded(points, seed):
    """Return *points* as another processor may have them: each moved by a relative 1e-12 at most."""
    factors = 1.0 + np.random.default_rng(seed).uniform(-1e-12, 1e-12, len(points))
    return replace(points, seconds=points.seconds * factors)


def test_of_two_forms_that_say_the_same_rounding_does_not_choose():
    samples = made_by(KINDS["sum"], noise=0.02)
    twins = [Form("sum", (constant, "descriptor", "rate")) for constant in ("latency", "call")]
    for seed in range(8):
        points = rounded(samples, seed)
        fits = [transfers.fit(form, points, BASE) for form in twins]
        assert transfers.simplest(fits, points).form == twins[0]


def test_a_rate_as_high_as_the_link_s_does_not_change_the_link():
    machine = compose(["hw=2xh200", "backend=nvlink", "experiment=transfer", "calibration=none"]).hw
    key, rate = calibrate.link_of(machine, "nvlink")
    for times, changed in ((1.0 - 1e-9, False), (1.0 + 1e-9, False), (1.01, True)):
        at = start_of(BASE) | {"call": 11e-6, "descriptor": 2e-6, "rate": rate * times}
        chosen, _ = calibrate._parameters(Fit(SUM, at, BASE), machine, "backend.intra")
        assert (key in chosen) is changed


@pytest.mark.slow
def test_the_order_of_samples_decides_nothing():
    rows = samples_of(made_by(KINDS["sum"], CROSS[::2], noise=0.02), held=[(16, 65536)])
    one, other = (calibration(tuple(order))[1].calibration for order in (rows, rows[::-1]))
    assert one == other


# --- what the samples tell -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_parameter_that_is_lost_in_the_noise_is_not_named():
    quiet = EngineModel(path="rdma", call=0.0, descriptor=1e-12, overlap=False, latency=0.0, rate=49e9)
    samples = made_by(quiet, [(n, 1 << 22) for n in (1, 2, 4, 8, 16, 32, 64)], noise=0.02)
    fit = transfers.identifiable(transfers.fit(Form("sum", ("call", "rate")), samples, BASE), samples)
    assert fit.unidentified == ("call",)
    assert set(fit.intervals) == {"rate"}


def test_what_is_held_out_is_never_seen():
    samples = made_by(KINDS["sum"], CROSS[::2], noise=0.01)
    spoiled = replace(samples, seconds=samples.seconds.copy())
    spoiled.seconds[3] *= 2.0
    clean, hurt = (transfers.held_out(points, BASE, (SUM,)) for points in (samples, spoiled))
    assert hurt[3] == pytest.approx((1.0 + clean[3]) / 2.0 - 1.0, rel=1e-6)


# --- several transfers in flight -----------------------------------------------------------------------------------

IN_ORDER = replace(BASE, in_order=True)
ALONE = start_of(BASE) | {"call": 20e-6, "descriptor": 2e-6, "rate": 200e9}
SPANS = {"call": (19e-6, 21e-6), "descriptor": (1.9e-6, 2.1e-6), "rate": (190e9, 210e9)}
FLIGHT = [(n, size, c) for n, size in ((1, 4096), (1, 1 << 20), (1, 1 << 24), (16, 65536)) for c in (2, 4)]


def crowd(noise=0.005, **truth):
    """Return what transfers in flight take with the parameters of `ALONE`, or those of *truth* instead."""
    n, size, count = (np.array(column, dtype=float) for column in zip(*FLIGHT, strict=True))
    cells = Points(n, size, count, np.ones(len(n)))
    factors = np.exp(np.random.default_rng(3).normal(0.0, noise, len(n)))
    return replace(cells, seconds=Fit(SUM, {**ALONE, **truth}, BASE).seconds(cells) * factors)


def with_crowd(points, base=BASE):
    return transfers.with_concurrency(Fit(SUM, ALONE, base, intervals=SPANS), points)


def test_a_constant_that_keeps_the_poster_stays_the_call():
    assert with_crowd(crowd(), IN_ORDER) == Fit(SUM, ALONE, IN_ORDER, intervals=SPANS)


def test_a_constant_that_transfers_have_side_by_side_is_latency():
    fit = with_crowd(crowd(call=0.0, latency=20e-6), IN_ORDER)
    assert (fit.at["call"], fit.at["latency"]) == (0.0, 20e-6)
    assert fit.form.free == ("latency", "descriptor", "rate")
    assert fit.intervals == {"latency": SPANS["call"], "descriptor": SPANS["descriptor"], "rate": SPANS["rate"]}


def test_of_a_constant_that_is_both_each_part_has_its_interval():
    fit = with_crowd(crowd(call=12e-6, latency=8e-6), IN_ORDER)
    assert fit.at["call"] == pytest.approx(12e-6, rel=0.05)
    assert fit.at["call"] + fit.at["latency"] == pytest.approx(20e-6, rel=1e-12)
    for name in ("call", "latency"):
        assert fit.intervals[name][0] <= fit.at[name] <= fit.intervals[name][1]


def test_queues_that_limit_are_told_with_an_interval():
    fit = with_crowd(crowd(queue_rate=300e9))
    assert fit.at["queue_rate"] == pytest.approx(300e9, rel=0.03)
    assert fit.intervals["queue_rate"][0] <= fit.at["queue_rate"] <= fit.intervals["queue_rate"][1]


def test_queues_that_limit_nothing_or_take_turns_are_not_told():
    for points, base in ((crowd(), BASE), (crowd(queue_rate=300e9), IN_ORDER)):
        fit = with_crowd(points, base)
        assert fit.at["queue_rate"] == inf
        assert "queue_rate" not in fit.intervals


@pytest.mark.slow
def test_crowds_do_not_move_what_single_transfers_say():
    model = replace(KINDS["sum"], call=20e-6, descriptor=3e-6)
    cells = [(n, size) for n in (1, 4, 16, 64, 256, 1024) for size in (4096, 65536, 1 << 20)]
    rows = samples_of(made_by(model, cells), held=[cell for cell in cells if cell[0] == 64])
    waiting = [sample(n, s, model.isolated_time(n, n * s), concurrency=c) for n, s, c in FLIGHT]  # as long as alone
    single, both = (calibration(each)[1] for each in (rows, [*rows, *waiting]))
    for name, truth in (("rate", 390e9), ("descriptor", 3e-6)):
        assert both.fit.at[name] == single.fit.at[name] == pytest.approx(truth, rel=1e-3)
    assert both.calibration.parameters["backend.intra.latency"] == "20us"  # what none of them waited for


# --- reads ---------------------------------------------------------------------------------------------------------


def both_ways(more, noise=0.0, misfit=0.0):
    """Return writes and reads of an engine whose reads cost *more*; a *misfit* is of a configuration, so of both."""
    random = np.random.default_rng(3)
    rows = []
    for n, size in CROSS:
        both = np.exp(random.normal(0.0, misfit))
        for operation, extra in (("write", {}), ("read", more)):
            alone = replace(KINDS["sum"], **extra).isolated_time(n, n * size, read=operation == "read")
            rows.append(sample(n, size, alone * both * np.exp(random.normal(0.0, noise)), operation=operation))
    return rows


def writes_of(rows):
    return transfers.fit(SUM, points_of([row for row in rows if row.operation == "write"]), BASE)


MORE = [{"read": 5e-6}, {"read_descriptor": 1e-6}, {"read_rate": 150e9}]
MORE += [{"read": 5e-6, "read_descriptor": 1e-6}, {"read": 5e-6, "read_rate": 150e9}]


@pytest.mark.slow
@pytest.mark.parametrize("more", MORE, ids=" and ".join)
def test_rounding_does_not_choose_what_makes_reads_longer(more):
    rows = both_ways(more, noise=0.02)
    moved = [[replace(row, seconds=row.seconds * (1.0 + by)) for row in rows] for by in (0.0, 1e-12, -1e-12)]
    chosen = [(writes := writes_of(each), transfers._as_writes_are(writes, each)) for each in moved]
    fits = [transfers._chosen_reads(*each) for each in chosen]
    for fit in fits:
        assert fit.form.free == tuple(more)
        for name, value in more.items():
            assert fit.at[name] == pytest.approx(value, rel=0.1)
            assert fit.at[name] == pytest.approx(fits[0].at[name], rel=1e-6)


@pytest.mark.parametrize("more", [{"read": 5e-6}, {"read_descriptor": 1e-6}, {"read_rate": 150e9}], ids=list)
def test_a_misfit_of_writes_is_not_taken_for_a_cost_of_reads(more):
    rows = both_ways(more, noise=0.01, misfit=0.1)
    fit = transfers.read_overhead(writes_of(rows), rows)
    ((name, value),) = more.items()
    assert fit.form.free == (name,)
    assert fit.at[name] == pytest.approx(value, rel=0.15)
    assert set(fit.intervals) == {name}


@pytest.mark.parametrize("faster", [1.0, 1.2])
def test_reads_that_are_no_slower_cost_nothing_more(faster):
    rows = both_ways({}, noise=0.01)
    rows = [replace(row, seconds=row.seconds / faster) if row.operation == "read" else row for row in rows]
    fit = transfers.read_overhead(writes_of(rows), rows)
    assert (fit.form.free, fit.intervals) == ((), {})
    assert [fit.at[name] for name in transfers.OF_READS] == [0.0, 0.0, inf]


# --- small batches -------------------------------------------------------------------------------------------------

SMALL = replace(BASE, in_order=True, small=InlineSaving(bytes=1 << 16, descriptors=16))
SAVES = replace(
    SMALL,
    call=11e-6,
    descriptor=2.4e-6,
    rate=385e9,
    ramp=(Ramp(first=2, extra=3.3e-6),),
    small=replace(SMALL.small, saving=3e-6),
)
SIZES = [(1, 4096 << power) for power in range(17)]
SIZES += [(1 << power, size) for size in (4096, 1 << 16, 1 << 18, 1 << 20) for power in range(1, 11)]


@pytest.mark.slow
def test_a_saving_and_a_ramp_are_fitted_and_predictions_try_both_ends():
    held = ((1, 16384), (4, 4096), (32, 1 << 16))
    rows = samples_of(made_by(SAVES, SIZES, noise=0.01, seed=5), held)
    config, done = calibration(rows, "mooncake_nvlink")
    made, key = done.calibration, "backend.intra.small.saving"
    assert made.form == "sum(call, descriptor, extra1, first1, rate, saving)"
    assert parse_time(made.parameters[key]) == pytest.approx(3e-6, rel=0.15)
    assert made.held_out.points == len(held)
    assert made.held_out.p95 < 0.05
    low, high = map(parse_time, made.intervals[key])
    assert low < 3e-6 < high
    (ramp,) = made.parameters["backend.intra.ramp"]
    assert (ramp["first"], parse_time(ramp["extra"])) == (2, pytest.approx(3.3e-6, rel=0.15))
    assert "backend.intra.ramp" in made.intervals
    assert "backend.intra.ramp" not in made.unidentified  # though a second step is
    ends = {key: variant for key, *variant in variants(replace(config, calibration=made))}
    thresholds = config.backend.intra.small
    assert [end.backend.intra.small for end in ends[key]] == [replace(thresholds, saving=end) for end in (low, high)]
