"""A result says what it rests on: every source, the weakest kind, and where it goes beyond the samples."""

from dataclasses import replace

import pytest

from pdsim.results.evidence import extrapolations, gather, kinds, weakest
from pdsim.transfer import TransferRecord
from tests.support.composed import composed
from tests.support.configs import ENGINE, LLM, MACHINE, make_config

RECORD = TransferRecord("nvlink", "write", "a", "b", 1 << 20, 16, 0.0, 0.0, 0.0, 0.0, 0.0)
ERROR = "expect 3 times its error, 3 % at 95 of 100 held-out points"


def moved(nbytes=1 << 20, descriptors=16):
    return RECORD._replace(nbytes=nbytes, descriptors=descriptors)


def test_the_weakest_kind_is_of_the_weakest_known_source(tmp_path):
    hw = replace(MACHINE, sources={"gpu.memory": "datasheet: of the card", "nodes, gpus": "assumed: as asked"})
    sources = gather(make_config(tmp_path, hw=hw), serving=False)
    known = {"measured": ["backend.intra.call"], "datasheet": ["hw.gpu.memory"], "assumed": ["hw.nodes", "hw.gpus"]}
    assert (weakest(sources), kinds(sources)) == ("assumed", known)
    with pytest.raises(ValueError, match=r"hw\.x: source 'a friend' must begin with one of measured"):
        kinds({"hw.x": "a friend"})


@pytest.mark.parametrize(
    ("changes", "serving", "least", "sources"),
    [
        ({"target": "real"}, False, "measured", ["transfers"]),
        ({"target": "real", "hw": replace(MACHINE, gpus=0, guest=True)}, False, "assumed", ["transfers"]),
        (
            {"target": "real", "model": replace(LLM, sources={"layers": "published: config.json"})},
            True,
            "assumed",  # it emulates compute
            ["transfers", "model.layers", "compute"],
        ),
        ({"hw": replace(MACHINE, sources={})}, False, "none", []),
        ({"backend": replace(ENGINE, sources={})}, False, "none", []),
    ],
)
def test_a_run_rests_on_what_it_emulates(tmp_path, changes, serving, least, sources):
    gathered = gather(make_config(tmp_path, **changes), serving=serving)
    assert (weakest(gathered), list(gathered)) == (least, sources)


def test_a_number_measured_elsewhere_is_assumed_and_names_the_machine():
    config = composed("hw=8xh20", "backend=mooncake_nvlink")
    assert config.backend.sources["intra"].startswith("assumed: measured on 2xh200, not on 8xh20: ")
    (warning,) = extrapolations(config, [moved(1 << 30)])
    assert warning.startswith("warning: backend.intra.rate=367 GB/s limits large transfers on hw=8xh20, and")
    assert not extrapolations(config, [moved(4096, 1)])


@pytest.mark.parametrize("backend", ["nvlink", "mooncake_nvlink", "nixl"])
def test_an_engines_rate_is_a_share_of_the_line(backend):
    slow = composed("hw=8xh200", f"backend={backend}").backend.intra.rate
    fast = composed("hw=8xh200", f"backend={backend}", "hw.interconnect.rate=788GB/s").backend.intra.rate
    assert fast == 2 * slow


def test_transfers_beyond_the_samples_are_a_warning_with_the_factor():
    config = composed("hw=2xh200", "backend=nvlink")
    assert not extrapolations(config, [moved()])
    assert not extrapolations(replace(config, target="real"), [moved(1 << 40)])
    assert extrapolations(config, [moved(), moved(1 << 30)]) == [
        "warning: 1 of 2 transfers lie outside calibration=nvlink-2xh200, whose samples have 4 KiB to 256 MiB: "
        f"extrapolated to 1 GiB, by a factor of 4; {ERROR}"
    ]
    (warning,) = extrapolations(config, [moved(descriptors=40960)])
    assert "1 to 4096 descriptors: extrapolated to 40960, by a factor of 10" in warning


def test_more_gpus_than_calibrated_are_a_warning_with_factor():
    every = [moved()._replace(source=f"r{index}", target=f"r{index + 1}") for index in range(7)]
    assert extrapolations(composed("hw=8xh200", "backend=nvlink"), every) == [
        "warning: 8 GPUs take part, and samples of calibration=nvlink-2xh200 have 2: extrapolated, by a factor of "
        f"4; {ERROR}"
    ]
