"""The campaign of simulated faults: parts are resumed, stop in time, and add up."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.faults.shrink import CRASH, FaultTrial
from tools.faults_model import Part, main, ranges, table


def part(tmp_path: Path, name: str, *words: str) -> tuple[int, Part]:
    path = tmp_path / name
    found = main(["run", "--requests", "3", "--workers", "1", "--to", str(path), *words])
    return found, Part.read(path)


def test_a_part_that_was_stopped_goes_on_and_parts_add_up(tmp_path: Path):
    stopped, first = part(tmp_path, "one.json", "--seeds", "5..9", "--limit", "0")
    assert (stopped, first.seeds) == (3, [[5, 6]])
    done, one = part(tmp_path, "one.json", "--seeds", "5..9")
    assert (done, one.count, sum(one.statuses.values())) == (0, 4, 12)
    assert part(tmp_path, "one.json", "--seeds", "5..9")[1].events == one.events
    part(tmp_path, "two.json", "--seeds", "9..10")
    *_, row = table([tmp_path / "one.json", tmp_path / "two.json"])
    assert row.startswith(f"| {one.code[:8]} | 5 to 9 | 5 | 15 |")
    assert row.endswith("| 0 |")


def test_seeds_count_once_and_parts_of_other_options_do_not_add_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert ranges([[4, 6], [0, 2], [2, 4]]) == [[0, 6]]
    with pytest.raises(ValueError, match="seed 1 is there twice"):
        ranges([[0, 2], [1, 3]])
    part(tmp_path, "one.json", "--seeds", "5..6")
    with pytest.raises(SystemExit):
        main(["run", "--seeds", "5..6", "--to", str(tmp_path / "one.json")])
    assert "other code or options" in capsys.readouterr().err


def test_a_scenario_that_cannot_be_run_is_a_violation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fails(*_: object) -> None:
        raise ZeroDivisionError("what")

    monkeypatch.setattr("experiments.faults.shrink.attempt", fails)
    (found,) = FaultTrial(1, 3).run().violations
    assert (found.invariant, found.what.startswith("ZeroDivisionError: what, in fails")) == (CRASH, True)
    failed, one = part(tmp_path, "one.json", "--seeds", "1..2")
    assert (failed, one.violations[0][:2]) == (1, [1, CRASH])
