"""The laws of simulation hold on the real code, each is broken by a defect of its own, and watching changes nothing.

Jobs are those of `experiment=faults` without any fault.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.faults.scenario import Scenario, draw
from pdsim.cli.main import main
from pdsim.core.errors import ConfigError
from pdsim.kv.pages import PagePool
from pdsim.serving.prefill import PrefillScheduler
from pdsim.serving.router import Router
from pdsim.sim.endpoint import Payload
from pdsim.sim.links import Link
from pdsim.sim.model import Model
from pdsim.transfer.job import Outcome
from pdsim.verify.laws import LAWS, LawChecker, broken

ROOT = Path(__file__).parents[2]


def run(scenario: Scenario, checker: LawChecker | None) -> Outcome:
    model = Model(scenario.machine, scenario.engine, memory="tracked", seed=1, limit=100.0, observer=checker)
    return model.run(scenario.specs)


def found(seed: int = 3) -> list[str]:
    """Return the laws that are broken in a job, in the order in which they were first."""
    checker = LawChecker()
    outcome = run(draw(seed, 12, 0.0), checker)
    value = outcome.ranks["router"].value
    columns = {"status": [row[3] for row in value["rows"]]} if value else {}
    transfers = [record for rank in outcome.ranks.values() for record in rank.transfers]
    lines = [*checker.violations, *broken(outcome, columns, transfers, checker.landed_bytes)]
    return list(dict.fromkeys(line.partition(":")[0].removeprefix("law of ") for line in lines))


@pytest.mark.parametrize("seed", range(6))
def test_the_real_code_keeps_every_law(seed: int):
    assert found(seed) == []


def test_watching_changes_nothing():
    scenario = draw(5, 12, 0.0)
    assert run(scenario, LawChecker()) == run(scenario, None)


def test_bytes_that_land_twice_break_a_law(monkeypatch: pytest.MonkeyPatch):
    original = Payload.move

    def twice(self: Payload, *arguments: Any) -> None:
        original(self, *arguments)
        original(self, *arguments)

    monkeypatch.setattr(Payload, "move", twice)
    assert found() == ["bytes"]


def test_a_token_that_is_not_computed_breaks_a_law(monkeypatch: pytest.MonkeyPatch):
    original = PrefillScheduler.next_forward

    def one_less(self: PrefillScheduler, ahead: bool = False) -> Any:
        seconds = self.iteration_seconds
        self.iteration_seconds = lambda pieces: seconds([(done, new - 1) for done, new in pieces])  # type: ignore[method-assign]
        try:
            return original(self, ahead)
        finally:
            self.iteration_seconds = seconds  # type: ignore[method-assign]

    monkeypatch.setattr(PrefillScheduler, "next_forward", one_less)
    assert found() == ["tokens"]


def test_a_page_that_is_lost_breaks_a_law(monkeypatch: pytest.MonkeyPatch):
    original = PagePool.release

    def loses_one(self: PagePool, owner: int) -> None:
        (start, count), *rest = self.owners[owner]
        self.owners[owner] = ((start, count - 1), *rest) if count > 1 else tuple(rest)
        original(self, owner)

    monkeypatch.setattr(PagePool, "release", loses_one)
    assert found()[0] == "pages"


def test_a_request_that_never_ends_breaks_a_law(monkeypatch: pytest.MonkeyPatch):
    original = Router._close

    def forgets(self: Router, request: Any, status: str) -> None:
        original(self, request, "" if request.number == 2 else status)

    monkeypatch.setattr(Router, "_close", forgets)
    assert found() == ["requests"]


def test_a_request_that_ends_before_it_begins_breaks_a_law():
    scenario = draw(3, 12, 0.0)
    outcome = run(scenario, None)
    (first, *_) = next(rank.transfers for rank in outcome.ranks.values() if rank.transfers)
    assert list(broken(None, {}, [first])) == []
    (line,) = broken(None, {}, [first._replace(completed=first.posted - 1.0)])
    assert line.startswith("law of causality: stages of")


def test_a_link_that_carries_too_much_breaks_a_law():
    outcome = replace(run(draw(3, 2, 0.0), None), links={"node0/gpu0/nvlink.in": 1.01})
    assert list(broken(outcome, {}, [])) == [
        "law of capacity: node0/gpu0/nvlink.in was used to 1.010000000 of what it has"
    ]


def test_a_link_that_carries_too_much_for_a_moment_breaks_a_law(monkeypatch: pytest.MonkeyPatch):
    original = Link.__init__

    def narrower(self: Link, *arguments: Any) -> None:
        original(self, *arguments)
        self.nominal /= 2.0

    monkeypatch.setattr(Link, "__init__", narrower)
    checker = LawChecker()
    outcome = run(draw(3, 12, 0.0), checker)
    assert checker.violations[0].startswith("law of capacity: node0/gpu")
    assert max(outcome.links.values()) < 1.0  # over the whole run it has not


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_every_law_has_the_test_that_it_names(law: Any):
    path, _, name = law.test.partition("::")
    assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")


def test_a_run_says_that_its_laws_were_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["run", "hw=8xh20", "workload.count=5", f"output={tmp_path}", "-v"]
    assert main([*words, "checks=on"]) == 0
    assert "note: checks=on: 0 violations of the laws of simulation" in capsys.readouterr().out
    assert main(words) == 0
    assert "checks=on:" not in capsys.readouterr().out


def test_a_run_that_breaks_a_law_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("pdsim.verify.laws._PHASES", ("finished", "joined"))
    assert main(["run", "hw=8xh20", "workload.count=5", f"output={tmp_path}", "checks=on"]) == 1
    assert "law of causality: room 1" in capsys.readouterr().out


def test_a_compiled_pdsim_refuses_to_watch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pdsim.core.clock.__file__", "pdsim/core/clock.cpython-311-x86_64-linux-gnu.so")
    with pytest.raises(ConfigError, match="checks=on watches methods"):
        LawChecker()
