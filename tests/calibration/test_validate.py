"""What is said of predictions beside measurements: errors, their intervals, bounds and hashes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from pdsim.calibration.definition import Calibration, HeldOut
from pdsim.config import Config
from pdsim.core.errors import ConfigError
from pdsim.hardware.costs import Ramp
from pdsim.validation.intervals import HANDOFF, predicted, variants
from pdsim.validation.sealed import seal, unseal
from pdsim.validation.verdicts import Bound, Value, by_class, by_decade, compare, metrics, tables
from tests.support.configs import make_config


def value(number: float, label: str = "a", group: str = "pair", nbytes: int = 4096) -> Value:
    return Value(group, label, "time", nbytes, number)


def errors(percents: list[float], group: str = "pair") -> list:
    expected = [value(1 + percent / 100, str(index), group) for index, percent in enumerate(percents)]
    return compare(expected, [value(1.0, str(index), group) for index in range(len(percents))])


def test_an_error_is_signed_and_relative_to_the_measurement():
    (compared,) = compare([value(2e-6)], [value(4e-6)])
    assert compared.error == -0.5


def test_only_what_is_both_predicted_and_measured_is_compared():
    compared = compare([value(1.0, "a"), value(1.0, "b")], [value(1.0, "b"), value(1.0, "c"), value(0.0, "a")])
    assert [each.predicted.label for each in compared] == ["b"]
    with pytest.raises(ConfigError, match="nothing to compare"):
        compare([value(1.0, "a")], [value(1.0, "c")])


def test_a_class_has_bias_median_and_the_95th_percentile_if_it_has_twenty_points():
    (few,) = by_class(errors([1, -2, 3]), {}, seed=0)
    assert (few.points, round(few.bias, 9), round(few.median, 9), few.p95) == (3, 0.01, 0.02, None)
    assert few.worst == "2"
    (many,) = by_class(errors([float(percent) for percent in range(1, 21)]), {}, seed=0)
    assert many.median == pytest.approx(0.105)
    assert many.p95 == pytest.approx(0.1905)
    assert many.median_interval[0] < many.median < many.median_interval[1]


def test_intervals_are_drawn_from_the_seed():
    found = errors([float(percent**2) for percent in range(40)])
    assert by_class(found, {}, 1) == by_class(found, {}, 1)
    assert by_class(found, {}, 1)[0].p95_interval != by_class(found, {}, 2)[0].p95_interval


def test_a_class_beyond_its_bound_is_flagged():
    bounds = {"pair": Bound(0.05, 0.15), "": Bound(0.1)}
    assert [each.beyond for each in by_class(errors([6, 6]) + errors([9, 9], "incast"), bounds, 0)] == [True, False]
    assert by_class(errors([1] * 18 + [20, 20]), bounds, 0)[0].beyond  # by its 95th percentile
    assert by_class(errors([9, 9], "pair, read"), bounds, 0)[0].bound == bounds["pair"]
    assert not by_class(errors([90]), {}, 0)[0].beyond


def test_sizes_are_put_into_decades():
    expected = [value(1.0, str(size), nbytes=size) for size in (4096, 9999, 10_000, 5_000_000)]
    assert [(each.name, each.points) for each in by_decade(compare(expected, expected), 0)] == [
        ("pair, 1e3 B", 2),
        ("pair, 1e4 B", 1),
        ("pair, 1e6 B", 1),
    ]


def test_what_jobs_differ_by_stands_beside_the_error():
    measured = [replace(value(2.0, "a"), per_job=(1.0, 4.0)), replace(value(3.0, "b"), per_job=(3.0, 3.0))]
    found = by_class(compare([value(2.0, "a"), value(3.0, "b")], measured), {}, 0)
    assert found[0].floor is not None
    assert found[0].floor.median == pytest.approx(0.3466, rel=1e-3)  # ln 2 of one point, 0 of the other
    assert dict(zip(tables(found, [])[0].columns, tables(found, [])[0].rows[0], strict=True))["floor %"] > 34
    assert "floor %" not in tables(by_class(errors([1]), {}, 0), [])[0].columns


def test_what_was_sealed_and_changed_is_refused():
    text = seal({"expected": [1.5]})
    assert unseal(text, "expectations.json")["expected"] == [1.5]
    with pytest.raises(ConfigError, match=r"expectations.json was changed after it was written"):
        unseal(text.replace(b"1.5", b"1.6"), "expectations.json")


def test_the_summary_counts_points_and_classes_beyond_their_bounds():
    found = errors([1, 30])
    summary = {each.name: each.value for each in metrics(found, by_class(found, {"": Bound(0.1)}, 0))}
    assert (summary["points"], summary["classes_beyond"]) == (2, 1)


# --- the calibration's uncertainty ---------------------------------------------------------------------------------


def calibrated(path: Path) -> Config:
    spans = {"backend.intra.call": ("4us", "8us"), "backend.intra.descriptor": ("1us", "4us")}
    return replace(
        make_config(path), calibration=Calibration(name="fit", hw=("toy",), backend=("fast",), intervals=spans)
    )


def test_every_interval_is_tried_at_both_ends(tmp_path: Path):
    found = {key: (low, high) for key, low, high in variants(calibrated(tmp_path))}
    low, high = found["backend.intra.call"]
    assert (low.backend.intra.call, high.backend.intra.call) == (4e-6, 8e-6)
    assert low.backend.intra.descriptor == 1e-6


def test_the_steps_of_a_ramp_go_to_their_ends_together(tmp_path: Path):
    ends = ("2 x 1us and 64 x 0.1us", "4 x 2us and 100 x 0.2us")
    calibration = Calibration(name="fit", hw=("toy",), backend=("fast",), intervals={"backend.intra.ramp": ends})
    ((_, low, high),) = variants(replace(make_config(tmp_path), calibration=calibration))
    assert low.backend.intra.ramp == (Ramp(first=2, extra=1e-6), Ramp(first=64, extra=1e-7))
    assert high.backend.intra.ramp == (Ramp(first=4, extra=2e-6), Ramp(first=100, extra=2e-7))


def test_deviations_add_in_quadrature(tmp_path: Path):
    def predict(config: Config) -> list[Value]:
        assert config.backend.intra is not None
        return [value(config.backend.intra.call + config.backend.intra.descriptor)]

    (found,) = predicted(calibrated(tmp_path), predict)  # 5 us (4 to 8) and 1 us (1 to 4)
    assert found.value == pytest.approx(6e-6)
    assert found.low == pytest.approx(5e-6)
    assert found.high == pytest.approx(6e-6 + (9 + 9) ** 0.5 * 1e-6)


def test_without_a_calibration_there_is_no_interval(tmp_path: Path):
    (found,) = predicted(make_config(tmp_path), lambda config: [value(1.0)])
    assert (found.low, found.high) == (None, None)


def test_what_the_fit_missed_adds_to_the_interval(tmp_path: Path):
    held = HeldOut(points=16, how="random", mean=0.1, median=0.1, p95=0.3, bias=0.0)
    config = calibrated(tmp_path)
    config = replace(config, calibration=replace(config.calibration, held_out=held, intervals={}))
    (found,) = predicted(config, lambda _: [value(1.0)])
    assert (found.low, found.high) == (pytest.approx(0.7), pytest.approx(1.3))


@pytest.mark.parametrize(
    ("nbytes", "descriptors", "gpus", "factor"),
    [
        (1024, 4, 2, 1.0),
        (256, 4, 2, 4.0),
        (1 << 20, 4, 2, 2.0),
        (1024, 4, 99, 2.0),  # no more GPUs take part than there are
        (1024, 8, 4, 4.0),
    ],
)
def test_an_interval_grows_with_the_factor_beyond_the_samples(tmp_path: Path, nbytes, descriptors, gpus, factor):
    held = HeldOut(points=16, how="random", mean=0.1, median=0.1, p95=0.1, bias=0.0)
    calibration = Calibration(name="fit", held_out=held, descriptors=(1, 4), bytes=(1024, 1 << 19), gpus=(2, 2))
    config = make_config(tmp_path)
    config = replace(config, calibration=calibration, hw=replace(config.hw, nodes=1, gpus=4))
    at = replace(value(1.0, nbytes=nbytes), descriptors=descriptors, gpus=gpus)
    (found,) = predicted(config, lambda _: [at])
    assert found.factor == factor
    assert found.high == pytest.approx(1.0 + 0.1 * (1.0 + math.log2(factor)))
    assert found.low == pytest.approx(1.0 - 0.1 * (1.0 + math.log2(factor)))


def test_a_single_handoff_has_the_error_of_handoffs_in_its_interval(tmp_path: Path) -> None:
    held = HeldOut(points=16, how="random", mean=0.05, median=0.05, p95=0.05, bias=0.0)
    config = replace(make_config(tmp_path), calibration=Calibration(name="c", held_out=held))
    values = [Value(group, "a", "time", 4096, 1.0) for group in ("handoff, whole", "metadata, data", "pair")]
    found = [value.high for value in predicted(config, lambda _: values)]
    one = 1.0 + math.hypot(0.05, HANDOFF)
    assert found == pytest.approx([one, one, 1.05])


def test_hosts_are_a_parameter_of_their_own_unless_one_is_given(tmp_path: Path):
    def predict(config: Config) -> list[Value]:
        assert config.backend.intra is not None
        return [value(config.backend.intra.call)]

    config = replace(make_config(tmp_path), calibration=Calibration(name="fit", hosts=(0.8, 1.0, 1.5)))
    (found,) = predicted(config, predict)  # 5 us
    assert (found.low, found.high) == (pytest.approx(4e-6), pytest.approx(7.5e-6))
    given = replace(config, calibration=Calibration(name="fit", hosts=(0.8, 1.0, 1.5), host=3.0))
    (found,) = predicted(given, predict)
    assert (found.low, found.factor) == (None, 2.0)
