"""Every known defect of KV handoffs, put into our own code, is caught by the invariant that it breaks."""

from pathlib import Path

import pytest

from tests.mutants.__main__ import recorded
from tests.mutants.catalog import BY_TEST, IMPOSSIBLE, MUTANTS
from tests.mutants.mutant import LIMIT, Mutant

ROOT = Path(__file__).parents[2]


def known(mutant: Mutant) -> int:
    """Return the seed that catches *mutant*, as the record has it."""
    return recorded()[mutant.hazard, mutant.what, mutant.invariant] - 1


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.hazard)
def test_a_mutant_is_caught_by_its_invariant(mutant: Mutant):
    caught = mutant.catch([known(mutant)]) or mutant.catch()
    assert caught is not None, f"{mutant.hazard} survives {LIMIT} seeds: {mutant.what}"
    assert mutant.invariant in caught.invariants


@pytest.mark.parametrize("hazard", BY_TEST)
def test_what_no_scenario_shows_has_a_test(hazard: str):
    path, _, name = BY_TEST[hazard][1].partition("::")
    assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")


def test_every_hazard_is_a_mutant_or_impossible_for_a_reason():
    hazards = {f"Z{number}" for number in range(1, 23)}
    assert hazards <= {mutant.hazard for mutant in MUTANTS} | set(IMPOSSIBLE)
    assert not hazards & {mutant.hazard for mutant in MUTANTS} & set(IMPOSSIBLE)


def test_every_invariant_is_broken_by_some_mutant():
    assert {mutant.invariant for mutant in MUTANTS} == {f"I{number}" for number in range(1, 16)}


def test_the_record_has_every_mutant_as_it_is():
    rows = [(mutant.hazard, mutant.what, mutant.invariant) for mutant in MUTANTS]
    assert list(recorded()) == rows, "run: python -m tests.mutants"
