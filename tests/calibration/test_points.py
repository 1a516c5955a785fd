"""Samples are medians of transfers, and keep all their digits in a file that can be measured again."""

from pathlib import Path

import pytest

from experiments.transfer.transfer_points import read as read_points
from pdsim.calibration import samples as points
from pdsim.calibration.samples import Sample, Samples, from_transfers
from pdsim.core.errors import ConfigError
from pdsim.transfer import TransferRecord


def record(seconds, label="pair 4x1024 c1", status="ok", target="rank1"):
    return TransferRecord(
        "e", "write", "rank0", target, 4096, 4, 1.0, 1.0, 1.0, 1.0 + seconds, 1.0 + seconds, status, label
    )


def test_a_sample_is_the_median_of_its_transfers_with_its_quartiles():
    (sample,) = from_transfers([[record(seconds) for seconds in (1.0, 2.0, 3.0, 4.0, 9.0)]])
    assert (sample.low, sample.seconds, sample.high, sample.repeats) == (2.0, 3.0, 4.0, 5)
    assert (sample.pattern, sample.blocks, sample.size, sample.concurrency) == ("pair", 4, 1024, 1)


def test_of_several_jobs_the_geometric_mean_of_their_medians_counts():
    (sample,) = from_transfers([[record(1.0), record(1.0), record(9.0)], [record(4.0)]])
    assert sample.per_job == (1.0, 4.0)
    assert sample.seconds == pytest.approx(2.0)


def test_what_failed_and_what_warmed_up_count_for_nothing():
    assert from_transfers([[record(1.0, status="PeerLost"), record(1.0, label="warmup")]]) == []


def test_several_flows_have_a_median_each():
    records = [record(s, "fanout 1x8 c1", target=t) for s, t in ((1.0, "a"), (3.0, "a"), (4.0, "b"))]
    (sample,) = from_transfers([records])
    assert (sample.flows, sample.per_flow) == (2, (2.0, 4.0))


def test_labels_say_what_is_unusual():
    (sample,) = from_transfers([[record(1.0, "cross:2x2 1x8 c2 read scattered rounds-rotated")]])
    assert (sample.operation, sample.layout, sample.schedule) == ("read", "scattered", "rounds-rotated")


def test_points_that_are_held_out_are_marked():
    samples = from_transfers([[record(1.0), record(1.0, "pair 1x8 c1")]], held=["pair 1x8 c1"])
    assert [sample.held for sample in samples] == [False, True]


SAMPLES = Samples(
    [
        Sample(blocks=4, size=1024, seconds=1 / 3e5, low=3e-6, high=4e-6, repeats=7),
        Sample(
            pattern="fanout:3",
            blocks=1,
            size=8,
            flows=2,
            seconds=2.0,
            low=1.0,
            high=3.0,
            per_flow=(1.5, 2.5),
            per_job=(1.0, 4.0),
            held=True,
        ),
    ],
    {"kind": "measured", "source": "a: b"},
)


def test_a_file_gives_back_what_was_written(tmp_path):
    points.write(tmp_path / "s.csv", SAMPLES)
    loaded = points.read(tmp_path / "s.csv")
    assert loaded.about == SAMPLES.about
    assert loaded.rows[1] == SAMPLES.rows[1]
    assert loaded.rows[0].seconds == pytest.approx(1 / 3e5, rel=1e-8)


def test_a_file_of_samples_can_be_measured_again(tmp_path: Path):
    points.write(tmp_path / "s.csv", SAMPLES)
    first, second = read_points(tmp_path / "s.csv")
    assert (first.label, second.label) == ("pair 4x1024 c1", "fanout:3 1x8 c1")


def test_a_row_that_cannot_be_is_named(tmp_path):
    (tmp_path / "s.csv").write_text("blocks,size,seconds\n1,8,1.0\n0,8,1.0\n")
    with pytest.raises(ConfigError, match=r"s\.csv, row 2: sample\.blocks must be > 0, got 0"):
        points.read(tmp_path / "s.csv")


def test_a_file_without_rows_says_what_it_needs(tmp_path):
    (tmp_path / "s.csv").write_text("# kind: measured\n")
    with pytest.raises(ConfigError, match="has no samples; it needs the columns pattern, blocks"):
        points.read(tmp_path / "s.csv")
