"""Small batches that are done in the call that posts them take less, if nothing else is under way.

Times are exact.
"""

import pytest

from backends.engines import mooncake
from pdsim.config.compose import compose
from pdsim.core.errors import ConfigError
from pdsim.hardware.costs import InlineSaving
from tests.sim.test_engine import Bench
from tests.support.machines import cost

SMALL = InlineSaving(bytes=100, descriptors=4, saving=0.25)  # what `Bench` posts unless told otherwise: 3.5 s


def test_a_small_batch_takes_so_much_less():
    bench = Bench(small=SMALL)
    bench.post("a")
    assert bench.run() == [(3.25, "a")]


def test_a_read_saves_as_a_write_does():
    bench = Bench(small=SMALL, read=0.25)
    bench.post("a", inward=True)
    assert bench.run() == [(3.5, "a")]


@pytest.mark.parametrize(("nbytes", "descriptors", "seconds"), [(101, 4, 3.51), (100, 5, 3.75), (300, 8, 6.5)])
def test_a_batch_beyond_either_threshold_takes_as_long_as_ever(nbytes, descriptors, seconds):
    bench = Bench(small=SMALL)
    bench.post("a", nbytes=nbytes, descriptors=descriptors)
    assert bench.run() == [(seconds, "a")]


def test_a_small_batch_behind_another_under_way_saves_nothing():
    bench = Bench(small=SMALL)
    bench.post("large", nbytes=200)
    bench.post("a")  # posted from 2 to 4
    assert bench.run() == [(4.5, "large"), (5.5, "a")]


def test_nor_does_it_behind_one_to_another_peer():
    bench = Bench(small=SMALL)
    bench.post("large", nbytes=200)
    bench.post("a", lane=bench.new_lane("a>c"))
    assert bench.run() == [(4.5, "large"), (5.5, "a")]


def test_small_batches_do_not_keep_each_other_from_saving():
    bench = Bench(small=SMALL)
    bench.post("a")
    bench.post("b")
    assert bench.run() == [(3.25, "a"), (5.25, "b")]


def test_it_saves_again_when_what_was_under_way_has_ended():
    bench = Bench(small=SMALL)
    bench.post("large", nbytes=200)
    bench.post("a", at=5.0)
    assert bench.run() == [(4.5, "large"), (8.25, "a")]


def test_what_is_stopped_is_not_under_way():
    bench = Bench(small=SMALL)
    bench.lane.abort(bench.post("large", nbytes=200))  # the poster is busy until 2 all the same
    bench.post("a")
    assert bench.run() == [(5.25, "a")]


@pytest.mark.parametrize(("saving", "seconds"), [(0.5, 3.0), (1.0, 2.5), (9.0, 2.0)])
def test_it_saves_of_the_latency_first_then_of_the_call_and_no_more_than_both(saving, seconds):
    bench = Bench(small=InlineSaving(bytes=100, descriptors=4, saving=saving))
    bench.post("a")
    assert bench.run() == [(seconds, "a")]


@pytest.mark.parametrize("saving", [0.1, 0.6, 9.0])
@pytest.mark.parametrize("stages", [{}, {"overlap": True}, {"overlap": True, "pipelined": True}])
@pytest.mark.parametrize(("nbytes", "descriptors"), [(77, 1), (100, 4), (100, 5), (101, 4)])
def test_a_transfer_that_is_alone_takes_what_the_closed_form_says(saving, stages, nbytes, descriptors):
    bench = Bench(call=1 / 3, small=InlineSaving(bytes=100, descriptors=4, saving=saving), **stages)
    bench.post("a", nbytes=nbytes, descriptors=descriptors)
    ((seconds, _),) = bench.run()
    assert seconds == pytest.approx(bench.model.isolated_time(descriptors, nbytes, 100.0), rel=1e-14)


def test_no_engine_saves_unless_it_is_said_which_batches_are_small():
    assert cost().small is None
    assert cost().inline_saving(1, 1) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("bytes", "0", "must be > 0, got 0"),
        ("descriptors", "-1", "must be > 0, got -1"),
        ("saving", "-1us", "got -1e-06"),
    ],
)
def test_a_threshold_that_cannot_be_is_named_with_its_value_and_the_rule(key, value, rule):
    with pytest.raises(ConfigError, match=f"small.{key}.*{rule}"):
        compose(["hw=2xh200", "backend=mooncake_nvlink", f"backend.intra.small.{key}={value}"])


def test_mooncake_has_the_thresholds_of_its_endpoint():
    small = compose(["hw=2xh200", "backend=mooncake_nvlink", "calibration=none"]).backend.intra.small
    assert (small.bytes, small.descriptors) == (mooncake.SMALL, mooncake.FEW)
