"""Prometheus text, and what happened between two readings of it."""

import pytest

from backends.live.metrics import Histogram, Page, difference, parse

BEFORE = """\
# HELP vllm:request_queue_time_seconds Histogram of time spent in WAITING phase for request.
# TYPE vllm:request_queue_time_seconds histogram
vllm:request_queue_time_seconds_bucket{engine="0",le="0.3",model_name="m"} 1.0
vllm:request_queue_time_seconds_bucket{engine="0",le="0.5",model_name="m"} 1.0
vllm:request_queue_time_seconds_bucket{engine="0",le="+Inf",model_name="m"} 1.0
vllm:request_queue_time_seconds_count{engine="0",model_name="m"} 1.0
vllm:request_queue_time_seconds_sum{engine="0",model_name="m"} 0.1
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 100.0
vllm:prompt_tokens_total{engine="1",model_name="m"} 20.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
this is no sample
"""
AFTER = """\
# TYPE vllm:request_queue_time_seconds histogram
vllm:request_queue_time_seconds_bucket{engine="0",le="0.3",model_name="m"} 3.0
vllm:request_queue_time_seconds_bucket{engine="0",le="0.5",model_name="m"} 5.0
vllm:request_queue_time_seconds_bucket{engine="0",le="+Inf",model_name="m"} 5.0
vllm:request_queue_time_seconds_count{engine="0",model_name="m"} 5.0
vllm:request_queue_time_seconds_sum{engine="0",model_name="m"} 1.3
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 300.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 0.0
"""


def test_labels_are_summed_and_kinds_told_apart():
    page = parse(BEFORE)
    assert page.counters == {"vllm:prompt_tokens_total": 120.0}
    assert page.gauges == {"vllm:num_requests_running": 3.0}
    assert page.histograms["vllm:request_queue_time_seconds"].count == 1.0


def test_a_counter_has_its_suffix_whatever_its_type_says():
    assert parse(AFTER).counters == {"vllm:prompt_tokens_total": 300.0}


def test_a_difference_is_what_happened_in_between():
    page = difference(parse(BEFORE), parse(AFTER))
    assert page.counters == {"vllm:prompt_tokens_total": 180.0}
    assert page.gauges == {"vllm:num_requests_running": 0.0}
    waits = page.histograms["vllm:request_queue_time_seconds"]
    assert (waits.count, waits.mean) == (4.0, pytest.approx(0.3))
    assert waits.quantile(0.5) == pytest.approx(0.3)  # two of four are at most 0.3
    assert waits.quantile(0.75) == pytest.approx(0.4)


def test_what_was_not_there_before_counts_from_zero():
    assert difference(Page(), parse(BEFORE)).counters == {"vllm:prompt_tokens_total": 120.0}


def test_quantiles_end_at_the_last_bound():
    assert Histogram(9.0, 2.0, {1.0: 1.0, float("inf"): 2.0}).quantile(0.99) == 1.0
    assert Histogram().quantile(0.5) is None
    assert Histogram().mean is None
