"""`pdsim validate`: predictions on disk before anything is measured, and compared as they were."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments import transfer
from experiments.validate import Bounds, ValidateOptions, run
from experiments.validate.steps import values
from pdsim.config import Config
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
        assert ENGINE.intra is not None
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
    """Return the predictions that are made in *folder* alone."""
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


def test_predictions_are_on_disk_before_each_part_and_so_is_what_was_measured(tmp_path):
    seen = []

    def look(_: Sequence[RankSpec]) -> None:
        done = len(kept(tmp_path)["took"]) if (tmp_path / "measurements.json").is_file() else 0
        seen.append(((tmp_path / "expectations.json").is_file(), done))

    validate(tmp_path, target=Slower(before=look), jobs=1, classes=("pair", "handoff"))
    assert seen == [(True, 0), (True, 1), (True, 2)]  # transfers, staged handoffs, sliced ones


def test_what_takes_long_is_measured_in_a_third_of_the_jobs(tmp_path):
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


def test_a_part_that_fails_does_not_take_the_others_with_it(tmp_path):
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


def test_points_of_a_file_are_validated_and_ranks_without_gpus_left_out(tmp_path):
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
