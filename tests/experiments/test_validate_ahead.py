"""Predictions that are made before there is a machine to measure on, and the run that is given them."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.validate import run
from pdsim.config import Config
from pdsim.core.errors import ConfigError, PeerLost
from pdsim.core.progress import silent
from pdsim.results.record import Result
from pdsim.sim.model import Model
from pdsim.validation.sealed import unseal
from tests.experiments.test_validate import classes, configured, slower
from tests.support.configs import EIGHT, ENGINE

Folder = Path


def predict(folder: Path, **options: Any) -> tuple[Result, Path]:
    """Return what predicts only, and the file that it writes."""
    folder.mkdir()
    config = replace(configured(predict="only", **options), target="model")
    return run(config, Model(EIGHT, ENGINE), silent, folder), folder / "expectations.json"


def measure(folder: Path, expected: Path, config: Config | None = None) -> Result:
    """Return what a run says that is given the predictions in *expected*."""
    folder.mkdir()
    chosen = config or configured()
    given = replace(chosen, experiment=replace(chosen.experiment, expected=str(expected)))
    return run(given, slower(folder), silent, folder)


def test_predicting_only_starts_no_real_rank_and_measures_nothing(tmp_path: Path):
    result, path = predict(tmp_path / "a")
    content = unseal(path.read_bytes(), "")
    assert (content["hw"], content["backend"], content["calibration"]) == (EIGHT.name, ENGINE.name, "none")
    assert content["system"]["model"]["kv_heads"] == 8
    assert content["commit"]
    assert not (tmp_path / "a" / "measurements.json").exists()
    assert result.tables[0].title == "Predicted"
    assert any("nothing was measured" in note for note in result.notes)


def test_a_later_run_is_compared_with_the_very_predictions(tmp_path: Path):
    _, path = predict(tmp_path / "a")
    result = measure(tmp_path / "b", path)
    expected, measured = (tmp_path / "b" / f"{name}.json" for name in ("expectations", "measurements"))
    assert expected.read_bytes() == path.read_bytes()
    assert unseal(measured.read_bytes(), "")["expectations"] == unseal(path.read_bytes(), "")["sha256"]
    assert set(classes(result)) >= {"pair", "incast", "cross, total rate", "handoff, staged"}
    assert not any("made after" in note for note in result.notes)
    (note,) = [note for note in result.notes if note.startswith("predicted at ")]
    assert re.search(r"0:00:.* before the first transfer.*with calibration none$", note)


def test_predictions_need_no_other_file(tmp_path: Path):
    _, path = predict(tmp_path / "a", classes=("pair",))
    (tmp_path / "alone").mkdir()
    alone = Path(shutil.copy(path, tmp_path / "alone"))
    shutil.rmtree(tmp_path / "a")
    for folder, source in (("b", alone), ("c", alone.parent)):
        of = classes(measure(tmp_path / folder, source))  # whatever the options now say
        assert {name: row[1] for name, row in of.items()} == {"pair": 4}


def test_what_was_measured_so_far_is_on_disk_when_a_part_begins(tmp_path: Path):
    found = []

    class Looks(type(slower(tmp_path / "b"))):  # type: ignore[misc]
        def run(self, *arguments: Any, **more: Any) -> Any:
            path = tmp_path / "b" / "measurements.json"
            found.append(len(unseal(path.read_bytes(), "")["took"]) if path.is_file() else 0)
            return super().run(*arguments, **more)

    (tmp_path / "b").mkdir()
    Looks.folder, Looks.found = tmp_path / "b", []
    run(configured(jobs=1, classes=("pair", "handoff")), Looks(EIGHT, ENGINE), silent, tmp_path / "b")
    assert found == [0, 1, 2]  # transfers, staged handoffs, sliced ones


def test_a_part_that_fails_does_not_take_the_others_with_it(tmp_path: Path):
    class Fails(type(slower(tmp_path / "b"))):  # type: ignore[misc]
        def run(self, ranks: Any, *arguments: Any, **more: Any) -> Any:
            if ranks[0].program.startswith("experiments.transfer.exchange"):
                raise PeerLost("rank0 is gone")
            return super().run(ranks, *arguments, **more)

    (tmp_path / "b").mkdir()
    Fails.folder, Fails.found = tmp_path / "b", []
    result = run(configured(classes=("pair", "handoff")), Fails(EIGHT, ENGINE), silent, tmp_path / "b")
    assert set(classes(result)) == {"handoff, staged", "handoff, sliced"}
    assert any("5 predictions have no measurement" in note or "no measurement" in note for note in result.notes)


def test_predictions_that_were_changed_are_not_measured(tmp_path: Path):
    _, path = predict(tmp_path / "a")
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 1', 1))
    with pytest.raises(ConfigError, match=r"expectations\.json was changed after it was written"):
        measure(tmp_path / "b", path)


def test_a_file_that_holds_no_predictions_is_refused(tmp_path: Path):
    (tmp_path / "mine.json").write_text("[1, 2")
    with pytest.raises(ConfigError, match=r"mine\.json is not a file of a validation"):
        measure(tmp_path / "b", tmp_path / "mine.json")


def test_a_file_that_is_not_there_is_refused_with_the_way_to_one(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"experiment\.expected=.*nothing.*experiment\.predict=only"):
        measure(tmp_path / "b", tmp_path / "nothing")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hw": replace(EIGHT, name="other")}, r"is about hw=toy; this run has another hw"),
        ({"backend": replace(ENGINE, name="other")}, r"is about backend=fast; this run has another backend"),
        ({"seed": 7}, r"is about seed=0; this run has another seed"),
        ({"model": replace(configured().model, layers=3)}, r"is about model\.layers=2; this run has another model"),
    ],
)
def test_predictions_of_another_system_are_refused(tmp_path: Path, change: Any, message: str):
    _, path = predict(tmp_path / "a", classes=("pair",))
    with pytest.raises(ConfigError, match=message):
        measure(tmp_path / "b", path, replace(configured(), **change))


def test_what_is_stored_of_another_model_is_not_predicted_anew(tmp_path: Path):
    _, path = predict(tmp_path / "a", classes=("pair",))
    measure(tmp_path / "b", path)
    other = replace(configured(stored=str(tmp_path / "b"), predict="now"), target="model")
    other = replace(other, model=replace(other.model, layers=3))
    (tmp_path / "c").mkdir()
    with pytest.raises(ConfigError, match=r"is about model\.layers=2"):
        run(other, slower(tmp_path / "c"), silent, tmp_path / "c")
