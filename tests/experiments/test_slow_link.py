"""`experiment=serve` over links that are slow or stalled: requests fail for the reason that there is."""

from __future__ import annotations

import pytest

from experiments.serve import run
from pdsim.config.compose import compose
from pdsim.core.errors import ConfigError
from pdsim.results.record import Result
from pdsim.serving.decode import DecodeScheduler
from pdsim.sim.model import Model

LINK = ("hw=link", "experiment.deadline=2s")
SLOW = "hw.link.rate=300kbps"
"""The twelve requests take 340 s over it; without progress, all fail after 2.7 s."""


def served(*words: str) -> Result:
    config = compose([*LINK, *words])
    return run(config, Model(config.hw, config.backend, seed=config.seed), lambda *_: None)


def statuses(result: Result) -> set[str]:
    return {status.partition(":")[0] for status in result.requests["status"]}


def test_requests_whose_writes_go_on_are_not_stalled() -> None:
    assert statuses(served(SLOW, "backend.timeout=10min")) == {"ok"}


def test_a_write_that_takes_too_long_fails_by_the_deadline_of_the_engine() -> None:
    assert statuses(served(SLOW)) == {"ok", "TransferTimeout"}


def test_requests_that_get_nowhere_are_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DecodeScheduler, "_submit", lambda *_: None)
    assert statuses(served()) == {"Stalled"}


@pytest.mark.parametrize("kind", ["kind: stall", "kind: cut", "kind: slow, share: 0.01"])
def test_a_link_that_is_changed_to_the_end_has_a_utilisation(kind: str) -> None:
    result = served(
        "hw.link.rate=5Mbps", f"hw.link.changes=[{{{kind}, start: 1s, end: 1000s}}]", "backend.timeout=3s"
    )
    assert result.outcome is not None
    assert result.outcome.seconds < 1000
    assert 0 < result.outcome.links["link0.up"] < 1
    assert "TransferTimeout" in statuses(result)


def test_changes_of_a_hop_that_overlap_are_refused() -> None:
    changes = "hw.link.changes=[{kind: stall, start: 1s, end: 3s}, {kind: cut, start: 2s, end: 4s}]"
    with pytest.raises(ConfigError, match="one of hop 0 begins at 2 s, before the one of 1 s ends at 3 s"):
        compose([*LINK, changes])
