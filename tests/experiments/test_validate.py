"""`pdsim validate`: predictions on disk before anything is measured, and compared as they were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments import transfer
from experiments.validate import Bounds, ValidateOptions, run
from pdsim.config import Config
from pdsim.core.errors import ConfigError
from pdsim.core.progress import silent
from pdsim.kv.policy import Policy
from pdsim.results.record import Result
from pdsim.serving.settings import Kv
from pdsim.sim.model import Model
from pdsim.transfer.job import Outcome, RankSpec
from pdsim.validation.sealed import unseal
from tests.support.configs import EIGHT, ENGINE, make_config
from tests.support.serving import GQA

SMALL: dict[str, Any] = {
    "classes": ("pair", "contention", "handoff"),
    "size": (4096, 65536),
    "blocks": (1, 3),
    "patterns": ("incast:2", "cross:2x2"),
    "contended": (65536,),
    "contended_blocks": (1,),
    "tokens": (64,),
    "tp": ("2to1",),
    "repeat": 4,
}


def configured(**options: Any) -> Config:
    what = {"hw": EIGHT, "model": GQA, "kv": Kv(page_size=16), "policy": Policy(queues=2, staging=True)}
    return make_config(Path("unused"), target="real", experiment=ValidateOptions(**SMALL | options), **what)


class Slower(Model):
    """Stands for a real engine: a model whose calls cost more than expected, and which looks for predictions."""

    folder: Path
    found: list[bool]

    def run(self, ranks: Sequence[RankSpec], kill: Mapping[str, float] | None = None, **more: Any) -> Outcome:
        type(self).found.append((self.folder / "expectations.json").is_file())
        return super().run(ranks, kill, **more)


def slower(folder: Path, call: float = 10e-6) -> Slower:
    assert ENGINE.intra is not None
    engine = replace(ENGINE, intra=replace(ENGINE.intra, call=call))
    return type("Target", (Slower,), {"folder": folder, "found": []})(EIGHT, engine)


def validate(folder: Path, call: float = 10e-6, **options: Any) -> tuple[Result, Slower]:
    folder.mkdir(exist_ok=True)
    target = slower(folder, call)
    return run(configured(**options), target, silent, folder), target


def classes(result: Result) -> dict[str, list[Any]]:
    return {row[0]: list(row) for row in result.tables[0].rows}


def test_what_takes_long_is_measured_in_a_third_of_the_jobs_and_the_same_requests_are_served_in_each(tmp_path: Path):
    validate(tmp_path, call=5e-6, jobs=6, classes=("pair", "handoff", "serve"), tp=("1to2",), tokens=(64,))
    measured = unseal((tmp_path / "measurements.json").read_bytes(), "")
    assert [(part["experiment"], part["jobs"]) for part in measured["took"]] == [
        ("transfer", 6),
        ("handoff", 2),
        ("handoff", 2),
        ("serve", 2),
    ]
    per_job = {value["label"]: value["per_job"] for value in measured["measured"] if value["group"] == "serve"}
    assert [first == other for first, other in per_job.values()] == [True] * 3


def test_progress_names_the_part_and_which_job_of_how_many(tmp_path: Path):
    said: list[tuple[float, str]] = []
    run(
        configured(jobs=3, classes=("pair", "serve")),
        slower(tmp_path),
        lambda share, text="", _=None: said.append((share, text)),
        tmp_path,
    )
    texts = [text for _, text in said]
    assert texts[0] == "predicting transfer, simulation 1 of 2"
    jobs = ["transfer, job 1 of 3,", "transfer, job 2 of 3,", "transfer, job 3 of 3,", "serve, job 1 of 1,"]
    assert list(dict.fromkeys(" ".join(text.split()[:5]) for text in texts[2:])) == jobs
    assert [share for share, _ in said] == sorted(share for share, _ in said)
    assert said[-1][0] == 1.0


def test_predictions_are_on_disk_before_the_first_job_runs(tmp_path: Path):
    _, target = validate(tmp_path)
    assert target.found
    assert all(target.found)


def test_an_engine_as_predicted_has_no_error_and_no_failure(tmp_path: Path):
    result, _ = validate(tmp_path, call=5e-6)
    assert result.failures == []
    assert {round(row[3], 6) for row in result.tables[0].rows} == {0}


def test_an_engine_that_is_slower_is_found_out(tmp_path: Path):
    result, _ = validate(tmp_path)
    # 5 us too few of 10 + 1 + 0.4: the worst pair is the smallest
    assert classes(result)["pair"][7] == "pair 1x4096 c1"
    assert classes(result)["pair"][2] < 0
    assert any(failure.startswith("pair: error beyond its bound") for failure in result.failures)


@pytest.mark.parametrize(("small", "verdict"), [(4e-6, "beyond"), (6e-6, "ok")])
def test_small_pairs_are_judged_by_seconds_if_that_is_asked_for(tmp_path: Path, small: float, verdict: str):
    bounds = Bounds(large=1 << 30, small=small)  # each transfer takes 5 us longer than predicted
    result, _ = validate(tmp_path, classes=("pair",), bounds=bounds)
    (pair,) = result.tables[0].rows
    assert (pair[0], pair[-3], round(pair[-2], 9), round(pair[-1], 9)) == ("small pair", verdict, 5e-3, small * 1e3)


def test_what_was_kept_can_be_compared_again_without_an_engine(tmp_path: Path):
    first, _ = validate(tmp_path / "a")
    (tmp_path / "b").mkdir()
    config = replace(configured(stored=str(tmp_path / "a")), target="model")
    again = run(config, slower(tmp_path / "b"), silent, tmp_path / "b")
    assert again.tables == first.tables
    assert not any("after these measurements" in note for note in again.notes)


def test_a_better_model_is_tried_on_what_was_kept_and_that_is_said(tmp_path: Path):
    validate(tmp_path / "a")
    (tmp_path / "b").mkdir()
    config = replace(configured(stored=str(tmp_path / "a"), predict="now"), target="model")
    assert ENGINE.intra is not None
    better = replace(config, backend=replace(ENGINE, intra=replace(ENGINE.intra, call=10e-6)))
    again = run(better, slower(tmp_path / "b"), silent, tmp_path / "b")
    assert {round(row[3], 6) for row in again.tables[0].rows} == {0}
    assert "the predictions were made after these measurements" in again.notes


def test_points_from_a_file_are_validated_too(tmp_path: Path):
    path = tmp_path / "mine.csv"
    path.write_text("pattern,blocks,size,concurrency\nfanout:2,2,4096,1\n")
    result, _ = validate(tmp_path / "a", points=str(path), classes=("pair",))
    assert "fanout" in classes(result)


def test_a_pattern_with_more_ranks_than_gpus_is_left_out(tmp_path: Path):
    two = replace(
        configured(classes=("contention",), patterns=("bidirectional", "cross:2x2")), hw=replace(EIGHT, gpus=2)
    )
    result = run(two, slower(tmp_path), silent, tmp_path)
    assert set(classes(result)) == {"bidirectional", "bidirectional, total rate"}


def test_a_model_alone_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"set target=real, or experiment\.stored=FOLDER"):
        run(replace(configured(), target="model"), slower(tmp_path), silent, tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classes": ("speed",)}, "experiment.classes must be of pair, .*, got 'speed'"),
        ({"predict": "later"}, "experiment.predict must be one of before, only, now, got 'later'"),
        ({"ranks": 1}, "experiment.ranks must be >= 2, or 0 for a rank a GPU, got 1"),
        ({"expected": "a.json", "stored": "b"}, "experiment.expected must be left out with experiment.stored"),
        (
            {"expected": "a.json", "predict": "only"},
            "experiment.expected must be left out .* of a run that measures",
        ),
        ({"predict": "only", "stored": "b"}, "experiment.predict must be now, not only, with experiment.stored"),
    ],
)
def test_an_option_out_of_range_is_refused_by_name_and_value(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        ValidateOptions(**options)


def test_a_bound_of_nothing_is_refused():
    with pytest.raises(ValueError, match=r"experiment\.bounds\.pair must be > 0, got 0"):
        Bounds(pair=0)


def test_a_stored_transfer_run_is_compared_with_predictions_made_afterwards(tmp_path: Path):
    from pdsim.results.store import Run

    real = replace(configured(), experiment=transfer.TransferOptions(patterns=("pair",), size=(4096,), repeat=4))
    with Run(replace(real, output=str(tmp_path))) as kept:
        source = kept.finish(transfer.run(real, slower(tmp_path), silent))
    (tmp_path / "b").mkdir()
    config = replace(configured(stored=str(source)), target="model")
    result = run(config, slower(tmp_path), silent, tmp_path / "b")
    assert list(classes(result)) == ["pair"]
    assert classes(result)["pair"][2] < 0
    assert "the predictions were made after these measurements" in result.notes
