"""What `pdsim refit` fits is what ``conf/`` has: published tables, options, collectives, hosts and copies."""

import re
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

import conf
from pdsim.config import build
from pdsim.config.compose import compose
from pdsim.core.units import parse_time
from pdsim.hardware.costs import OptionCosts
from tools import collective_fit, handoff_fit, option_fit
from tools.refit import published

CONF = Path(conf.__file__).parent


def test_a_published_calibration_is_what_its_samples_give():
    (done,) = published(["efa-read"])
    file = OmegaConf.load(CONF / "calibration" / "efa-read.yaml")
    assert done.calibration.parameters == OmegaConf.to_container(file.parameters)
    assert done.calibration.held_out.mean == pytest.approx(file.held_out.mean, rel=1e-3)


def test_shipped_costs_of_options_are_what_their_samples_give():
    file = OmegaConf.to_container(OmegaConf.load(CONF / "backend" / "nixl.yaml"))
    shipped = [build(OptionCosts, item) for item in file["intra"]["by_option"][1:]]
    base, sets = option_fit.bare(), option_fit.process_sets()
    values = option_fit.fit(base, sets)
    for costs in shipped:
        assert (costs.latency, costs.descriptor, costs.rate) == pytest.approx(tuple(values.values()), rel=5e-3)
    for name, ends in option_fit.spans(base, sets).items():
        parse = float if name == "rate" else parse_time
        assert [parse(end) for end in shipped[1].intervals[name]] == pytest.approx(ends, rel=5e-3, abs=1e-9)
    errors = np.abs(np.concatenate([option_fit.errors(base, one, values, held=True) for one in sets]))
    said, others = (float(number) / 100 for number in re.findall(r"([\d.]+) %", shipped[1].evidence))
    assert np.median(errors) == pytest.approx(said, abs=5e-4)
    of_all = {"mean": errors.mean(), "median": np.median(errors), "p95": np.percentile(errors, 95)}
    assert shipped[1].errors == pytest.approx(of_all, abs=1e-3)
    assert np.median(option_fit.spread(sets)) == pytest.approx(others, abs=5e-4)
    assert said < others


EVERY = collective_fit.points()


@pytest.mark.parametrize("name", ["nccl", "symm_mem"])
def test_shipped_collectives_are_what_their_samples_give(name):
    library = compose(["experiment=allgather", "hw=4xh200", f"collective={name}"]).collective
    for kind in collective_fit.KINDS:
        given = getattr(library, kind)
        mine = [point for point in EVERY if point.kind == kind and (kind == "plain" or point.library == name)]
        fitted = collective_fit.fit(mine, given)
        for key in collective_fit.FITTED:
            assert getattr(given, key) == pytest.approx(getattr(fitted, key), rel=0.01), key
    times = (library.symmetric.after_pause, library.symmetric.grown)
    assert times == pytest.approx(collective_fit.host_times(EVERY), rel=0.01)
    assert library.plain.after_pause == library.symmetric.after_pause


def test_shipped_hosts_and_copies_are_what_the_records_give():
    fitted, shown = handoff_fit.tables()
    numbers = {row[0]: row[1] * 1e-6 for row in fitted.rows}
    hw = handoff_fit.handoff_config(handoff_fit.FITTED[0]).hw
    for name in ("call", "context_switch"):
        assert getattr(hw.gpu.copies, name) == pytest.approx(numbers[f"hw.gpu.copies.{name}"], abs=0.5e-6)
    assert hw.gpu.copies.descriptor == pytest.approx(numbers["hw.gpu.copies.descriptor"], abs=0.05e-9)
    assert hw.host.wake == pytest.approx(numbers["hw.host.wake"], abs=0.5e-6)
    assert hw.gpu.idle_wake == pytest.approx(numbers["hw.gpu.idle_wake"], abs=0.5e-6)
    assert hw.host.idle_wake == pytest.approx(numbers["hw.host.idle_wake"], abs=50e-6)  # moves with the calibration
    assert {row[4] for row in shown.rows} == {"yes", "in part", "no"}
