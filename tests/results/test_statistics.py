"""Percentiles are numpy's, and are withheld where the sample is too small to have one."""

import pytest

from pdsim.results.record import distribution, mean, needed, percentile


@pytest.mark.parametrize(("q", "samples"), [(0, 1), (50, 1), (90, 10), (99, 100), (99.9, 1000)])
def test_a_percentile_needs_one_sample_beyond_it(q, samples):
    assert needed(q) == samples
    assert percentile([1.0] * samples, q) == 1.0
    assert percentile([1.0] * (samples - 1), q) is None


@pytest.mark.parametrize("q", [-1, 100, 101])
def test_a_percentile_outside_its_range_is_refused(q):
    with pytest.raises(ValueError, match=rf"q\(={q}\) must be >= 0 and < 100"):
        percentile([1.0], q)


def test_a_distribution_says_what_each_number_is_and_lacks():
    metrics = {each.name: each for each in distribution("ttft", "s", range(101), "time to the first token")}
    assert [each.value for each in metrics.values()] == [50.0, 50.0, 90.0, 99.0, None]
    assert list(metrics) == ["ttft_avg_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "ttft_p99_9_s"]
    assert metrics["ttft_p99_9_s"].definition == "p99.9 of: time to the first token; needs 1000 samples, has 101"
    assert mean([]) is None
