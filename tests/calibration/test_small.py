"""What small batches save is a term of each form for an engine that says which they are, and of no other."""

from dataclasses import replace

import numpy as np
import pytest

from pdsim.calibration import fit
from pdsim.calibration.forms import FORMS, Form, Points, model_of, start_of
from pdsim.calibration.from_samples import fitted
from pdsim.calibration.samples import Sample, Samples
from pdsim.config.compose import compose
from pdsim.core.units import parse_time
from pdsim.hardware.costs import EngineModel, InlineSaving, Ramp
from pdsim.validation.intervals import variants

BASE = EngineModel(
    path="nvlink",
    call=0.0,
    descriptor=1e-6,
    overlap=False,
    latency=0.0,
    in_order=True,
    small=InlineSaving(bytes=1 << 16, descriptors=16),
)
TRUTH = replace(
    BASE,
    call=11e-6,
    descriptor=2.4e-6,
    rate=385e9,
    ramp=(Ramp(first=2, extra=3.3e-6),),
    small=replace(BASE.small, saving=3e-6),
)
CELLS = [(1, 4096 << power) for power in range(17)]
CELLS += [(1 << power, size) for size in (4096, 1 << 16, 1 << 18, 1 << 20) for power in range(1, 11)]
HELD = ((1, 16384), (4, 4096), (32, 1 << 16))


def made_by(model, cells=CELLS, noise=0.01):
    """Return the samples that *model* gives, with a relative error of *noise*."""
    alone = np.array([model.isolated_time(n, n * size) for n, size in cells])
    n, size = np.array(cells, dtype=float).T
    return Points(n, size, np.ones(len(n)), alone * np.exp(np.random.default_rng(5).normal(0.0, noise, len(n))))


def sample(n, size, seconds):
    return Sample(blocks=n, size=size, seconds=seconds, low=seconds, high=seconds, held=(n, size) in HELD)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("saving", [2e-6, 6e-6, 1e-3])
def test_a_form_says_what_its_engine_model_says(form, saving):
    at = start_of(BASE) | {"call": 3e-6, "latency": 5e-6, "descriptor": 2e-7, "rate": 40e9, "saving": saving}
    cells = made_by(BASE)
    model = model_of(form, at, BASE)
    said = [model.isolated_time(int(n), n * size) for n, size in zip(cells.blocks, cells.size, strict=True)]
    assert form.seconds(at, cells) == pytest.approx(said, rel=1e-14)


def test_of_an_engine_without_thresholds_no_form_has_it():
    samples = made_by(TRUTH)
    assert all("saving" in form.free for form in fit.candidates(samples, BASE))
    without = fit.candidates(samples, replace(BASE, small=None))
    assert not any("saving" in form.free for form in without)
    assert model_of(without[0], start_of(replace(BASE, small=None)), replace(BASE, small=None)).small is None


@pytest.mark.parametrize("large", [False, True])
def test_samples_of_one_kind_only_do_not_tell_what_is_saved(large):
    cells = [(n, size) for n, size in CELLS if TRUTH.small.takes(n, n * size) != large]
    samples = made_by(TRUTH, cells)
    found = fit._identified(fit.fit(Form("sum", ("call", "descriptor", "saving")), samples, BASE), samples, BASE)
    assert found.unidentified == ("saving",)
    assert found.at["saving"] == 0.0


def test_it_is_found_with_an_interval_and_so_is_the_ramp_beside_it_and_predictions_try_both_ends():
    samples = made_by(TRUTH)
    columns = zip(samples.blocks, samples.size, samples.seconds, strict=True)
    rows = tuple(sample(int(n), int(size), float(seconds)) for n, size, seconds in columns)
    config = compose(["hw=2xh200", "backend=mooncake_nvlink", "experiment=transfer", "calibration=none"])
    found = fitted(
        Samples(rows, {"kind": "measured"}), config.hw, config.backend, "write", "intra", "of-small", "a test"
    ).calibration
    key = "backend.intra.small.saving"
    assert found.form == "sum(call, descriptor, extra1, first1, rate, saving)"
    assert parse_time(found.parameters[key]) == pytest.approx(3e-6, rel=0.15)
    assert found.held_out.points == len(HELD)
    assert found.held_out.p95 < 0.05
    low, high = map(parse_time, found.intervals[key])
    assert low < 3e-6 < high
    (ramp,) = found.parameters["backend.intra.ramp"]
    assert (ramp["first"], parse_time(ramp["extra"])) == (2, pytest.approx(3.3e-6, rel=0.15))
    assert "backend.intra.ramp" in found.intervals
    assert "backend.intra.ramp" not in found.unidentified  # though a second step is
    ends = {key: variant for key, *variant in variants(replace(config, calibration=found))}
    assert [end.backend.intra.small for end in ends[key]] == [replace(BASE.small, saving=end) for end in (low, high)]
