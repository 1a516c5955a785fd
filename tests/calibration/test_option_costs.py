"""What an engine's options change of its costs."""

from dataclasses import replace

import numpy as np
import pytest

from pdsim.config.compose import compose
from pdsim.core.errors import ConfigError
from pdsim.core.units import parse_rate, parse_time
from pdsim.hardware.costs import EngineModel, InlineSaving, OptionCosts, Ramp, Workers

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


def test_a_number_set_by_hand_stays():
    thread = ("progress_thread=true", "num_threads=4")
    by_hand = nixl(*thread, more=["backend.intra.rate=300GB/s"]).backend.intra
    assert (by_hand.rate, by_hand.latency) == (300e9, nixl(*thread).backend.intra.latency)


def test_options_that_nobody_measured_are_refused_on_the_model():
    with pytest.raises(ConfigError, match="no costs in the model of backend=nixl; there are progress_thread=false"):
        nixl("progress_thread=true", "num_threads=3")
