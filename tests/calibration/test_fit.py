"""A fit finds the form and the parameters that made its samples, and does not name what they cannot tell."""

from dataclasses import replace

import numpy as np
import pytest

from pdsim.calibration import files, fit
from pdsim.calibration.forms import FORMS, Form, Points, model_of, start_of
from pdsim.calibration.from_samples import fitted
from pdsim.calibration.samples import Sample, Samples
from pdsim.config.compose import compose
from pdsim.hardware.costs import EngineModel, Ramp

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


def made_by(model, cells=CROSS, noise=0.0, seed=0):
    """Return the samples that *model* gives, with a relative error of *noise*."""
    n, size = (np.array(column, dtype=float) for column in zip(*cells, strict=True))
    alone = np.array([model.isolated_time(int(count), count * each) for count, each in zip(n, size, strict=True)])
    factors = np.exp(np.random.default_rng(seed).normal(0.0, noise, len(n)))
    return Points(n, size, np.ones(len(n)), alone * factors)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("ramped", [False, True])
def test_a_form_says_what_its_engine_model_says(form, ramped):
    at = start_of(BASE) | {"call": 3e-6, "latency": 5e-6, "descriptor": 2e-7, "rate": 40e9}
    at |= {"extra1": 5e-7, "first1": 16.0} if ramped else {}
    cells = made_by(BASE)
    model = model_of(form, at, BASE)
    said = [model.isolated_time(int(n), n * size) for n, size in zip(cells.blocks, cells.size, strict=True)]
    assert form.seconds(at, cells) == pytest.approx(said, rel=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_the_form_that_made_the_samples_is_chosen(kind):
    chosen = fit.choose(made_by(KINDS[kind], noise=0.005), BASE)
    assert chosen.form.stages == kind
    found = model_of(chosen.form, chosen.at, BASE)
    assert found.descriptor == pytest.approx(KINDS[kind].descriptor, rel=0.03)
    assert found.rate == pytest.approx(KINDS[kind].rate, rel=0.03)
    assert found.call + found.latency == pytest.approx(KINDS[kind].call + KINDS[kind].latency, rel=0.03)


def test_one_sample_in_ten_that_is_three_times_too_long_does_little_harm():
    samples = made_by(KINDS["sum"], noise=0.005)
    samples.seconds[::10] *= 3.0
    found = fit.fit(Form("sum", ("call", "descriptor", "rate")), samples, BASE)
    assert [found.at[name] for name in found.form.free] == pytest.approx([11e-6, 2e-6, 390e9], rel=0.03)


def test_a_batch_whose_first_descriptors_cost_more_shows_its_ramp():
    model = EngineModel(
        path="rdma",
        call=0.0,
        descriptor=0.14e-6,
        overlap=True,
        latency=10e-6,
        rate=49e9,
        ramp=(Ramp(first=16, extra=7e-7),),
    )
    cells = [(1 << power, size) for power in range(15) for size in (64, 1024)]
    chosen = fit.choose(made_by(model, cells, noise=0.005), BASE)
    assert chosen.at["first1"] == pytest.approx(16.0, rel=0.1)
    assert chosen.at["extra1"] == pytest.approx(7e-7, rel=0.1)


def test_a_ramp_ends_at_a_whole_number_of_descriptors():
    step = replace(KINDS["sum"], descriptor=0.5e-6, ramp=(Ramp(first=2, extra=5e-6),))
    cells = [(1 << power, size) for power in range(12) for size in (4096, 65536)]
    chosen = fit.choose(made_by(step, cells, noise=0.01), BASE)
    assert chosen.at["first1"] == 2.0
    assert chosen.at["extra1"] == pytest.approx(5e-6, rel=0.1)
    said = made_by(model_of(chosen.form, chosen.at, BASE), cells)  # whose ramps have whole numbers only
    assert chosen.seconds(said) == pytest.approx(said.seconds, rel=1e-12)


def test_of_single_descriptors_neither_the_stages_nor_the_descriptor_are_told():
    chosen = fit.choose(made_by(KINDS["maximum"], [(1, 4096 << power) for power in range(14)], noise=0.002), BASE)
    assert chosen.form == Form("sum", ("call", "rate"))  # the stages of BASE
    assert chosen.at["descriptor"] == BASE.descriptor


def test_of_one_count_the_call_and_the_descriptor_are_one_number():
    cells = [(64, 4096 << power) for power in range(10)]
    found = fit._identified(fit.fit(Form("sum", ("call", "descriptor", "rate")), made_by(KINDS["sum"], cells), BASE),
                            made_by(KINDS["sum"], cells), BASE)  # fmt: skip
    assert found.unidentified == ("descriptor",)


def test_of_one_size_the_descriptor_and_its_bytes_are_one_number():
    cells = [(1 << power, 4096) for power in range(10)]
    samples = made_by(KINDS["sum"], cells)
    found = fit._identified(fit.fit(Form("sum", ("call", "descriptor", "rate")), samples, BASE), samples, BASE)
    assert found.unidentified == ("rate",)


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
        fits = [fit.fit(form, points, BASE) for form in twins]
        assert fit.simplest(fits, points, BASE).form == twins[0]


def test_of_two_starts_that_end_equally_well_rounding_does_not_choose():
    samples = made_by(KINDS["sum"], [(64, 4096 << power) for power in range(10)], noise=0.02)
    # of one count, call and descriptor are one number, of any share
    form = Form("sum", ("call", "descriptor", "rate"))
    found = [fit.fit(form, rounded(samples, seed), BASE) for seed in range(12)]
    for name in form.free:
        assert [one.at[name] for one in found] == pytest.approx([found[0].at[name]] * len(found), rel=5e-3)


def test_of_three_parameters_that_are_one_number_rounding_does_not_choose_which_to_give_up():
    samples = made_by(KINDS["sum"], [(64, 1 << 20)] * 6, noise=0.02)
    one = fit.Fit(Form("sum", ("call", "descriptor", "rate")), start_of(BASE) | {"call": 2e-4, "rate": 400e9})
    names = set()
    for seed in range(12):
        factors = 1.0 + np.random.default_rng(seed).uniform(-1e-12, 1e-12, 3)
        moved = {name: one.at[name] * by for name, by in zip(one.form.free, factors, strict=True)}
        names.add(fit._dependent(replace(one, at={**one.at, **moved}), rounded(samples, seed)))
    assert names == {"rate"}


def test_of_samples_without_noise_the_simplest_form_is_not_dropped_for_its_last_digits():
    samples = made_by(KINDS["sum"])
    at = start_of(BASE) | {"call": 11e-6, "descriptor": 2e-6, "rate": 390e9}
    simple = fit.Fit(Form("sum", ("call", "descriptor", "rate")), at | {"rate": 390e9 * (1.0 + 1e-7)})
    rich = fit.Fit(Form("sum", ("call", "descriptor", "extra1", "first1", "rate")), at)
    assert fit._promising([simple, rich], samples) == [simple]


def test_a_rate_as_high_as_the_link_s_does_not_change_the_link():
    machine = compose(["hw=2xh200", "backend=nvlink", "experiment=transfer", "calibration=none"]).hw
    key, rate = files.link_of(machine, "nvlink")
    form = Form("sum", ("call", "descriptor", "rate"))
    for times, changed in ((1.0 - 1e-9, False), (1.0 + 1e-9, False), (1.01, True)):
        at = start_of(BASE) | {"call": 11e-6, "descriptor": 2e-6, "rate": rate * times}
        chosen, _ = files.parameters(fit.Fit(form, at), {}, BASE, machine, "backend.intra")
        assert (key in chosen) is changed


def test_the_order_of_samples_decides_nothing():
    config = compose(["hw=2xh200", "backend=nvlink", "experiment=transfer", "calibration=none"])
    cells = made_by(KINDS["sum"], CROSS[::2], noise=0.02)
    columns = zip(map(int, cells.blocks), map(int, cells.size), map(float, cells.seconds), strict=True)
    rows = [Sample(blocks=n, size=size, seconds=s, low=s, high=s, held=n == 16) for n, size, s in columns]
    orders = rows, rows[::-1]
    about = (config.hw, config.backend, "write", "intra", "mine", "a test")
    one, other = (fitted(Samples(tuple(order)), *about).calibration for order in orders)
    assert one == other


# --- what the samples tell -----------------------------------------------------------------------------------------


def test_a_parameter_that_is_lost_in_the_noise_is_not_named():
    quiet = EngineModel(path="rdma", call=0.0, descriptor=1e-12, overlap=False, latency=0.0, rate=49e9)
    samples = made_by(quiet, [(n, 1 << 22) for n in (1, 2, 4, 8, 16, 32, 64)], noise=0.02)
    found, spans = fit.told(fit.fit(Form("sum", ("call", "rate")), samples, BASE), samples, BASE)
    assert found.unidentified == ("call",)
    assert set(spans) == {"rate"}


def test_intervals_hold_the_truth():
    samples = made_by(KINDS["sum"], noise=0.02)
    found = fit.fit(Form("sum", ("call", "descriptor", "rate")), samples, BASE)
    spans = fit.intervals(found, samples, BASE, resamples=100)
    for name, truth in (("call", 11e-6), ("descriptor", 2e-6), ("rate", 390e9)):
        low, high = spans[name]
        assert low < truth < high
        assert high < 1.2 * low


def test_crowds_tell_what_all_transfers_share():
    alone = made_by(KINDS["sum"])
    shared = EngineModel(path="nvlink", call=11e-6, descriptor=2e-6, overlap=False, latency=0.0, rate=390e9)
    crowd = 4.0
    busy = [max(shared.isolated_time(1, size), crowd * size / 450e9) for size in (1 << 20, 1 << 24, 1 << 28)]
    points = Points(
        np.append(alone.blocks, [1.0] * 3),
        np.append(alone.size, [float(1 << 20), float(1 << 24), float(1 << 28)]),
        np.append(alone.concurrency, [crowd] * 3),
        np.append(alone.seconds, busy),
    )
    found = fit.fit(Form("sum", ("call", "descriptor", "rate", "queue_rate")), points, BASE)
    assert found.at["queue_rate"] == pytest.approx(450e9, rel=0.01)


def test_what_is_held_out_is_never_seen():
    samples = made_by(KINDS["sum"], CROSS[::2], noise=0.01)
    spoiled = Points(samples.blocks, samples.size, samples.concurrency, samples.seconds.copy())
    spoiled.seconds[3] *= 2.0
    forms = (Form("sum", ("call", "descriptor", "rate")),)
    clean, hurt = (fit.held_out(points, BASE, forms) for points in (samples, spoiled))
    assert hurt[3] == pytest.approx((1.0 + clean[3]) / 2.0 - 1.0, rel=1e-6)
