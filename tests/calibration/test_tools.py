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


def test_nixlbench_gives_the_time_of_a_batch_of_one_thread():
    first, *_, last = rows("nixlbench")
    assert shape(first) == ("write", 1, 4096, 1)
    assert (first.seconds, last.seconds) == (pytest.approx(20.9e-6), pytest.approx(36.3e-6))


def test_nixlbench_s_latency_is_per_block_and_a_transfer_is_a_batch():
    first, *_ = rows("nixlbench_batch64")
    assert shape(first) == ("write", 64, 4096, 1)
    assert first.seconds == pytest.approx(64 * 3.11355e-6)
    assert 64 * 4096 / first.seconds == pytest.approx(1.31554e9, rel=1e-3)  # what it says of its bandwidth


def test_mori_io_gives_the_time_of_a_batch_and_its_queue_pairs():
    first, middle, last = rows("mori")
    assert shape(first) == ("write", 128, 8, 1)
    assert [row.seconds for row in (first, middle, last)] == pytest.approx([36.33e-6, 202.70e-6, 2777.76e-6])
    assert {row.queues for row in rows("mori")} == {4}


def test_mori_io_s_batch_is_what_the_total_says_where_it_is_left_out():
    assert [shape(row) for row in rows("mori_read")] == [("read", 256, size, 1) for size in (8, 4096, 1048576)]


def test_tebench_s_threads_follow_from_its_bandwidth():
    (row,) = rows("tebench")
    assert shape(row) == ("write", 128, 65536, 2)
    assert row.seconds == pytest.approx(400e-6)


def test_transfer_engine_bench_needs_its_command_line():
    (row,) = rows("transfer_engine_bench")
    assert shape(row) == ("read", 1, 1 << 20, 12)
    assert row.seconds == pytest.approx(0.01 * 12 / 1)


def test_transfer_engine_bench_without_its_command_line_is_refused(tmp_path):
    path = tmp_path / "log"
    path.write_text("Test completed: duration 10.01, batch count 4895, throughput 0.26\n")
    with pytest.raises(ConfigError, match="put its command line above its output"):
        read(path)


def test_perftest_keeps_its_queue_full():
    *_, row = rows("perftest")
    assert shape(row) == ("write", 1, 8, 128)
    assert row.seconds == pytest.approx(128 / 2.641399e6, rel=0.01)  # its rate of messages


def test_perftest_s_latency_is_the_typical_one():
    (row,) = rows("perftest_lat")
    assert (shape(row), row.seconds) == (("read", 1, 2, 1), pytest.approx(1.76e-6))


def test_nvbandwidth_gives_the_median_of_its_matrix():
    (row,) = rows("nvbandwidth")
    assert shape(row) == ("write", 1, 512 << 20, 1)
    assert len(row.per_flow) == 30
    assert row.low <= row.seconds <= row.high
    assert (512 << 20) / row.seconds == pytest.approx(22.6e9, rel=0.01)


def test_nccl_s_sendrecv_is_a_pair():
    first, *_ = rows("nccl_tests")
    assert (first.pattern, shape(first), first.seconds) == ("pair", ("write", 1, 256, 1), pytest.approx(34.24e-6))


TABLE = "# source: someone; p5en 8xH200, threads 16 batch 128\nblock_bytes,write_gbs,read_gbs\n65536,97.11,96.87\n"


def test_a_table_of_rates_of_a_node_becomes_times_of_a_batch_of_each_thread(tmp_path):
    (tmp_path / "table.csv").write_text(TABLE)
    samples = read(tmp_path / "table.csv")
    write, read_ = samples.rows
    assert (shape(write), write.flows) == (("write", 128, 65536, 2), 8)
    assert read_.operation == "read"
    assert write.seconds == pytest.approx(16 * 128 * 65536 / 97.11e9)
    assert samples.about["source"].startswith("someone")


def test_nixl_s_telemetry_has_a_row_for_each_operation_and_size():
    samples = rows("nixl")
    assert {shape(row)[:3] for row in samples} == {
        (operation, 1, size) for operation in ("write", "read") for size in (4096, 1 << 20, 32 << 20, 64 << 16)
    }
    assert [row.repeats for row in samples] == [2] * 8
    reads = {row.size: row for row in samples if row.operation == "read"}
    # the two that the API returned
    assert reads[4096].low < reads[4096].seconds == pytest.approx((459e-6 + 9e-6) / 2)


def test_mooncake_s_metrics_have_a_row_for_each_interval():
    samples = rows("mooncake")
    assert [row.repeats for row in samples] == [41, 45, 39]
    sent = (4096 + (1 << 20) + (32 << 20)) / 3  # fifteen rounds of the three sizes in that interval
    assert samples[1].size == pytest.approx(sent, rel=1e-4)
    bins = ((5, 31.1), (75, 2.2), (350, 6.7), (3500, 2.2), (7500, 6.7), (15e3, 11.1), (35e3, 8.9), (75e3, 24.4))
    mean = sum(middle * share for middle, share in (*bins, (150e3, 6.7))) / 100
    assert samples[1].seconds == pytest.approx(mean * 1e-6)


def test_what_is_of_no_tool_is_refused_with_the_tools_there_are(tmp_path):
    (tmp_path / "poem.txt").write_text("roses are red\n")
    with pytest.raises(ConfigError, match=f"does not show which of these it is; say --format {', '.join(FORMATS)}"):
        read(tmp_path / "poem.txt")


def test_an_output_without_rows_is_refused(tmp_path):
    (tmp_path / "head.txt").write_text("Block Size (B)      Batch Size     B/W (GB/Sec)\n")
    with pytest.raises(ConfigError, match="no row of nixlbench in it"):
        read(tmp_path / "head.txt")
