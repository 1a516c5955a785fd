"""What was measured on one machine says so on another, and a run warns where it goes beyond the samples."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdsim.results.evidence import extrapolations
from pdsim.transfer import TransferRecord
from tests.support.composed import composed

RECORD = TransferRecord("nvlink", "write", "a", "b", 1 << 20, 16, 0.0, 0.0, 0.0, 0.0, 0.0)


def moved(nbytes=1 << 20, descriptors=16):
    return RECORD._replace(nbytes=nbytes, descriptors=descriptors)


def test_a_number_measured_elsewhere_is_assumed_and_names_the_machine():
    source = composed("hw=8xh20", "backend=mooncake_nvlink").backend.sources["intra"]
    assert source.startswith("assumed: measured on 2xh200, not on 8xh20: ")


@pytest.mark.parametrize("backend", ["nvlink", "mooncake_nvlink", "nixl"])
def test_the_rate_of_an_engine_is_a_share_of_the_line_rate(backend):
    slow = composed("hw=8xh200", f"backend={backend}").backend.intra.rate
    fast = composed("hw=8xh200", f"backend={backend}", "hw.interconnect.rate=788GB/s").backend.intra.rate
    assert fast == 2 * slow


def test_a_borrowed_rate_that_is_the_narrowest_is_a_warning():
    config = composed("hw=8xh20", "backend=mooncake_nvlink")
    (warning,) = extrapolations(config, [moved(1 << 30)])
    assert warning.startswith(
        "warning: backend.intra.rate=367 GB/s limits large transfers on hw=8xh20, and its share"
    )
    assert not extrapolations(config, [moved(4096, 1)])


def test_transfers_beyond_the_samples_are_a_warning_with_the_factor():
    config = composed("hw=2xh200", "backend=nvlink")
    assert not extrapolations(config, [moved()])
    (warning,) = extrapolations(config, [moved(), moved(1 << 30)])
    assert warning == (
        "warning: 1 of 2 transfers lie outside calibration=nvlink-2xh200, whose samples have 4 KiB to 256 MiB "
        "bytes: extrapolated to 1 GiB, by a factor of 4; take its error there, 3 % at 95 of 100 held-out points, 3 "
        "times as large"
    )
    (warning,) = extrapolations(config, [moved(descriptors=40960)])
    assert "1 to 4096 descriptors: extrapolated to 40960, by a factor of 10" in warning


def test_more_gpus_than_were_calibrated_are_a_warning_with_the_factor():
    config = composed("hw=8xh200", "backend=nvlink")
    every = [moved()._replace(source=f"r{index}", target=f"r{index + 1}") for index in range(7)]
    assert not extrapolations(config, every[:1])
    (warning,) = extrapolations(config, every)
    assert warning == (
        "warning: 8 GPUs take part, and samples of calibration=nvlink-2xh200 have 2: extrapolated, by a factor of "
        "4; take its error there, 3 % at 95 of 100 held-out points, 3 times as large"
    )


def test_a_real_run_is_never_extrapolated():
    config = replace(composed("hw=2xh200", "backend=nvlink"), target="real")
    assert not extrapolations(config, [moved(1 << 40)])
