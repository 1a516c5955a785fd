"""The laws of simulation hold on the real code, and each is broken by a defect of its own."""

from typing import Any

import pytest

from experiments.faults.scenario import Scenario, draw
from pdsim.cli.main import main
from pdsim.core.errors import ConfigError
from pdsim.kv.pages import PagePool
from pdsim.serving.prefill import PrefillScheduler
from pdsim.serving.router import Router
from pdsim.sim.endpoint import Payload
from pdsim.sim.model import Model
from pdsim.sim.network import Link
from pdsim.transfer.job import Outcome
from pdsim.verify.laws import LawChecker, broken
from tests.mutants.mutant import patched


def run(scenario: Scenario, checker: LawChecker | None) -> Outcome:
    model = Model(scenario.machine, scenario.engine, memory="tracked", seed=1, limit=100.0, observer=checker)
    return model.run(scenario.specs)


def laws_found(seed: int = 3) -> list[str]:
    """Return the laws that are broken in a job, in the order in which they were first."""
    checker = LawChecker()
    outcome = run(draw(seed, 12, 0.0), checker)
    value = outcome.ranks["router"].value
    columns = {"status": [row[3] for row in value["rows"]]} if value else {}
    transfers = [record for rank in outcome.ranks.values() for record in rank.transfers]
    lines = [*checker.violations, *broken(outcome, columns, transfers, checker.landed_bytes)]
    return list(dict.fromkeys(line.partition(":")[0].removeprefix("law of ") for line in lines))


@pytest.mark.parametrize("seed", range(6))
def test_the_real_code_keeps_every_law(seed):
    assert laws_found(seed) == []


def test_watching_changes_nothing():
    scenario = draw(5, 12, 0.0)
    assert run(scenario, LawChecker()) == run(scenario, None)


def twice(original: Any, *arguments: Any) -> None:
    original(*arguments)
    original(*arguments)


def one_less(original: Any, self: Any, ahead: bool = False) -> Any:
    seconds = self.iteration_seconds
    self.iteration_seconds = lambda pieces: seconds([(done, new - 1) for done, new in pieces])
    try:
        return original(self, ahead)
    finally:
        self.iteration_seconds = seconds


def loses_one(original: Any, self: PagePool, owner: int) -> None:
    (start, count), *rest = self.owners[owner]
    self.owners[owner] = ((start, count - 1), *rest) if count > 1 else tuple(rest)
    original(self, owner)


def forgets(original: Any, self: Router, request: Any, status: str) -> None:
    original(self, request, "" if request.number == 2 else status)


def narrower(original: Any, self: Link, *arguments: Any) -> None:
    original(self, *arguments)
    self.nominal /= 2.0


@pytest.mark.parametrize(
    ("law", "change"),
    [
        ("bytes", (Payload, "move", twice)),
        ("tokens", (PrefillScheduler, "next_forward", one_less)),
        ("pages", (PagePool, "release", loses_one)),
        ("requests", (Router, "_close", forgets)),
        ("capacity", (Link, "__init__", narrower)),  # for a moment
    ],
    ids=lambda value: value if isinstance(value, str) else value[2].__name__,
)
def test_a_defect_breaks_its_law(law, change):
    with patched((change,)):
        assert laws_found()[0] == law


def test_a_run_says_which_laws_were_checked_and_broken(tmp_path, capsys, monkeypatch):
    words = ["run", "hw=8xh20", "workload.count=5", f"output={tmp_path}", "-v"]
    assert main([*words, "checks=on"]) == 0
    assert "note: checks=on: 0 violations of the laws of simulation" in capsys.readouterr().out
    assert main(words) == 0
    assert "checks=on:" not in capsys.readouterr().out
    monkeypatch.setattr("pdsim.verify.laws._PHASES", ("finished", "joined"))
    assert main(["run", "hw=8xh20", "workload.count=5", f"output={tmp_path}", "checks=on"]) == 1
    assert "law of causality: room 1" in capsys.readouterr().out


def test_a_compiled_pdsim_refuses_to_watch(monkeypatch):
    monkeypatch.setattr("pdsim.core.clock.__file__", "pdsim/core/clock.cpython-311-x86_64-linux-gnu.so")
    with pytest.raises(ConfigError, match="checks=on watches methods"):
        LawChecker()
