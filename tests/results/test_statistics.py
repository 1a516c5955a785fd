"""Percentiles are numpy's, and are withheld where the sample is too small to have one."""

import numpy as np
import pytest

from pdsim.results.record import distribution, mean, needed, percentile


@pytest.mark.parametrize(("q", "samples"), [(0, 1), (50, 1), (90, 10), (99, 100), (99.9, 1000)])
def test_a_percentile_needs_one_sample_beyond_it(q, samples):
    assert needed(q) == samples
    assert percentile([1.0] * samples, q) == 1.0
    assert percentile([1.0] * (samples - 1), q) is None


def test_a_percentile_is_interpolated_between_its_neighbours():
    assert percentile(range(101), 99) == 99.0
    assert percentile([0.0, 1.0, 2.0, 3.0], 50) == 1.5


def test_there_is_no_mean_of_nothing():
    assert mean([]) is None
    assert mean(np.array([1.0, 2.0])) == 1.5


@pytest.mark.parametrize("q", [-1, 100, 101])
def test_a_percentile_outside_its_range_is_refused(q):
    with pytest.raises(ValueError, match=rf"q\(={q}\) must be >= 0 and < 100"):
        percentile([1.0], q)


def test_a_distribution_says_what_each_number_is_and_what_it_lacks():
    metrics = {metric.name: metric for metric in distribution("ttft", "s", [1.0] * 100, "time to the first token")}
    assert list(metrics) == ["ttft_avg_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "ttft_p99_9_s"]
    assert metrics["ttft_p99_s"].value == 1.0
    assert metrics["ttft_p99_9_s"].value is None
    assert metrics["ttft_p99_9_s"].definition == "p99.9 of: time to the first token; needs 1000 samples, has 100"
