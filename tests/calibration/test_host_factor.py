"""The host's part of a transfer on another host, and what an engine's options change of its costs."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from pyarrow.parquet import read_table

from backends import host_speed
from experiments import transfer
from pdsim.calibration.calibrate import of_host
from pdsim.calibration.definition import drawn
from pdsim.calibration.samples import Sample, Samples
from pdsim.config import load, plain
from pdsim.config.compose import compose
from pdsim.core.errors import ConfigError
from pdsim.core.files import data
from pdsim.core.units import parse_rate, parse_time
from pdsim.hardware.costs import EngineModel, InlineSaving, OptionCosts, Ramp, Workers
from pdsim.results.evidence import extrapolations, host_note, host_spread
from pdsim.sim.model import Model
from pdsim.transfer import TransferRecord


def composed(*words):
    return compose(["hw=2xh200", "backend=mooncake_nvlink", "experiment=transfer", "experiment.ranks=2", *words])


CALIBRATED = "host_factor=1"
HOSTS = (0.93, 1.0, 1.24, 1.12, 1.14, 1.06, 1.06)  # of calibration=mooncake_nvlink-2xh200


def test_a_run_is_of_the_median_of_known_hosts():
    calibrated, usual = composed(CALIBRATED), composed("backend.intra.latency=3us")
    intra, of = usual.backend.intra, calibrated.backend.intra
    assert (intra.latency, intra.descriptor, intra.rate) == pytest.approx((3e-6, 1.06 * of.descriptor, of.rate))
    assert intra.ramp[0].extra == pytest.approx(1.06 * of.ramp[0].extra)
    assert ", the host's part times 1.06, the median of 7, " in usual.backend.sources["intra.descriptor"]
    assert "the host" not in calibrated.backend.sources["intra.descriptor"]
    assert usual.calibration.hosts == pytest.approx([factor / 1.06 for factor in HOSTS])
    low, high = (parse_time(end) for end in usual.calibration.intervals["backend.intra.descriptor"])
    assert (low, high) == pytest.approx((1.06 * 2.3804e-6, 1.06 * 2.4452e-6), rel=1e-5)
    assert composed("calibration=none").backend.intra.descriptor == 2.2e-6
    values = plain(usual)
    values["backend"]["policy"] = values.pop("policy")
    again = load(values)
    assert (again.backend.intra, again.calibration) == (intra, usual.calibration)


def test_a_factor_is_applied_once_to_transfers_and_engines():
    usual, config = composed(CALIBRATED).backend.intra, composed("host_factor=2", "backend.intra.descriptor=3us")
    slow, sources = config.backend.intra, config.backend.sources
    assert (slow.call, slow.descriptor) == pytest.approx((2 * usual.call, 6e-6))
    assert (slow.latency, slow.rate, config.host_factor) == (2 * usual.latency, usual.rate, 0.0)
    assert sources["intra.call"] == "assumed: times host_factor=2"
    assert sources["intra.descriptor"] == "assumed: set on the command line"
    assert sources["intra.rate"].startswith("measured:")
    words = ("hw=2xh200", "engine=vllm", "model=qwen3-8b", "parallel=tp1")
    usual, slow = compose([*words]), compose([*words, "engine.host_factor=2", "engine.decode.admit=3ms"])
    assert (slow.engine.prefill.arrive, slow.engine.proxy) == (
        2 * usual.engine.prefill.arrive,
        2 * usual.engine.proxy,
    )
    assert (slow.engine.decode.admit, slow.engine.host_factor) == (6e-3, 1.0)
    assert slow.compute.launch_factor == 2 * usual.compute.launch_factor
    assert slow.engine.lease == usual.engine.lease
    assert slow.engine.sources["prefill.arrive"] == "assumed: times engine.host_factor=2"
    assert slow.engine.sources["decode.admit"] == "assumed: set on the command line"


def said(*words):
    config = composed(*words, "experiment.patterns=[pair]", "experiment.repeat=1")
    result = transfer.run(config, Model(config.hw, config.backend), lambda *_: None)
    return host_note(config, result.transfers), host_spread(config, result.transfers)


def test_results_say_how_far_other_hosts_move_their_transfers():
    small = ["experiment.blocks=[1000]", "experiment.size=[4KiB]"]
    factors = sorted(factor / 1.06 for factor in drawn(HOSTS, seed=0, count=1000))
    (line,), spread = said(*small)  # all posting
    assert (spread.low, spread.high) == (pytest.approx(factors[25], rel=0.01), pytest.approx(factors[975], rel=0.01))
    assert f"take {spread.low:.2f} to {spread.high:.2f} times as long on 95 of 100 hosts" in line
    _, spread = said("experiment.blocks=[1]", "experiment.size=[256MiB]")  # all wire
    assert 0.99 < spread.low < 1.0 < spread.high < 1.01
    assert said(*small, "host_factor=1.1") == ([], None)


def test_twenty_transfers_tell_the_factor_of_a_host(pdsim_says, tmp_path):
    words = ["hw=2xh200", "backend=mooncake_nvlink", f"--to={tmp_path}", f"output={tmp_path}"]
    status, text, _ = pdsim_says("calibrate", "--host", *words, "host_factor=1.3", "--jobs=2")
    assert status == 0
    assert text.startswith(f"host_factor=1.3, jobs 1.3 to 1.3: 20 transfers in {tmp_path}")
    assert "and 0.0% (0%) with it" in text
    assert "95 of 100 hosts: 0.91 to 1.29, as the 7 of the calibration differ" in text
    assert pdsim_says("calibrate", "--host", "--quick", *words)[0] == 2


def test_a_slow_host_is_told_by_its_writes():
    rows = read_table(data("benchmarks/transfers-4xh100-again.parquet")).to_pylist()
    rows = [row for row in rows if row["backend"] == "mooncake_nvlink" and row["group"] in ("pair", "pair, read")]
    samples = [
        Sample(
            blocks=row["descriptors"],
            size=row["nbytes"] // row["descriptors"],
            operation="read" if row["group"].endswith("read") else "write",
            **dict.fromkeys(("seconds", "low", "high"), row["measured"]),
        )
        for row in rows
    ]
    usual = composed("hw=4xh100", CALIBRATED)
    of_writes = of_host(Samples(samples[:23]), usual.hw, usual.backend, "intra").factor
    slow = composed("hw=4xh100", f"host_factor={of_writes}")
    before, after = (of_host(Samples(samples[23:]), of.hw, of.backend, "intra").before for of in (usual, slow))
    assert np.median(before) > 0.09
    assert np.median(after) < 0.04


@pytest.mark.parametrize("seed", [1, 2])
def test_a_host_is_drawn_from_the_seed(seed):
    config = composed("draw_host=true", f"seed={seed}")
    (factor,) = drawn(HOSTS, seed, 1)
    assert config.backend.intra.descriptor == pytest.approx(
        composed(CALIBRATED).backend.intra.descriptor * factor, rel=1e-12
    )
    assert (config.calibration.host, config.draw_host) == (factor, False)
    source = config.backend.sources["intra.descriptor"]
    assert source == f"assumed: times host_factor={factor:g}, drawn from seed={seed} as 7 hosts differ"


@pytest.mark.parametrize(
    ("word", "why"),
    [("calibration=none", "knows none; set host_factor="), ("host_factor=2", "leave out draw_host or host_f")],
)
def test_a_host_is_drawn_from_known_ones_alone(word, why):
    with pytest.raises(ConfigError, match=why):
        composed("draw_host=true", word)


def test_a_host_beyond_the_known_ones_is_a_warning():
    config = composed("host_factor=2.48")
    (warning,) = extrapolations(config, [TransferRecord("m", "write", "a", "b", 4096, 1, *(0.0,) * 5)])
    assert "is that of no host of calibration=mooncake_nvlink-2xh200, 0.93 to 1.24" in warning
    assert "by a factor of 2; expect 2 times its error, 5.1 % at 95 of 100 held-out points" in warning


def test_doctor_measures_a_host_beside_others_also_as_json(pdsim_says, monkeypatch):
    monkeypatch.setattr(host_speed, "SECONDS", 0.0)  # three of each
    status, text, _ = pdsim_says("doctor", "--host")
    assert status == 0
    assert re.search(r"^turn of a Python loop +\d.* 33 ns$", text, re.MULTILINE)
    assert re.search(r"^wake of a process, zmq +\d.* not measured there$", text, re.MULTILINE)
    assert re.search(r"^engine.host_factor=\d", text, re.MULTILINE)
    assert re.search(r"calibration=nixl-2xh200: host_factor=\d", text)
    assert "calibration=nvlink-2xh200: nobody timed the loop on its host" in text
    monkeypatch.setattr(host_speed, "SECONDS", 0.0)
    said = json.loads(pdsim_says("doctor", "--host", "--json")[1])
    turn = said["measured"]["turn of a Python loop"]
    assert said["set"] == {"engine.host_factor": round(min(10.0, turn["least"] / turn["there"]), 2)}
    assert all(row["least"] <= row["here"] <= row["most"] for row in said["measured"].values() if "here" in row)
    assert said["measured"]["memory, one thread copies"]["unit"] == "B/s"
    assert pdsim_says("doctor", "--json")[0] == 2


def test_a_measurement_that_fails_says_why():
    row = host_speed._elsewhere("a copy", "nothing such")
    assert (row.values, row.problem) == ((), "'nothing such' is measured by no process")


OFF = EngineModel(
    path="nvlink", call=0.0, descriptor=3e-6, overlap=True, latency=2e-5, rate=387e9, wire_descriptor=2e-6
)


def nixl(*options, more=()):
    return compose(["hw=2xh200", "backend=nixl", *(f"backend.options.{option}" for option in options), *more])


def test_seconds_are_added_and_rates_are_shares():
    costs = OptionCosts(options={"a": "b"}, latency=1e-6, descriptor=2e-6, rate=0.5)
    varied = replace(OFF, queue_rate=100e9, read_rate=200e9, by_option=(costs,)).with_options(costs)
    assert (varied.latency, varied.by_option) == (OFF.latency + 1e-6, ())
    assert varied.posting(10) == pytest.approx(10 * (OFF.descriptor + 2e-6))
    assert (varied.rate, varied.queue_rate, varied.read_rate) == (OFF.rate / 2, 50e9, 100e9)


def test_each_rail_has_queue_pairs_of_its_own():
    model = replace(OFF, path="rdma", queue_rate=40e9, wire_descriptor=0.0)
    assert model.on_cards(50e9, 1) == model
    alone, spread = (model.on_cards(50e9, rails).isolated_time(1, 1 << 30, 90e9) for rails in (1, 2))
    assert (alone - OFF.latency) / (spread - OFF.latency) == pytest.approx(2.0)


@pytest.mark.parametrize("stages", [{"overlap": False}, {}, {"pipelined": True}], ids=["sum", "maximum", "pipeline"])
def test_times_of_arrays_are_those_of_their_numbers(stages):
    ramps = (Ramp(first=16, extra=1e-6),)
    model = replace(OFF, workers=Workers(threads=4, least=1024), ramp=ramps, read=1e-6, read_rate=300e9, **stages)
    model = replace(model, small=InlineSaving(bytes=1 << 16, descriptors=4, saving=1e-3))
    counts = np.array([1.0, 12.0, 1000.0, 1024.0, 1517.0, 8192.0])
    alone = [model.isolated_time(int(count), count * 4096, read=True) for count in counts]
    assert model.isolated_time(counts, counts * 4096, read=True) == pytest.approx(alone, rel=1e-14)


@pytest.mark.parametrize("threads", [0, 4, 8])
def test_the_thread_costs_what_was_measured_with_its_interval(threads):
    without, config = nixl().backend.intra, nixl("progress_thread=true", f"num_threads={threads}")
    assert config.backend.intra.workers == (Workers(threads=threads, least=1024) if threads else None)
    assert config.backend.sources["intra.rate"].startswith("measured: nixl-cu13 1.5.1")
    spans = config.calibration.intervals
    low, high = map(parse_time, spans["backend.intra.descriptor"])  # of processes that differ
    assert (low, high) == pytest.approx((without.descriptor + 1.444e-6, without.descriptor + 4.526e-6))
    assert low < config.backend.intra.descriptor < high
    slowest, fastest = (parse_rate(end) / without.rate for end in spans["backend.intra.rate"])
    assert (slowest, fastest) == pytest.approx((0.5858, 0.8032), rel=1e-4)
    assert "backend.intra.read_descriptor" in spans


def test_options_give_way_to_a_hand_and_need_measurements():
    thread = ("progress_thread=true", "num_threads=4")
    by_hand = nixl(*thread, more=["backend.intra.rate=300GB/s"]).backend.intra
    assert (by_hand.rate, by_hand.latency) == (300e9, nixl(*thread).backend.intra.latency)
    with pytest.raises(ConfigError, match="no costs in the model of backend=nixl; there are progress_thread=false"):
        nixl("progress_thread=true", "num_threads=3")
