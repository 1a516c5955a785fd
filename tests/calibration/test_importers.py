"""Outputs of other tools become times of one transfer; the excerpts say where they are from."""

from pathlib import Path

import pytest

from pdsim.calibration.importers import FORMATS, read
from pdsim.core.errors import ConfigError

OUTPUTS = Path(__file__).parent / "outputs"


def rows(name):
    samples = read(OUTPUTS / f"{name}.txt")
    assert samples.about["kind"] == "published"
    return samples.rows


def shape(row):
    return row.operation, row.blocks, row.size, row.concurrency


@pytest.mark.parametrize(
    ("name", "index", "expected", "seconds"),
    [
        ("nixlbench", 0, ("write", 1, 4096, 1), 20.9e-6),
        ("nixlbench", -1, ("write", 1, 16384, 1), 36.3e-6),
        ("nixlbench_batch64", 0, ("write", 64, 4096, 1), 64 * 3.11355e-6),  # its latency is of a block
        ("mori", 0, ("write", 128, 8, 1), 36.33e-6),
        ("mori", -1, ("write", 128, 1048576, 1), 2777.76e-6),
        ("mori_read", 0, ("read", 256, 8, 1), None),  # of its total, for the batch is left out
        ("tebench", 0, ("write", 128, 65536, 2), 400e-6),  # threads follow from the bandwidth
        ("transfer_engine_bench", 0, ("read", 1, 1 << 20, 12), 0.01 * 12 / 1),
        ("perftest", -1, ("write", 1, 8, 128), 128 / 2.641399e6),  # a full queue, at its rate of messages
        ("perftest_lat", 0, ("read", 1, 2, 1), 1.76e-6),
        ("nvbandwidth", 0, ("write", 1, 512 << 20, 1), (512 << 20) / 22.6e9),  # the median of its matrix
        ("nccl_tests", 0, ("write", 1, 256, 1), 34.24e-6),
    ],
)
def test_a_row_of_another_tool_is_a_transfer(name, index, expected, seconds):
    row = rows(name)[index]
    assert shape(row) == expected
    assert row.pattern == "pair"
    assert seconds is None or row.seconds == pytest.approx(seconds, rel=0.01)


def test_queue_pairs_and_cells_of_a_matrix_are_kept():
    assert {row.queues for row in rows("mori")} == {4}
    (row,) = rows("nvbandwidth")
    assert len(row.per_flow) == 30
    assert row.low <= row.seconds <= row.high


def test_rates_of_a_node_become_times_of_a_batch(tmp_path):
    (tmp_path / "table.csv").write_text(
        "# source: someone; p5en 8xH200, threads 16 batch 128\nblock_bytes,write_gbs,read_gbs\n65536,97.11,96.87\n"
    )
    samples = read(tmp_path / "table.csv")
    write, read_ = samples.rows
    assert (shape(write), write.flows, read_.operation) == (("write", 128, 65536, 2), 8, "read")
    assert write.seconds == pytest.approx(16 * 128 * 65536 / 97.11e9)
    assert samples.about["source"].startswith("someone")


def test_telemetry_has_a_row_an_operation_size_or_interval():
    samples = rows("nixl")
    sizes = (4096, 1 << 20, 32 << 20, 64 << 16)
    assert {shape(row)[:3] for row in samples} == {(of, 1, size) for of in ("write", "read") for size in sizes}
    assert [row.repeats for row in samples] == [2] * 8
    small = next(row for row in samples if row.operation == "read" and row.size == 4096)
    assert small.low < small.seconds == pytest.approx((459e-6 + 9e-6) / 2)  # the two that the API returned
    samples = rows("mooncake")
    assert [row.repeats for row in samples] == [41, 45, 39]
    sent = (4096 + (1 << 20) + (32 << 20)) / 3  # fifteen rounds of the three sizes in that interval
    assert samples[1].size == pytest.approx(sent, rel=1e-4)
    bins = ((5, 31.1), (75, 2.2), (350, 6.7), (3500, 2.2), (7500, 6.7), (15e3, 11.1), (35e3, 8.9), (75e3, 24.4))
    mean = sum(middle * share for middle, share in (*bins, (150e3, 6.7))) / 100
    assert samples[1].seconds == pytest.approx(mean * 1e-6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("roses are red\n", f"is in no format that is recognised; name one with --format: {', '.join(FORMATS)}"),
        ("Block Size (B)      Batch Size     B/W (GB/Sec)\n", "no row of nixlbench in it"),
        ("Test completed: duration 10.01, batch count 4895, throughput 0.26\n", "its command line above its output"),
    ],
)
def test_an_output_that_cannot_be_read_is_refused(tmp_path, text, message):
    (tmp_path / "log").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read(tmp_path / "log")
