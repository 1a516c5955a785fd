"""Samples are medians of transfers; a calibration is laid over machine and engine and gives way to a hand."""

from dataclasses import asdict

import pytest

from experiments.transfer.points import read as read_points
from pdsim.calibration import samples
from pdsim.calibration.samples import Sample, Samples, from_transfers
from pdsim.config import ON_THE_COMMAND_LINE, as_written, load, plain
from pdsim.core.errors import ConfigError
from pdsim.results.terminal import spread
from pdsim.transfer import TransferRecord
from tests.test_config import CONFIG, changed


def record(seconds, label="pair 4x1024 c1", status="ok", target="rank1"):
    times = (1.0, 1.0, 1.0, 1.0 + seconds, 1.0 + seconds)
    return TransferRecord("e", "write", "rank0", target, 4096, 4, *times, status, label)


def test_a_sample_is_the_median_within_and_mean_of_jobs():
    job = [record(seconds) for seconds in (1.0, 2.0, 3.0, 4.0, 9.0)]
    job += [record(1.0, status="PeerLost"), record(1.0, label="warmup")]
    assert from_transfers([job]) == [
        Sample(blocks=4, size=1024, seconds=3.0, low=2.0, high=4.0, repeats=5)  # of one job, of one flow
    ]
    (sample,) = from_transfers([[record(1.0), record(1.0), record(9.0)], [record(4.0)]])
    assert (sample.per_job, sample.seconds) == ((1.0, 4.0), pytest.approx(2.0))


def test_flows_words_and_held_points_are_kept():
    label = "cross:2x2 1x8 c2 read scattered rounds-rotated"
    runs = [[record(s, label, target=t) for s, t in ((1.0, "a"), (3.0, "a"), (4.0, "b"))]]
    (sample,) = from_transfers(runs, [label])
    assert (sample.flows, sample.per_flow) == (2, (2.0, 4.0))
    assert (sample.pattern, sample.concurrency, sample.operation) == ("cross:2x2", 2, "read")
    assert (sample.layout, sample.schedule, sample.held) == ("scattered", "rounds-rotated", True)


def test_a_file_gives_back_what_can_be_measured_again(tmp_path):
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


CALIBRATION = {
    "name": "engine-box",
    "hw": ["box"],
    "backend": ["engine"],
    "date": "2026-01-31",
    "source": "two boxes",
    "parameters": {"backend.intra.call": "4us", "hw.nic.rate": "40GB/s"},
    "intervals": {"backend.intra.call": ["3.5us", "4.5us"], "hw.nic.rate": ["39GB/s", "41GB/s"]},
    "held_out": {"points": 12, "how": "at random", "mean": 0.02, "median": 0.01, "p95": 0.08, "bias": 0.001},
}


def calibrated(overridden=(), values=CONFIG, **changes):
    return load({**values, "calibration": CALIBRATION | changes}, overridden)


def test_parameters_replace_numbers_and_give_way_to_the_command():
    config = calibrated()
    assert (config.backend.intra.call, config.backend.intra.descriptor, config.hw.nic.rate) == (4e-6, 2e-6, 40e9)
    evidence = "measured: two boxes, 2026-01-31, calibration engine-box, 95 % 3.5us to 4.5us"
    assert config.backend.sources["intra.call"] == evidence
    assert config.hw.sources["nic.rate"].startswith("measured: two boxes")
    assert config.hw.sources["gpu"] == "datasheet: G"
    assert calibrated(kind="published").backend.sources["intra.call"].startswith("published: two boxes")
    assert load({**CONFIG, "calibration": {"name": "none"}}) == load(CONFIG)
    config = calibrated(["backend.intra.call"], changed(CONFIG, "backend.intra.call", "9us"))
    assert config.backend.intra.call == 9e-6
    assert config.backend.sources["intra.call"] == ON_THE_COMMAND_LINE
    assert set(config.calibration.intervals) == {"hw.nic.rate"}
    assert load(plain(as_written(config))) == config  # repeated from what it keeps


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hw": ["shelf"]}, "is for hw=shelf, not for hw="),
        ({"backend": ["motor"]}, "is for backend=motor, not for backend="),
        ({"parameters": {"seed": 1}}, r"calibration\.parameters\.seed must begin with one of hw, backend"),
        ({"parameters": {"backend.inter.call": "1us"}}, r"parameters\.backend\.inter\.call: this configuration"),
    ],
)
def test_a_calibration_of_something_else_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        calibrated(**changes)


def test_results_say_how_far_the_calibration_is_off():
    assert spread(asdict(calibrated().calibration)) == (
        "calibration: engine-box, two boxes, 2026-01-31; transfer times of 12 samples left out of the fit (at "
        "random) are met within 2.0% in the mean and 8.0% at the 95th percentile"
    )
