"""Quantities as people write them become exact numbers of bytes, bytes a second and seconds."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.core import units
from pdsim.core.units import format_rate, format_size, format_time, parse_rate, parse_size, parse_time


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64KiB", 65536), ("1.5GB", 1_500_000_000), ("0.067GB", 67_000_000), ("20 GiB", 20 * 2**30), ("4096", 4096),
        (4096, 4096), (4096.0, 4096), ("1e3B", 1000), ("3TiB", 3 * 2**40), ("2kB", 2000),
    ],
)  # fmt: skip
def test_a_size_is_a_whole_number_of_bytes(text, size):
    parsed = parse_size(text)
    assert (parsed, type(parsed)) == (size, int)


@pytest.mark.parametrize(
    ("text", "rate"),
    [("400Gbps", 50e9), ("8bps", 1.0), ("50GB/s", 50e9), ("1GiB/s", 2.0**30), ("10Gbit/s", 1.25e9), (2.5, 2.5)],
)
def test_bits_and_bytes_of_a_rate_are_told_apart(text, rate):
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0.1us", 1e-7), ("11us", 1.1e-5), ("11µs", 1.1e-5), ("11μs", 1.1e-5), ("140ns", 1.4e-7), ("2ms", 2e-3),
        ("2min", 120.0), ("1.5h", 5400.0), ("3s", 3.0), ("-1s", -1.0), (5, 5.0),
    ],
)  # fmt: skip
def test_a_time_is_the_float_nearest_to_what_was_written(text, seconds):
    assert parse_time(text) == seconds


def test_operations_parameters_and_arrivals_are_counted():
    assert units.parse_flops("148TFLOPS") == 148e12
    assert (units.parse_count("70.6B"), units.parse_count(671e9)) == (70.6e9, 671e9)
    assert units.parse_frequency("4req/s") == 4.0
    assert parse_time("1e-999999999") == 0.0  # too small for a float


@given(st.integers(min_value=1, max_value=10**9), st.sampled_from(["KB", "MB", "GB", "TB"]))
def test_a_decimal_size_of_three_digits_is_always_whole(thousandths, unit):
    factor = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}[unit]
    text = f"{thousandths // 1000}.{thousandths % 1000:03}{unit}"
    assert parse_size(text) == Fraction(thousandths, 1000) * factor


NONE = ["400Gbs", "fast", "", "1 2", "5 apples", "GiB", None, True, [1], "٣GB"]
INFINITE = ["1e400", "1e308GB", float("inf"), float("nan"), 10**400]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, r"is not a (size|rate|time).*; write (a number or )?something like") for text in NONE),
        *((text, "not a finite size") for text in INFINITE),
        *((text, "not a whole number of bytes") for text in ("0.5B", 1.5, "0.1KiB")),
    ],
)
def test_what_is_no_quantity_is_refused_with_the_reason(text, message):
    with pytest.raises(ValueError, match=message):
        parse_size(text)
    if text in NONE:
        with pytest.raises(ValueError, match="something like 400Gbps"):
            parse_rate(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [(65536, "64 KiB"), (0, "0 B"), (1020, "1020 B"), (2**20 - 1, "1 MiB"), (1.5 * 2**30, "1.5 GiB")],
)
def test_a_size_is_printed_with_a_binary_prefix(size, text):
    assert format_size(size) == text


def test_rates_and_times_are_printed_with_three_digits():
    assert [format_rate(50e9), format_rate(999_999), format_rate(2.1e9)] == ["50 GB/s", "1 MB/s", "2.1 GB/s"]
    assert [format_time(1.5e-6), format_time(0.0009999), format_time(90)] == ["1.5 us", "1 ms", "1.5 min"]


@given(st.integers(min_value=1, max_value=2**50))
def test_printed_quantities_read_back_within_a_thousandth(size):
    assert abs(float(parse_rate(format_size(size).replace(" ", "") + "/s")) - size) <= 0.0051 * size
