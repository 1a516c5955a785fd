"""A small change of our own code while a scenario runs, and the seeds that it takes to catch it."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any, NamedTuple
from unittest.mock import patch

from experiments.faults import CRASH
from experiments.faults.scenario import Scenario, attempt, draw

Change = tuple[Any, str, Any]
"""Owner, attribute, and what it becomes; a function with a parameter *original* is given what was there first."""

REQUESTS = 50
"""Of each scenario."""

INTENSITY = 0.4
"""Probability of each kind of fault."""

LIMIT = 2000
"""Seeds, from 0 on, within which every mutant must be caught."""


class Caught(NamedTuple):
    """How a mutant was caught."""

    seeds: int  # that were needed
    run: int  # seeds that were run because the change could show in them
    invariants: list[str]  # that did not hold in the last


@dataclass(frozen=True)
class Mutant:
    """One defect: *hazard* it stands for, *what* is changed, and the *invariant* that catches it.

    *setting* changes what is drawn; under it alone nothing may be found.
    """

    hazard: str
    what: str
    invariant: str
    changes: tuple[Change, ...]
    relevant: Callable[[Scenario], bool] = lambda _: True
    setting: tuple[Change, ...] = ()

    def catch(self, seeds: Iterable[int] = range(LIMIT)) -> Caught | None:
        """Explore *seeds* until *invariant* does not hold; return None if it always does."""
        # kinds that would undo its setting: they choose ranks, machine, policy or the program of decode
        kinds = ["caches", "crowds", "gathers", "held", "layouts", "nodes", "policies", "runs", "sizes", "stages"]
        # none needs a moment, for which each scenario is rehearsed
        without, run = frozenset((*kinds, "moments") if self.setting else ("moments",)), 0
        for seed in seeds:
            with patched(self.setting):
                scenario = draw(seed, REQUESTS, INTENSITY, without)
                if not self.relevant(scenario):
                    continue
                run += 1
                with patched(self.changes):
                    try:
                        broken = {violation.invariant for violation in attempt(scenario).violations}
                    except Exception:  # an error of the model itself, which the trial reports as one
                        broken = {CRASH}
                if self.invariant in broken:
                    assert not self.setting or not attempt(scenario).violations, (
                        f"seed {seed} is not clean unchanged"
                    )
                    return Caught(seed + 1, run, sorted(broken))
        return None


@contextmanager
def patched(changes: tuple[Change, ...]) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name, value in changes:
            stack.enter_context(patch.object(owner, name, _replacement(getattr(owner, name), value)))
        yield


def _replacement(original: Any, value: Any) -> Any:
    if not callable(value) or "original" not in signature(value).parameters:
        return value
    return lambda *arguments, **options: value(original, *arguments, **options)
