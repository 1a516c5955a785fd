"""Defects of membership, as those of `tests.mutants.catalog`: instances that drain, leave and join."""

from typing import Any
from unittest.mock import patch

from experiments.faults.scenario import Scenario
from pdsim.kv.messages import Leave, epoch_of
from pdsim.serving import membership
from pdsim.serving.membership import Membership
from pdsim.serving.rank_process import EngineRank, RankProcess
from pdsim.serving.router import Router
from tests.mutants.mutant import Mutant


def changing(scenario: Scenario) -> bool:
    return bool(scenario.specs[0].arguments["drains"])


def drains_the_last(original: Any, self: Any, *how: Any) -> None:
    with patch.dict(self.registry.side(how[0]).load, {"another": 0}):
        original(self, *how)


def leader_unheard(original: Any, self: Any, receivers: Any, message: Any) -> None:
    original(self, list(receivers)[1:] if isinstance(message, Leave) else receivers, message)


def joins_unheard(original: Any, self: Any, sender: str, message: Any) -> None:
    original(self, sender, message)
    if epoch_of(self.registry.current(message.instance)) > 1:
        self.last_heard.pop(sender, None)


def asks_the_resting(original: Any, self: Any, *query: Any) -> Any:
    with patch.object(self, "_resting", set()):
        return original(self, *query)


def keeps_the_draining(original: Any, self: Router, request: Any) -> None:
    with patch.object(self.membership, "leave"):
        original(self, request)


def hears_the_late(self: Membership, rank: str) -> None:
    self.last_heard[rank] = self._process.clock.now


def calls_nobody_back(original: Any, self: Membership, instance: str) -> None:
    if self._process.clock.now >= self.draining[instance]:
        original(self, instance)


def nothing(*_: Any) -> None:
    """Do nothing."""


MEMBERSHIP = (
    Mutant("M1", "an instance leaves while it has requests", "I5",
           ((Membership, "leave", lambda original, self, _: original(self, {})),), changing),
    Mutant("M2", "the last instance of a side leaves", "I5", ((Membership, "drain", drains_the_last),), changing),
    Mutant("M3", "an instance that has left does not end", "I5",
           ((EngineRank, "_stop", lambda original, self, sender, message:
             isinstance(message, Leave) or original(self, sender, message)),), changing),
    Mutant("M4", "a draining instance is given requests", "I13",
           ((membership._Side, "query", asks_the_resting),), changing),
    Mutant("M5", "an instance that joins again is not introduced", "I9",
           ((Membership, "introduce", lambda original, self, *pair:
             max(map(epoch_of, pair)) < 2 and original(self, *pair)),), changing),
    Mutant("M7", "only the followers of an instance hear that it leaves", "I5",
           ((RankProcess, "send", leader_unheard),), changing),
    Mutant("M8", "the other side does not hear that an instance has left", "I8",
           ((Membership, "_forget", lambda original, self, instance, incarnation, reason:
             reason.endswith("has left") or original(self, instance, incarnation, reason)),), changing),
    Mutant("M9", "an instance whose time to drain is over leaves, though it has requests", "I5",
           ((Membership, "_stay", lambda self, _: self.leave({})),), changing),
    Mutant("M10", "an instance whose time to drain is over drains on", "I9",
           ((Membership, "_stay", nothing),), changing),
    Mutant("M11", "the silence of an instance that has joined again is never noticed", "I5",
           ((Membership, "_register", joins_unheard),), changing),
    Mutant("M13", "a late message of a rank that is given up makes the router wait for it", "I12",
           ((Membership, "heard", hears_the_late),)),
    Mutant("M12", "an instance stays though its last request was sent anew elsewhere", "I12",
           ((Router, "_forget", keeps_the_draining),), lambda s: changing(s) and bool(s.kill)),
    Mutant("M14", "a side that loses all that serve does not call back who drains", "I13",
           ((Membership, "_stay", calls_nobody_back),), lambda s: changing(s) and bool(s.kill)),
)  # fmt: skip
"""Whoever joins, drains and leaves."""
