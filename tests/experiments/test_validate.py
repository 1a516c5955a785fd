"""`pdsim validate`: what it runs, predictions on disk before anything is measured, and compared as they were."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from experiments import transfer
from experiments.transfer.points import read
from experiments.validate import Bounds, ValidateOptions, run
from experiments.validate.steps import parts, problems, values
from pdsim.config import Config
from pdsim.config.compose import compose
from pdsim.core.errors import ConfigError, PeerLost
from pdsim.core.progress import silent
from pdsim.kv.policy import Policy
from pdsim.results.record import Result
from pdsim.results.store import Run
from pdsim.serving.settings import Kv
from pdsim.sim.model import Model
from pdsim.transfer import TransferRecord
from pdsim.transfer.job import Outcome, RankSpec
from pdsim.validation.sealed import unseal
from tests.support.configs import EIGHT, ENGINE, make_config
from tests.support.serving import GQA

SMALL: dict[str, Any] = {
    "classes": ("pair", "contention", "handoff"), "size": (4096, 65536), "blocks": (1, 3), "contended": (65536,),
    "patterns": ("incast:2", "cross:2x2"), "contended_blocks": (1,), "tokens": (64,), "tp": ("2to1",), "repeat": 4,
    "skew": 0.0,  # what stands for a real engine has none
}  # fmt: skip
AFTER = "the predictions were made after these measurements"


def configured(target: str = "real", **options: Any) -> Config:
    what = {"hw": EIGHT, "model": GQA, "kv": Kv(page_size=16), "policy": Policy(queues=2, staging=True)}
    return make_config(Path("unused"), target=target, experiment=ValidateOptions(**SMALL | options), **what)


class Slower(Model):
    """Stands for a real engine: a model whose calls cost more than expected; *before* is told of each job."""

    def __init__(self, before: Callable[[Sequence[RankSpec]], None] = lambda _: None) -> None:
        self.slow, self.before = replace(ENGINE, intra=replace(ENGINE.intra, call=10e-6)), before
        super().__init__(EIGHT, self.slow)

    def run(self, ranks: Sequence[RankSpec], kill: Mapping[str, float] | None = None, **more: Any) -> Outcome:
        self.before(ranks)
        return super().run(ranks, kill, **more)


def validate(folder: Path, config: Config | None = None, target: Model | None = None, **options: Any) -> Result:
    folder.mkdir(exist_ok=True)
    return run(config or configured(**options), target or Slower(), silent, folder)


def classes(result: Result) -> dict[str, list[Any]]:
    return {row[0]: list(row) for row in result.tables[0].rows}


def kept(folder: Path, name: str = "measurements") -> dict[str, Any]:
    return unseal((folder / f"{name}.json").read_bytes(), "")


def predict(folder: Path, **options: Any) -> Path:
    validate(folder, configured("model", predict="only", **options), Model(EIGHT, ENGINE))
    return folder / "expectations.json"


def test_an_engine_that_is_slower_is_found_out(tmp_path):
    result = validate(tmp_path)
    pair = classes(result)["pair"]
    assert (pair[8], pair[2] < 0) == ("pair 1x4096 c1", True)  # 5 us too few of 10 + 1 + 0.4: the smallest is worst
    assert any(failure.startswith("pair: error beyond its bound") for failure in result.failures)
    again = validate(tmp_path / "again", configured("model", stored=str(tmp_path)))
    assert (again.tables, AFTER in again.notes) == (result.tables, False)
    better = configured("model", stored=str(tmp_path), predict="now")
    better = replace(better, backend=Slower().slow)
    result = validate(tmp_path / "better", better)
    assert ({round(row[3], 6) for row in result.tables[0].rows}, result.failures) == ({0}, [])
    assert AFTER in result.notes
    with pytest.raises(ConfigError, match=r"is about model\.layers=2"):
        validate(tmp_path / "other", replace(better, model=replace(better.model, layers=3)))


def test_predictions_and_measurements_are_on_disk_before_each_part(tmp_path):
    seen = []

    def look(_: Sequence[RankSpec]) -> None:
        done = len(kept(tmp_path)["took"]) if (tmp_path / "measurements.json").is_file() else 0
        seen.append(((tmp_path / "expectations.json").is_file(), done))

    validate(tmp_path, target=Slower(before=look), jobs=1, classes=("pair", "handoff"))
    assert seen == [(True, 0), (True, 1), (True, 2)]  # transfers, staged handoffs, sliced ones


def test_what_takes_long_has_a_third_of_the_jobs(tmp_path):
    said: list[tuple[float, str]] = []
    config = configured(jobs=6, classes=("pair", "handoff", "serve"), tp=("1to2",))
    run(config, Slower(), lambda share, text="", _=None: said.append((share, text)), tmp_path)
    measured = kept(tmp_path)
    jobs = [(part["experiment"], part["jobs"]) for part in measured["took"]]
    assert jobs == [("transfer", 6), ("handoff", 2), ("handoff", 2), ("serve", 2)]
    per_job = [value["per_job"] for value in measured["measured"] if value["group"] == "serve"]
    assert [first == other for first, other in per_job] == [True] * 3  # the same requests in each
    assert said[0][1] == "predicting transfer, simulation 1 of 4"
    assert any(text.startswith("serve, job 2 of 2,") for _, text in said)
    assert [share for share, _ in said] == sorted(share for share, _ in said)
    assert said[-1][0] == 1.0


def test_a_part_that_fails_leaves_the_others(tmp_path):
    def fail(ranks: Sequence[RankSpec]) -> None:
        if ranks[0].program.startswith("experiments.transfer.exchange"):
            raise PeerLost("rank0 is gone")

    result = validate(tmp_path, target=Slower(before=fail), classes=("pair", "handoff"))
    assert set(classes(result)) == {"handoff, staged", "handoff, sliced"}
    assert any("predictions have no measurement" in note for note in result.notes)


@pytest.mark.parametrize(("small", "verdict"), [(4e-6, "beyond"), (6e-6, "ok")])
def test_small_pairs_are_judged_by_seconds_if_asked_for(tmp_path, small, verdict):
    bounds = Bounds(large=1 << 30, small=small)  # each transfer takes 5 us longer than predicted
    (pair,) = validate(tmp_path, classes=("pair",), bounds=bounds).tables[0].rows
    assert (pair[0], pair[-3], round(pair[-2], 9), round(pair[-1], 9)) == ("small pair", verdict, 5e-3, small * 1e3)


def test_points_of_a_file_are_validated_within_the_gpus(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("pattern,blocks,size,concurrency\nfanout:2,2,4096,1\n")
    few = configured(points=str(path), classes=("contention",), patterns=("bidirectional", "cross:2x2"))
    result = validate(tmp_path / "b", replace(few, hw=replace(EIGHT, gpus=3)))
    assert {name.partition(",")[0] for name in classes(result)} == {"bidirectional", "fanout"}


def test_a_later_run_is_compared_with_the_very_predictions(tmp_path):
    path = predict(tmp_path / "a")
    made = kept(tmp_path / "a", "expectations")
    (tmp_path / "a" / "points.csv").unlink()  # it needs no other file
    assert (made["hw"], made["backend"], made["calibration"]) == (EIGHT.name, ENGINE.name, "none")
    assert (made["system"]["model"]["kv_heads"], bool(made["commit"])) == (8, True)
    assert not (tmp_path / "a" / "measurements.json").exists()
    result = validate(tmp_path / "b", expected=str(path))
    assert (tmp_path / "b" / "expectations.json").read_bytes() == path.read_bytes()
    assert kept(tmp_path / "b")["expectations"] == made["sha256"]
    assert set(classes(result)) >= {"pair", "incast", "cross, total rate", "handoff, staged"}
    assert AFTER not in result.notes
    (note,) = [note for note in result.notes if note.startswith("predicted at ")]
    assert re.search(r"0:00:.* before the first transfer.*with calibration none$", note)


def test_a_stored_transfer_run_is_compared_with_later_predictions(tmp_path):
    real = replace(configured(), experiment=transfer.TransferOptions(patterns=("pair",), size=(4096,), repeat=4))
    with Run(replace(real, output=str(tmp_path))) as stored:
        source = stored.finish(transfer.run(real, Slower(), silent))
    result = validate(tmp_path / "b", configured("model", stored=str(source)))
    assert list(classes(result)) == ["pair"]
    assert classes(result)["pair"][2] < 0
    assert AFTER in result.notes


@pytest.mark.parametrize(
    ("text", "message"),
    [("[1, 2", r"expectations\.json is not a file of a validation"), (None, r"experiment\.expected=.*predict=only")],
)
def test_a_file_without_its_predictions_is_refused(tmp_path, text, message):
    path = tmp_path / "expectations.json"
    if text:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        validate(tmp_path / "b", expected=str(path))


def test_predictions_of_another_system_are_refused(tmp_path):
    config = configured(expected=str(predict(tmp_path / "a", classes=("pair",))))
    for key, there, change in (
        ("hw", "toy", {"hw": replace(EIGHT, name="other")}),
        ("backend", "fast", {"backend": replace(ENGINE, name="other")}),
        ("seed", "0", {"seed": 7}),
    ):
        with pytest.raises(ConfigError, match=f"is about {key}={there}; this run has another {key}"):
            validate(tmp_path / "b", replace(config, **change))


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("model", {}, r"set target=real, or experiment\.stored=FOLDER"),
        ("real", {"points": "/no.csv"}, "experiment.points=/no.csv: No such file or directory; name a CSV file"),
        ("real", {"ranks": 1}, "experiment.ranks=1: .*; set 2 or more, or 0 for a rank a GPU"),
        ("real", {"expected": "a", "stored": "b"}, "expected=a is of a run that measures; leave it out with"),
        ("real", {"expected": "a", "predict": "only"}, "expected=a is of a run that measures; leave it out with"),
        ("real", {"predict": "only", "stored": "b"}, "predict=only with experiment.stored=b: set predict=now"),
    ],
)
def test_options_that_cannot_be_are_refused(tmp_path, target, options, message):
    with pytest.raises(ConfigError, match=message):
        validate(tmp_path, configured(target, **options))


@pytest.mark.parametrize(
    ("flows", "expected"),
    [
        ({"ab": [(0, 1), (1, 2)], "ba": [(0, 4)]}, 1000.0 + 250.0),  # the bytes of each flow over its time
        ({"ab": [(0, 1)], "ba": [(7, 9)]}, 1000.0 + 500.0),  # ranks may begin apart
        ({"ab": [(0, 1), (1.5, 2.5)], "ba": [(0, 1)]}, 2000.0),  # pauses of a program do not count
        ({"ab": [(0, 2), (1, 3), (1.5, 2)], "ba": [(0, 1)]}, 2000.0),  # transfers under way together share time
        ({"ab": [(0, 1), (3, 4)], "ac": [(1, 3)]}, 500.0 + 500.0),  # a flow waits for another of its initiator
        ({"ab read": [(0, 1), (2, 3)], "ba read": [(0, 4)]}, 1000.0 + 250.0),  # whose initiator is the sink
    ],
)
def test_a_rate_is_that_of_the_transfers_alone(flows, expected):
    records = [
        TransferRecord("mine", kind or "write", ends[0], ends[1], 1000, 1, *(begin,) * 3, end, end, label="point")
        for ends, _, kind in (name.partition(" ") for name in flows)
        for begin, end in flows[f"{ends} {kind}".strip()]
    ]
    found = values("transfer", Result(summary=(), transfers=records))
    assert [value.value for value in found if value.quantity == "rate"] == [expected]


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


def test_quick_validations_are_small_and_hosts_have_what_fits(tmp_path):
    design = Designed(tmp_path, "hw=loopback", "backend=nixl_shm", quick=True)
    assert len(design.points) == 8
    assert max(point.blocks * point.size for point in design.points) <= 4 << 20
    assert [part.name for part in design.parts] == ["transfer", "handoff", "handoff"]
    assert ValidateOptions(quick=True).sized(0).jobs == 1
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
