"""What is said of predictions beside measurements: errors, their intervals, bounds and hashes."""

import math
from dataclasses import replace
from typing import Any

import pytest

from pdsim.calibration.definition import Calibration, HeldOut
from pdsim.config import Config
from pdsim.core.errors import ConfigError
from pdsim.results.evidence import FACTORS
from pdsim.validation.intervals import spanned
from pdsim.validation.sealed import seal, unseal
from pdsim.validation.verdicts import Bound, Value, by_class, by_decade, compare, metrics, tables
from tests.support.configs import make_config


def value(number: float, label: str = "a", group: str = "pair", nbytes: int = 4096) -> Value:
    return Value(group, label, "time", nbytes, number)


def errors(percents: list[float], group: str = "pair") -> list:
    expected = [value(1 + percent / 100, str(index), group) for index, percent in enumerate(percents)]
    return compare(expected, [value(1.0, str(index), group) for index in range(len(percents))])


def test_only_what_is_both_predicted_and_measured_is_compared():
    measured = [value(2.0, "b"), value(1.0, "c"), value(0.0, "a")]
    (compared,) = compare([value(1.0, "a"), value(1.0, "b")], measured)
    assert (compared.predicted.label, compared.error) == ("b", -0.5)
    with pytest.raises(ConfigError, match="nothing to compare"):
        compare([value(1.0, "a")], [value(1.0, "c")])


def test_a_class_of_twenty_has_bias_median_and_p95():
    (few,) = by_class(errors([1, -2, 3]), {}, seed=0)
    assert (few.points, round(few.bias, 9), round(few.median, 9), few.p95, few.worst) == (3, 0.01, 0.02, None, "2")
    many = errors([float(percent) for percent in range(1, 21)])
    (one,), (again,), (other,) = (by_class(many, {}, seed) for seed in (1, 1, 2))
    assert (one.median, one.p95) == (pytest.approx(0.105), pytest.approx(0.1905))
    assert one.median_interval[0] < one.median < one.median_interval[1]
    assert one == again
    assert one.p95_interval != other.p95_interval


def test_a_class_beyond_its_bound_is_flagged():
    bounds = {"pair": Bound(0.05, 0.15), "": Bound(0.1)}
    both = errors([6, 6]) + errors([9, 9], "incast")
    classes = by_class(both, bounds, 0)
    assert [each.beyond for each in classes] == [True, False]
    assert by_class(errors([1] * 18 + [20, 20]), bounds, 0)[0].beyond  # by its 95th percentile
    assert by_class(errors([9, 9], "pair, read"), bounds, 0)[0].bound == bounds["pair"]
    summary = {each.name: each.value for each in metrics(both, classes)}
    assert (summary["points"], summary["classes_beyond"]) == (4, 1)


def test_sizes_are_put_into_decades():
    expected = [value(1.0, str(size), nbytes=size) for size in (4096, 9999, 10_000, 5_000_000)]
    decades = [(each.name, each.points) for each in by_decade(compare(expected, expected), 0)]
    assert decades == [("pair, 1e3 B", 2), ("pair, 1e4 B", 1), ("pair, 1e6 B", 1)]


def test_what_jobs_differ_by_stands_beside_the_error():
    measured = [replace(value(2.0, "a"), per_job=(1.0, 4.0)), replace(value(3.0, "b"), per_job=(3.0, 3.0))]
    (table,) = tables(by_class(compare([value(2.0, "a"), value(3.0, "b")], measured), {}, 0), [])
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert row["floor %"] == pytest.approx(34.66, rel=1e-3)  # ln 2 of one point, 0 of the other
    assert "floor %" not in tables(by_class(errors([1]), {}, 0), [])[0].columns


def test_points_within_their_interval_are_counted_by_class():
    both = [replace(value(1.0, str(index)), low=0.9, high=high) for index, high in enumerate((1.3, 1.1))]
    (table,) = tables(by_class(compare(both, [value(1.2, "0"), value(1.2, "1")]), {}, 0), [])
    assert dict(zip(table.columns, table.rows[0], strict=True))["inside"] == 1
    assert "inside" not in tables(by_class(errors([1]), {}, 0), [])[0].columns


def test_what_was_sealed_and_changed_is_refused():
    text = seal({"expected": [1.5]})
    assert unseal(text, "expectations.json")["expected"] == [1.5]
    with pytest.raises(ConfigError, match=r"expectations.json was changed after it was written"):
        unseal(text.replace(b"1.5", b"1.6"), "expectations.json")


def calibrated(path, **about: Any) -> Config:
    """Return a configuration whose calibration says *about*: a call takes 5 us, a descriptor 1 us."""
    about = {"held_out": None, **about}
    if p95 := about.pop("p95", None):
        about["held_out"] = HeldOut(points=16, how="random", mean=0.1, median=0.1, p95=p95, bias=0.0)
    return replace(make_config(path), calibration=Calibration(name="fit", hw=("toy",), backend=("fast",), **about))


CAUSES = [
    ("pair", "pair 1x4096 c1", 4096, "small"),
    ("pair, read", "pair 1x99999999 c1 read", 99_999_999, "large"),
    ("pair", "pair 1x4096 c16", 4096, "apart"),
    ("bidirectional, total rate", "bidirectional 1x4096 c1", 4096, "apart"),
    ("incast", "incast:3 1x4096 c1, rank1 to rank0", 4096, "shared"),
    ("handoff, whole", "1to2 whole 512 tokens", 0, "handoff"),
]


@pytest.mark.parametrize(("group", "label", "nbytes", "name"), CAUSES)
def test_an_interval_is_the_factor_of_its_class(tmp_path, group, label, nbytes, name):
    at = replace(value(2.0, label, group), nbytes=nbytes)
    (one,) = spanned(calibrated(tmp_path, p95=0.01), [at])
    assert (one.low, one.high) == (pytest.approx(2.0 / FACTORS[name]), pytest.approx(2.0 * FACTORS[name]))
    (one,) = spanned(calibrated(tmp_path, p95=2.5), [at])  # what the fit missed is more
    assert (one.low, one.high) == (pytest.approx(2.0 / 3.5), pytest.approx(2.0 * 3.5))
    (one,) = spanned(make_config(tmp_path), [at])
    assert (one.low, one.high) == (None, None)


def test_threads_and_bare_libraries_have_their_own_factors(tmp_path):
    config = calibrated(tmp_path, p95=0.01)
    threaded = replace(config, backend=replace(config.backend, options={"progress_thread": "true"}))
    bare = replace(threaded, calibration=replace(config.calibration, name="nixl_bare-2xh200"))
    posters = replace(config, backend=replace(config.backend, threads=3))
    for of, name in ((threaded, "thread small"), (bare, "bare thread small"), (posters, "shared")):
        (one,) = spanned(of, [value(1.0)])
        assert one.high == pytest.approx(FACTORS[name])


@pytest.mark.parametrize(
    ("nbytes", "descriptors", "gpus", "factor"),
    [
        (1024, 4, 2, 1.0),
        (256, 4, 2, 4.0),
        (1 << 20, 4, 2, 2.0),
        (1024, 4, 4, 1.0),  # as in blind predictions, if not in samples
        (1024, 4, 99, 2.0),  # no more GPUs take part than there are
        (1024, 8, 8, 4.0),
    ],
)
def test_an_interval_grows_beyond_the_samples(tmp_path, nbytes, descriptors, gpus, factor):
    config = calibrated(tmp_path, p95=0.1, descriptors=(1, 4), bytes=(1024, 1 << 19), gpus=(2, 2))
    config = replace(config, hw=replace(config.hw, nodes=1, gpus=8))
    (one,) = spanned(config, [replace(value(1.0, nbytes=nbytes), descriptors=descriptors, gpus=gpus)])
    reach = FACTORS["small"] ** (1.0 + math.log2(factor))
    assert (one.factor, one.low, one.high) == (factor, pytest.approx(1.0 / reach), pytest.approx(reach))
