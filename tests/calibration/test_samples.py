"""Samples are medians of transfers, and keep all their digits in a file that can be measured again."""

import pytest

from experiments.transfer.points import read as read_points
from pdsim.calibration import samples
from pdsim.calibration.samples import Sample, Samples, from_transfers
from pdsim.core.errors import ConfigError
from pdsim.transfer import TransferRecord


def record(seconds, label="pair 4x1024 c1", status="ok", target="rank1"):
    times = (1.0, 1.0, 1.0, 1.0 + seconds, 1.0 + seconds)
    return TransferRecord("e", "write", "rank0", target, 4096, 4, *times, status, label)


def test_a_sample_is_the_median_of_what_succeeded():
    job = [record(seconds) for seconds in (1.0, 2.0, 3.0, 4.0, 9.0)]
    job += [record(1.0, status="PeerLost"), record(1.0, label="warmup")]
    assert from_transfers([job]) == [
        Sample(blocks=4, size=1024, seconds=3.0, low=2.0, high=4.0, repeats=5)  # of one job, of one flow
    ]


def test_of_several_jobs_the_geometric_mean_counts():
    (sample,) = from_transfers([[record(1.0), record(1.0), record(9.0)], [record(4.0)]])
    assert (sample.per_job, sample.seconds) == ((1.0, 4.0), pytest.approx(2.0))


def test_flows_words_and_held_points_are_kept():
    label = "cross:2x2 1x8 c2 read scattered rounds-rotated"
    runs = [[record(s, label, target=t) for s, t in ((1.0, "a"), (3.0, "a"), (4.0, "b"))]]
    (sample,) = from_transfers(runs, [label])
    assert (sample.flows, sample.per_flow) == (2, (2.0, 4.0))
    assert (sample.pattern, sample.concurrency, sample.operation) == ("cross:2x2", 2, "read")
    assert (sample.layout, sample.schedule, sample.held) == ("scattered", "rounds-rotated", True)


def test_a_file_gives_back_what_was_written_to_be_measured_again(tmp_path):
    first = Sample(blocks=4, size=1024, seconds=1 / 3e5, low=3e-6, high=4e-6, repeats=7)
    flows = {"flows": 2, "per_flow": (1.5, 2.5), "per_job": (1.0, 4.0), "held": True}
    second = Sample(pattern="fanout:3", blocks=1, size=8, seconds=2.0, low=1.0, high=3.0, **flows)
    kept = Samples([first, second], {"kind": "measured", "source": "a: b"})
    samples.write(tmp_path / "s.csv", kept)
    loaded = samples.read(tmp_path / "s.csv")
    assert (loaded.about, loaded.rows[1]) == (kept.about, second)
    assert loaded.rows[0].seconds == pytest.approx(1 / 3e5, rel=1e-8)
    assert [point.label for point in read_points(tmp_path / "s.csv")] == ["pair 4x1024 c1", "fanout:3 1x8 c1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("blocks,size,seconds\n1,8,1.0\n0,8,1.0\n", r"s\.csv, row 2: sample\.blocks must be > 0, got 0"),
        ("blocks,size\n1,8\n", r"s\.csv, row 1: Object missing required field `seconds`"),
        ("# kind: measured\n", "has no rows; name a CSV file of samples, with the columns pattern, blocks"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path, text, message):
    (tmp_path / "s.csv").write_text(text)
    with pytest.raises(ConfigError, match=message):
        samples.read(tmp_path / "s.csv")
