"""What jobs that differ leave of any model's error, and the mean of them that counts."""

import numpy as np
import pytest

from benchmarks.jobs import fitted
from pdsim.calibration import fit, jobs
from pdsim.calibration.forms import points_of


def medians(spread, count, points=4000):
    return np.exp(np.random.default_rng(0).normal(np.log(50e-6), spread, (points, count))).tolist()


def test_a_job_that_is_slow_by_a_factor_counts_for_the_factor():
    assert jobs.mean([1e-5, 1e-5, 8e-5]) == pytest.approx(2e-5)


@pytest.mark.parametrize("count", [2, 3, 9])
def test_the_floor_is_the_error_of_who_knows_what_every_point_takes(count):
    points = medians(0.1, count)
    found = jobs.floor(points)
    errors = np.abs(np.log([jobs.mean(one) / 50e-6 for one in points]))  # the truth is known here only
    assert found.jobs == count
    assert found.median == pytest.approx(np.median(errors), rel=0.05)
    assert found.p95 == pytest.approx(np.percentile(errors, 95), rel=0.05)


def test_more_jobs_lower_the_floor_by_their_root_and_not_how_far_they_are_apart():
    few, many = jobs.floor(medians(0.1, 2)), jobs.floor(medians(0.1, 8))
    assert many.median == pytest.approx(few.median / 2, rel=0.1)
    assert jobs.floor([[1.0, np.exp(0.3)]]).apart == pytest.approx(0.3)


def test_one_job_tells_nothing():
    assert jobs.floor([[1e-5], [2e-5], []]) is None
    assert jobs.floor([[1e-5], [1e-5, 1e-5]]).median == 0.0


def test_what_is_left_of_nvlinks_error_in_the_quickest_jobs_is_within_the_bounds():
    found, classes = fitted("nvlink", min)
    assert found.form.stages == "sum"
    assert found.at["first1"] == 2.0  # two copies are another call of CUDA than one
    for rows in classes.values():
        size = np.abs(fit.errors(found, points_of(rows)))
        assert (np.median(size) < 0.05, np.percentile(size, 95) < 0.15) == (True, True)
        assert all(len(row.per_job) == 3 for row in rows)
