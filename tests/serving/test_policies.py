"""Scheduling and router policies: those that come with pdsim, and one that a package of somebody else brings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from experiments.serve import ServeOptions, job, specs
from pdsim.core.errors import ConfigError
from pdsim.serving import prefill
from pdsim.serving.policies import FirstCome, LeastGenerated, LeastTokens, RoundRobin
from pdsim.serving.seams import Prompt, Running, handoff_of, router_policy, scheduler_of
from pdsim.serving.settings import ServingEngine
from pdsim.serving.workload import Request
from pdsim.sim.model import Model
from tests.support.serving import configured

SCHEDULER = '''
from pdsim.serving.policies import FirstCome


class ShortestFirst(FirstCome):
    """The request with the fewest tokens left of its prompt, if no longer than `longest`."""

    def __init__(self, longest):
        self.longest = longest

    def prefill(self, queue, budget):
        left = [prompt.request.input - prompt.done for prompt in queue]
        index = min(range(len(queue)), key=lambda i: (left[i] > self.longest, left[i]))
        return index, min(budget, left[index])
'''
ENTRY_POINTS = """
[pdsim.schedulers]
shortest_first = their_scheduler:ShortestFirst
"""
ENGINE = """
# An engine with a scheduler of somebody else
name: theirs
scheduler: shortest_first
scheduler_options:
  longest: 100000
source:
  others: "assumed: nothing of its host is known"
"""


def test_the_last_that_came_is_preempted_or_the_one_that_loses_least():
    running = [Running(1, 100, 7), Running(2, 50, 3), Running(3, 80, 3), Running(4, 10, 9)]
    assert FirstCome().victim(running) == 3
    assert LeastGenerated().victim(running) == 2  # of two with three tokens, the longer prompt


def test_a_router_takes_the_least_loaded_or_one_after_the_other():
    assert LeastTokens().choose(["a", "b", "c"], {"a": 3, "b": 1, "c": 1}) == "b"
    turns = RoundRobin()
    assert [turns.choose(["a", "b"], {}) for _ in range(3)] == ["a", "b", "a"]


@pytest.mark.parametrize("find", [scheduler_of, handoff_of])
def test_a_name_that_no_package_provides_is_refused_with_those_there_are(find):
    with pytest.raises(ConfigError, match=r"'nobodys'.*(fcfs|pull)"):
        find(ServingEngine(scheduler="nobodys", handoff="nobodys"))
    with pytest.raises(ConfigError, match="least_tokens"):
        router_policy("nobodys")


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """Return a folder with a package that is installed there, and a folder ``conf`` with its engine."""
    (tmp_path / "their_scheduler.py").write_text(SCHEDULER)
    about = tmp_path / "their_scheduler-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: their-scheduler\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    (tmp_path / "conf" / "engine").mkdir(parents=True)
    (tmp_path / "conf" / "engine" / "theirs.yaml").write_text(ENGINE)
    return tmp_path


def started(theirs: Path, engine: str) -> list[int]:
    """Serve a long, a middle and a short prompt that come while one is computed.

    Return them in order of their TTFT.
    """
    trace = theirs / "trace.jsonl"
    lengths = [8000, 6000, 4000, 100]
    lines = [{"timestamp": number, "input_length": n, "output_length": 2} for number, n in enumerate(lengths)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = [f"engine={engine}", f"workload.trace={trace}", "scheduler.prefill_batch=1", f"output={theirs / 'out'}"]
    command = [sys.executable, "-m", "pdsim", "run", "--config-dir", str(theirs / "conf"), *words, "--json"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(theirs), *sys.path])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100)
    assert done.returncode == 0, done.stderr
    import pyarrow.parquet as parquet

    (folder,) = (theirs / "out").glob("serve-*")
    table = parquet.read_table(folder / "requests.parquet").to_pydict()
    ends = [arrival + ttft for arrival, ttft in zip(table["arrival"], table["ttft"], strict=True)]
    return sorted(range(len(ends)), key=ends.__getitem__)


def test_a_scheduler_from_outside_is_one_class_and_one_file(theirs: Path):
    assert started(theirs, "theirs") == [0, 3, 2, 1]


def test_without_it_the_first_that_came_is_served_first(theirs: Path):
    assert started(theirs, "generic") == [0, 1, 2, 3]


class Greedy(FirstCome):
    def prefill(self, queue: Sequence[Prompt], budget: int) -> tuple[int, int]:
        return 0, budget + 1


def test_a_policy_that_exceeds_the_step_ends_the_rank_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prefill, "scheduler_of", lambda engine: Greedy())
    config = configured(options={"deadline": 0.5})
    what = job(config, ServeOptions(deadline=0.5))
    outcome = Model(config.hw, config.backend, limit=5.0).run(specs(config, what, [Request(0.0, 600, 2)]))
    assert "engine.scheduler=fcfs gave 257 tokens of room 1, which has 600 left in a step of 256" in (
        outcome.ranks["prefill0.0"].error
    )
