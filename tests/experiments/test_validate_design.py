"""What a validation runs on a machine of so many GPUs when nothing is said."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from experiments.transfer.points import read
from experiments.validate import ValidateOptions
from experiments.validate.steps import parts, problems
from pdsim.config import Config
from pdsim.config.compose import compose


@cache
def composed(*words: str) -> Config:
    return compose(["experiment=validate", *words])


class Designed:
    """The parts on the machine of *words*, what is said of those left out, and the transfers of *folder*."""

    def __init__(self, folder: Path, *words: str, **options: Any) -> None:
        self.config = composed(*words)
        self.notes: list[str] = []
        chosen = replace(ValidateOptions.of(self.config), **options)
        self.parts = list(parts(self.config, chosen, folder, self.notes))
        assert [part.name for part in self.parts if problems(self.config, part)] == []
        self.points = read(folder / "points.csv")
        self.patterns = {point.pattern for point in self.points}

    def of(self, experiment: str) -> list[dict[str, Any]]:
        return [vars(part) for part in self.parts if part.name == experiment]


def test_patterns_have_no_more_ranks_than_there_are_gpus(tmp_path):
    eight = Designed(tmp_path, "hw=8xh200", "backend=nvlink")
    assert eight.patterns >= {"pair", "incast:7", "fanout:7", "cross:4x4", "alltoall:8", "pairs:4"}
    assert not any("ranks" in note for note in eight.notes)
    four = Designed(tmp_path, "hw=4xh200", "backend=nvlink")
    words = "pair pairs:2 bidirectional incast:2 incast:3 fanout:2 fanout:3 cross:2x2 alltoall:4"
    assert four.patterns == set(words.split())
    left = "left out, with more than 4 ranks: pairs:4, bidirectional:4, incast:7, fanout:7, cross:4x4, alltoall:8"
    assert left in four.notes
    assert Designed(tmp_path, "hw=2xh200", "backend=nvlink").patterns == {"pair", "bidirectional"}
    shared = Designed(tmp_path, "hw=2xh200", "backend=nvlink", "experiment.placement=[0,0,1,1]")
    assert shared.patterns >= {"alltoall:4", "incast:3"}


@pytest.mark.parametrize(
    ("hw", "ways", "placement", "gathered"),
    [
        ("8xh200", ("4to4", "4to2", "2to4", "4to1"), "packed", (2, 4, 8)),
        ("4xh200", ("1to2", "2to1", "2to2"), "packed", (2, 4)),
        ("2xh200", ("1to2", "2to1", "2to2"), "sides", (2,)),
    ],
)
def test_the_number_of_gpus_decides_who_hands_over_and_gathers(tmp_path, hw, ways, placement, gathered):
    design = Designed(tmp_path, f"hw={hw}", "backend=nvlink")
    staged, sliced, metadata = design.of("handoff")
    assert (staged["tp"], sliced["tp"]) == (ways, tuple(way for way in ways if way not in ("4to4", "2to2")))
    assert (metadata["metadata"], metadata["tp"]) == (("data", "control"), ways[:1] if hw == "8xh200" else ("2to2",))
    assert {part["placement"] for part in (staged, sliced, metadata)} == {placement}
    assert design.of("allgather")[0]["ranks"] == gathered


@pytest.mark.parametrize(("jobs", "repeat"), [(1, 5), (6, 3), (9, 2)])
def test_jobs_of_handoffs_share_the_repeats(tmp_path, jobs, repeat):
    design = Designed(tmp_path, "hw=8xh200", "backend=nixl", f"experiment.jobs={jobs}")
    staged, sliced, _ = design.of("handoff")
    assert (staged["repeat"], sliced["repeat"]) == (repeat, repeat)
    assert (staged["tokens"], sliced["tokens"]) == ((512, 2048, 8192), (512, 2048))  # of 80 layers, two planes each
    assert "left out, with more than 524288 slices: sliced handoffs of 8192 tokens" in design.notes


@pytest.mark.parametrize(
    ("words", "largest", "tokens", "jobs"),
    [
        (("hw=loopback", "backend=nixl_shm"), 1 << 26, (128, 512), 3),
        (("hw=2xh200", "backend=nvlink"), 1 << 29, (512, 2048, 8192), 9),
    ],
)
def test_hosts_are_validated_in_minutes_and_gpus_thoroughly(tmp_path, words, largest, tokens, jobs):
    design = Designed(tmp_path, *words)
    assert largest / 4 < max(point.blocks * point.size for point in design.points) <= largest
    assert design.of("handoff")[0]["tokens"] == tokens
    assert ValidateOptions().sized(design.config.hw.gpus).jobs == jobs


def test_a_quick_validation_has_one_job_and_small_transfers(tmp_path):
    design = Designed(tmp_path, "hw=loopback", "backend=nixl_shm", quick=True)
    assert len(design.points) == 8
    assert max(point.blocks * point.size for point in design.points) <= 4 << 20
    assert [part.name for part in design.parts] == ["transfer", "handoff", "handoff"]
    assert ValidateOptions(quick=True).sized(0).jobs == 1


def test_hosts_have_the_ranks_asked_for_and_the_points_that_fit(tmp_path):
    hosts = ("hw=loopback", "backend=nixl_shm", "experiment.ranks=8")
    design = Designed(tmp_path, *hosts)
    assert "alltoall:8" in design.patterns
    assert design.of("handoff")[0]["tp"] == ("4to4", "4to2", "2to4", "4to1")
    assert design.of("allgather")[0]["ranks"] == (2, 4, 8)
    large = Designed(tmp_path, *hosts, "experiment.limit=512MiB")
    points, gathers = [note for note in large.notes if "do not fit into memory" in note]
    assert "alltoall:8 37x6291456 c1" in points  # 222 MiB x 14 x 8 ranks, of 4 GiB
    assert "incast:7 1x6291456 c1" not in points
    assert gathers == "left out, for they do not fit into memory: all-gathers of 50331648 bytes"
