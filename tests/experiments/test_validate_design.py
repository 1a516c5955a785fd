"""What a validation runs on a machine of so many GPUs when nothing is said."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from experiments.transfer.transfer_points import read
from experiments.validate import ValidateOptions
from experiments.validate.design import DesignPart, parts
from pdsim.config import Config


@cache
def composed(*words: str) -> Config:
    """Return the configuration that ``pdsim validate`` has of *words*."""
    from pdsim.config.compose import compose

    return compose(["experiment=validate", *words])


def designed(tmp_path: Path, *words: str) -> tuple[list[DesignPart], list[str]]:
    """Return the parts on the machine of *words*, and what is said of those left out."""
    config = composed(*words)
    options = ValidateOptions.of(config)
    notes: list[str] = []
    found = list(parts(config, options, tmp_path, notes))
    assert [part.experiment for part in found if part.problems(config)] == []
    return found, notes


def of(found: list[DesignPart], experiment: str) -> list[dict[str, Any]]:
    return [vars(part.options) for part in found if part.experiment == experiment]


def patterns(tmp_path: Path) -> set[str]:
    return {point.pattern for point in read(tmp_path / "points.csv")}


def test_eight_gpus_have_patterns_of_up_to_eight_ranks(tmp_path: Path):
    _, notes = designed(tmp_path, "hw=8xh200", "backend=nvlink")
    assert patterns(tmp_path) >= {"pair", "incast:7", "fanout:7", "cross:4x4", "alltoall:8", "pairs:4"}
    assert not any("ranks" in note for note in notes)


def test_fewer_gpus_have_what_their_ranks_can_do(tmp_path: Path):
    _, notes = designed(tmp_path, "hw=4xh200", "backend=nvlink")
    assert patterns(tmp_path) == {
        "pair", "pairs:2", "bidirectional", "incast:2", "incast:3", "fanout:2", "fanout:3", "cross:2x2",
        "alltoall:4",
    }  # fmt: skip
    assert (
        "left out, with more than 4 ranks: pairs:4, bidirectional:4, incast:7, fanout:7, cross:4x4, alltoall:8"
        in notes
    )
    designed(tmp_path, "hw=2xh200", "backend=nvlink")
    assert patterns(tmp_path) == {"pair", "bidirectional"}


@pytest.mark.parametrize(
    ("hw", "ways", "placement", "gathered"),
    [
        ("8xh200", ("4to4", "4to2", "2to4", "4to1"), "packed", (2, 4, 8)),
        ("4xh200", ("1to2", "2to1", "2to2"), "packed", (2, 4)),
        ("2xh200", ("1to2", "2to1", "2to2"), "sides", (2,)),
    ],
)
def test_the_number_of_gpus_decides_who_hands_over_and_how_many_gather(
    tmp_path: Path, hw: str, ways: tuple[str, ...], placement: str, gathered: tuple[int, ...]
):
    found, _ = designed(tmp_path, f"hw={hw}", "backend=nvlink")
    staged, sliced, metadata = of(found, "handoff")
    assert staged["tp"] == ways
    assert sliced["tp"] == tuple(way for way in ways if way not in ("4to4", "2to2"))
    assert metadata["metadata"] == ("data", "control")
    assert metadata["tp"] == (ways[0] if hw == "8xh200" else "2to2",)
    assert {part["placement"] for part in (staged, sliced, metadata)} == {placement}
    assert of(found, "allgather")[0]["ranks"] == gathered


@pytest.mark.parametrize(("jobs", "repeat"), [(1, 5), (3, 5), (6, 3), (9, 2)])
def test_jobs_of_handoffs_share_the_repeats(tmp_path: Path, jobs: int, repeat: int):
    found, _ = designed(tmp_path, "hw=2xh200", "backend=nvlink", f"+experiment.jobs={jobs}")
    staged, sliced, _ = of(found, "handoff")
    assert (staged["repeat"], sliced["repeat"]) == (repeat, repeat)


def test_sliced_handoffs_of_more_slices_than_one_waits_for_are_left_out(tmp_path: Path):
    found, notes = designed(tmp_path, "hw=8xh200", "backend=nixl")
    staged, sliced, _ = of(found, "handoff")
    assert (staged["tokens"], sliced["tokens"]) == ((512, 2048, 8192), (512, 2048))  # of 80 layers, two planes each
    assert "left out, with more than 524288 slices: sliced handoffs of 8192 tokens" in notes


def test_four_prefill_and_four_decode_gpus_serve_requests_of_a_few_seconds():
    config = composed("hw=8xh200", "backend=nvlink")
    assert (config.parallel.prefill.tp, config.parallel.decode.tp, config.workload.count) == (4, 4, 12)


def test_a_workload_that_is_asked_for_is_served_instead():
    assert composed("hw=8xh200", "workload=embedded").workload.arrivals == "embedded"


def test_hosts_take_part_with_as_many_ranks_as_are_asked_for(tmp_path: Path):
    found, _ = designed(tmp_path, "hw=loopback", "backend=nixl_shm", "experiment.ranks=8")
    assert "alltoall:8" in patterns(tmp_path)
    assert of(found, "handoff")[0]["tp"] == ("4to4", "4to2", "2to4", "4to1")
    assert of(found, "allgather")[0]["ranks"] == (2, 4, 8)


def test_hosts_are_validated_in_minutes_and_gpus_thoroughly(tmp_path: Path):
    for words, largest, tokens, jobs in (
        (("hw=loopback", "backend=nixl_shm"), 1 << 26, (128, 512), 3),
        (("hw=2xh200", "backend=nvlink"), 1 << 29, (512, 2048, 8192), 9),
    ):
        found, _ = designed(tmp_path, *words)
        sizes = [point.blocks * point.size for point in read(tmp_path / "points.csv")]
        assert largest / 4 < max(sizes) <= largest
        assert of(found, "handoff")[0]["tokens"] == tokens
        assert ValidateOptions().sized(composed(*words).hw.gpus).jobs == jobs


def test_points_that_do_not_fit_into_memory_are_left_out_and_the_others_run(tmp_path: Path):
    found, notes = designed(
        tmp_path, "hw=loopback", "backend=nixl_shm", "experiment.ranks=8", "experiment.limit=512MiB"
    )
    assert of(found, "transfer")
    points, gathers = [note for note in notes if "do not fit into memory" in note]
    assert "alltoall:8 37x6291456 c1" in points  # 222 MiB x 14 x 8 ranks, of 4 GiB
    assert "incast:7 1x6291456 c1" not in points
    assert gathers == "left out, for they do not fit into memory: all-gathers of 50331648 bytes"


def test_ranks_that_share_gpus_are_as_many_as_are_listed(tmp_path: Path):
    config = composed("hw=2xh200", "backend=nvlink", "experiment.placement=[0,0,1,1]")
    options = ValidateOptions.of(config)
    list(parts(config, replace(options, classes=("contention",)), tmp_path, []))
    assert patterns(tmp_path) >= {"alltoall:4", "incast:3"}
