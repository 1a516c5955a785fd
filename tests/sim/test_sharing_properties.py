"""What holds for every network, whatever happens in it.

Half of the networks are full of ties: few capacities, sizes and instants, so that much happens at once.
"""

import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdsim.core.clock import Clock
from pdsim.sim.network import Network
from tests.sim.test_sharing import load, rate

SLACK = 1e-9
END = 10.0  # by then all that was going to happen has happened, and dead links are mended
check = settings(derandomize=True, max_examples=100)


@dataclass(frozen=True)
class Scenario:
    """Capacities; paths as (links, cap); what happens as (time, verb, subject, amount)."""

    capacity: tuple[float, ...]
    paths: tuple[tuple[tuple[int, ...], float], ...]
    events: tuple[tuple[float, str, int, float], ...]


class Run:
    """A scenario played on a network, stopping after each instant."""

    def __init__(self, scenario):
        self.clock = Clock()
        self.network = Network(self.clock)
        self.links = [self.network.link(f"link {i}", capacity) for i, capacity in enumerate(scenario.capacity)]
        self.paths = [self.network.path([self.links[i] for i in hops], cap) for hops, cap in scenario.paths]
        self.flows = []
        self.ends = {}
        self.left = {}  # of aborted flows
        for at, verb, subject, amount in scenario.events:
            self.clock.at(at, (verb, subject, amount)).callbacks.append(self.happen)

    def happen(self, event):
        verb, subject, amount = event.value
        if verb == "start":
            path = self.paths[subject % len(self.paths)]
            self.flows.append(self.network.start(path, amount, self.end, len(self.flows)))
        elif verb == "abort" and self.flows:
            number = subject % len(self.flows)
            left = self.network.abort(self.flows[number])
            if number not in self.ends:
                self.left.setdefault(number, left)
        elif verb == "resize":
            self.network.set_capacity(self.links[subject % len(self.links)], amount)
        elif verb == "kill":
            self.network.set_capacity(self.links[subject % len(self.links)], 0.0)

    def end(self, number):
        assert number not in self.ends
        assert number not in self.left
        self.ends[number] = self.clock.now

    def instants(self):
        """Yield the time after each instant at which anything happens."""
        while self.clock.peek() < math.inf:
            self.clock.step()
            if self.clock.peek() > self.clock.now:
                yield self.clock.now

    def finish(self):
        for _ in self.instants():
            pass
        return self


def scenarios(changes=True):
    return st.one_of(
        networks(st.sampled_from([1.0, 2.0, 3.0, 4.0, 8.0]), st.sampled_from([0.0, 1.0, 2.0, 3.0]), changes),
        networks(st.floats(0.1, 10.0), st.floats(0.0, 5.0), changes),
    )


@st.composite
def networks(draw, amounts, times, changes):
    count = draw(st.integers(1, 6))
    hops = st.lists(st.integers(0, count - 1), min_size=1, max_size=4).map(tuple)
    verbs = ["start"] * 6 + ["abort", "resize", "kill"] * changes
    happenings = st.tuples(times, st.sampled_from(verbs), st.integers(0, 30), amounts)
    events = draw(st.lists(happenings, min_size=1, max_size=20))
    if changes:
        events += [(END, "resize", i, draw(amounts)) for i in range(count)]
    return Scenario(
        tuple(draw(amounts) for _ in range(count)),
        tuple(draw(st.lists(st.tuples(hops, st.one_of(st.just(math.inf), amounts)), min_size=1, max_size=8))),
        tuple(sorted(events, key=lambda event: event[0])),
    )


def bottleneck(path):
    """Whether the flows of *path* cannot have more: a cap, or a full link where nobody is faster."""
    if rate(path) >= path.cap * (1 - SLACK):
        return True
    return any(
        load(link) >= link.capacity * (1 - SLACK)
        and all(rate(path) >= rate(other) * (1 - SLACK) for other in link._paths if other.flows)
        for link in path.links
    )


@check
@given(scenarios())
def test_no_link_carries_more_than_it_can_and_every_flow_has_a_bottleneck(scenario):
    run = Run(scenario)
    for _ in run.instants():
        for link in run.links:
            assert load(link) <= link.capacity * (1 + SLACK)
        for path in run.paths:
            assert rate(path) <= path.cap * (1 + SLACK)
            assert not path.flows or bottleneck(path)


@check
@given(scenarios())
def test_the_bytes_that_enter_leave_or_are_reported_as_left(scenario):
    run = Run(scenario)
    before, rates, carried = 0.0, [0.0] * len(run.links), [0.0] * len(run.links)
    for now in run.instants():
        carried = [bytes_ + each * (now - before) for bytes_, each in zip(carried, rates, strict=True)]
        before, rates = now, [load(link) for link in run.links]
    assert [link.carried for link in run.links] == pytest.approx(carried, rel=SLACK, abs=SLACK)
    for path in dict.fromkeys(run.paths):
        sent = sum(flow.size - run.left.get(n, 0.0) for n, flow in enumerate(run.flows) if flow.path is path)
        assert path.carried == pytest.approx(sent, rel=SLACK, abs=SLACK)
    assert sorted([*run.ends, *run.left]) == list(range(len(run.flows)))


@check
@given(scenarios(changes=False))
def test_every_flow_ends_and_then_nothing_is_left_behind(scenario):
    run = Run(scenario).finish()
    assert sorted(run.ends) == list(range(len(run.flows)))
    assert all(load(link) == 0.0 and link.free == link.capacity and not link.active for link in run.links)
    for path in dict.fromkeys(run.paths):
        assert path.carried == pytest.approx(sum(flow.size for flow in run.flows if flow.path is path), rel=1e-12)


@check
@given(scenarios())
def test_paths_that_come_later_find_the_rates_they_would_have_found_earlier(scenario):
    """Which links can limit is found out path by path; the order in which paths appear must not matter."""

    class Lazy(Run):
        def happen(self, event):
            verb, subject, _ = event.value
            if verb == "start":
                number = subject % len(scenario.paths)
                hops, cap = scenario.paths[number]
                self.paths[number] = self.network.path([self.links[i] for i in hops], cap)
            super().happen(event)

    lazy = Lazy.__new__(Lazy)
    Run.__init__(lazy, replace(scenario, paths=()))
    lazy.paths = [None] * len(scenario.paths)
    eager = Run(scenario).finish()
    assert lazy.finish().ends == pytest.approx(eager.ends, rel=SLACK)
