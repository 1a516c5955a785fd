"""What sharing does, in models small enough to work out by hand, and what holds for every network."""

import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.sharing import any_to_any_cost
from pdsim.core.clock import Clock
from pdsim.sim.network import Network


def rate(path):
    """Bytes/s of each flow of *path*, after all events of this instant; 0 if there is none."""
    return max(path.limit.level, 0.0) if path.flows else 0.0


def load(link):
    """Bytes/s that flow over *link*, after all events of this instant."""
    return sum(times * path.flows * rate(path) for path, times in link._paths.items())


class Bench:
    """Links by name; `done` has (time, tag) of all flows that have ended, `flows` all by tag."""

    def __init__(self, **capacities):
        self.clock = Clock()
        self.network = Network(self.clock)
        self.links = {name: self.network.link(name, capacity) for name, capacity in capacities.items()}
        self.done, self.flows = [], {}

    def path(self, names, cap=math.inf):
        return self.network.path([self.links[name] for name in names.split()], cap)

    def start(self, names, size, tag, at=0.0, cap=math.inf):
        path = self.path(names, cap)

        def begin(*_):
            self.flows[tag] = self.network.start(path, size, lambda t: self.done.append((self.clock.now, t)), tag)

        self.at(at, begin) if at > self.clock.now else begin()
        return path

    def at(self, when, function, *args):
        self.clock.at(when).callbacks.append(lambda _: function(*args))

    def abort(self, tag):
        return self.network.abort(self.flows[tag])

    def run(self, until=None):
        self.clock.run(until)
        return self.done


@pytest.mark.parametrize(
    ("links", "flows", "expected"),
    [
        # two share a link, and the last speeds up
        ({"p": 100.0}, [("p", 100.0, "a"), ("p", 200.0, "b")], [(2.0, "a"), (3.0, "b")]),
        ({}, [("", 6.0, "a", 0.0, 3.0), ("", 3.0, "b", 0.0, 3.0)], [(1.0, "b"), (2.0, "a")]),  # a cap alone
        ({"m": 10.0}, [("m m", 10.0, "copy")], [(2.0, "copy")]),  # it carries every byte twice
        # those that end together are reported in the order of their starts
        ({"x": 1.0, "y": 1.0}, [("y", 2.0, "a"), ("x", 2.0, "b")], [(2.0, "a"), (2.0, "b")]),
        ({"p": 0.0}, [("p", 0.0, "a", 1.0)], [(1.0, "a")]),  # no bytes end at once even on a dead link
        ({}, [("", 5.0, "a")], [(0.0, "a")]),  # neither link nor cap takes time
        # an idle link limits a new path
        ({"m": 15.0, "x": 10.0, "y": 10.0}, [("m x", 17.5, "a"), ("m y", 17.5, "b", 1.0)], [(2.0, "a"), (3.0, "b")]),
    ],
)  # fmt: skip
def test_flows_end_at(links, flows, expected):
    bench = Bench(**links)
    for flow in flows:
        bench.start(*flow)
    assert bench.run() == [(pytest.approx(at, rel=1e-15), tag) for at, tag in expected]


P, Q = {"port": 10.0}, {"port": 1.0}
TWO = [("port", 100.0, "a"), ("port", 100.0, "b")]


@pytest.mark.parametrize(
    ("links", "flows", "actions", "expected", "left"),
    [
        (P, TWO, [(2.0, "abort", "a")], [(11.0, "b")], [90.0]),  # it frees the link
        (P, [("port", 10.0, "a"), TWO[1]], [(2.0, "abort", "a")], [(11.0, "b")], [0.0]),  # not reported at its end
        (P, [("port", 5.0, "a"), TWO[1]], [(3.0, "abort", "a")], [(1.0, "a"), (10.5, "b")], [0.0]),  # it is over
        # an abort leaves the end of another that is due now
        ({"port": 2.0}, [("port", 1.0, "a"), ("port", 2.0, "b")], [(1.0, "abort", "b"), (1.0, "port", 0.0)],
         [(1.0, "a")], [1.0]),
        # a dead link stalls its flows until it is back
        ({"port": 1.0, "other": 1.0}, [("port", 2.0, "a"), ("port other", 1.0, "b"), ("other", 3.0, "c")],
         [(1.0, "port", 0.0), (5.0, "port", 1.0)], [(3.5, "c"), (6.0, "b"), (7.0, "a")], []),
        # an idle link limits when the others grow
        ({"memory": 20.0, "port": 10.0}, [("memory port", 50.0, "a")], [(1.0, "port", 100.0)], [(3.0, "a")], []),
        # a new capacity reaches a path whose flow is replaced
        (Q, [("port", 10.0, "a"), ("port", 2.0, "b", 1.0)], [(1.0, "abort", "a"), (1.0, "port", 2.0)],
         [(2.0, "b")], [9.0]),
    ],
)  # fmt: skip
def test_aborts_and_capacities_change_ends(links, flows, actions, expected, left):
    bench, found = Bench(**links), []
    for flow in flows:
        bench.start(*flow)
    for at, name, what in actions:
        if name == "abort":
            bench.at(at, lambda tag: found.append(bench.abort(tag)), what)
        else:
            bench.at(at, bench.network.set_capacity, bench.links[name], what)
    assert bench.run() == expected
    assert found == left


def test_what_flows_cannot_use_others_get_along_chains():
    # The parking lot: b is held to 1 by its second link, so a has the other 9.
    bench = Bench(shared=10.0, narrow=1.0)
    paths = bench.start("shared", 9.0, "a"), bench.start("shared narrow", 1.0, "b")
    bench.run(until=0.5)
    assert [rate(path) for path in paths] == [9.0, 1.0]
    assert [load(link) for link in bench.links.values()] == [10.0, 1.0]
    assert bench.run() == [(1.0, "a"), (1.0, "b")]
    # a's end frees the first link for b, which takes from c, which leaves more for d.
    bench = Bench(x=2.0, y=6.0, z=9.0)
    bench.start("x", 1.0, "a")
    paths = [bench.start(names, 100.0, tag) for names, tag in (("x y", "b"), ("y z", "c"), ("z", "d"))]
    for until, rates in ((0.5, [1.0, 4.5, 4.5]), (1.5, [2.0, 4.0, 5.0])):
        bench.run(until)
        assert [rate(path) for path in paths] == rates


def test_the_end_comes_after_all_else_of_its_instant():
    bench = Bench(port=1.0)
    bench.start("port", 1.0, "flow")
    bench.at(0.5, bench.at, 1.0, bench.done.append, "timeout")  # scheduled after the end is
    assert bench.run() == ["timeout", (1.0, "flow")]


def test_the_end_may_start_the_next_flow_or_abort_another():
    bench = Bench(port=1.0)
    path, ends = bench.path("port"), []

    def again(left):
        ends.append(bench.clock.now)
        if left:
            bench.network.start(path, 1.0, again, left - 1)

    bench.network.start(path, 1.0, again, 2)
    bench.run()
    assert ends == [1.0, 2.0, 3.0]
    bench.network.start(path, 1.0, lambda _: ends.append(bench.network.abort(twin)))
    twin = bench.network.start(path, 1.0, lambda _: ends.append("reported"))
    bench.run()
    assert ends[3:] == [0.0]


def test_what_a_link_has_carried_is_exact_at_any_time():
    bench, seen = Bench(port=10.0, narrow=1.0), []
    bench.start("port", 9.0, "a")
    bench.start("port narrow", 2.0, "b")
    for at in (0.5, 1.0, 1.5, 9.0):
        bench.at(at, lambda: seen.append(tuple(link.carried for link in bench.links.values())))
    bench.run()
    assert seen == [(5.0, 0.5), (10.0, 1.0), (10.5, 1.5), (11.0, 2.0)]


@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_nonsense_is_refused(value):
    bench, foreign = Bench(port=1.0), Bench(a=1.0, foreign=1.0)
    with pytest.raises(ValueError, match=r"capacity\(=.*\) must be >= 0 and finite"):
        bench.network.link("port", value)
    with pytest.raises(ValueError, match=r"capacity\(=.*\) must be >= 0 and finite"):
        bench.network.set_capacity(bench.links["port"], value)
    with pytest.raises(ValueError, match=r"size\(=.*\) must be >= 0 and finite"):
        bench.start("port", value, "a")
    with pytest.raises(ValueError, match=r"cap\(=.*\) must be > 0"):
        bench.path("", value if value < 0 or math.isnan(value) else 0.0)
    with pytest.raises(ValueError, match="must be of this network, <Link 'foreign' 1 bytes/s> is not"):
        bench.network.path([foreign.links["foreign"]])


# Each of the following once went wrong in a fluid model, by rounding.
def test_a_rest_of_capacity_below_zero_does_not_loop():
    """Sums of many rates leave -1e-17 of a full link, of which a new flow must not get a share."""
    bench = Bench(port=0.25)
    for tag in "abcd":
        bench.start("port", 0.0625, tag, cap=0.0625)
    bench.run(until=0.5)
    bench.links["port"].free = -1e-17
    bench.start("port", 0.025, "late")
    assert [tag for _, tag in bench.run()] == ["late", "a", "b", "c", "d"]
    assert bench.done[0][0] == 1.0


def test_ends_that_moved_do_not_pile_up():
    """Each time that a link speeds up, its next end moves forward; the list of ends must forget the old ones."""
    bench, lengths = Bench(port=1.0), []
    port = bench.links["port"]
    bench.start("port", 1e6, "a")

    def speed_up(left):
        lengths.append(len(bench.network._ends))
        bench.network.set_capacity(port, port.capacity + 1e-3)
        if left:
            bench.at(bench.clock.now + 0.1, speed_up, left - 1)

    speed_up(5000)
    bench.run(until=501.0)
    assert len(lengths) == 5001
    assert max(lengths) < 500


def test_flows_ending_within_rounding_cost_one_event():
    """0.1 + 0.2 is not 0.3, and the difference must not cost an event and a flow of 4e-17 bytes."""
    bench = Bench(port=3.0)
    bench.start("port", 0.3, "a")
    bench.start("port", 0.2, "b", at=0.1 / 3.0)
    bench.run()
    assert [tag for _, tag in bench.done] == ["a", "b"]
    assert bench.done[0][0] == bench.done[1][0]


def test_a_busy_path_keeps_its_digits():
    """Beside 1e16 bytes of service a byte is lost in rounding; the counter starts anew often enough."""
    bench, ends = Bench(port=2e16), []
    path = bench.start("port", 1e17, "a")

    def again(left):
        ends.append(bench.clock.now)
        if left == 2000:
            bench.network.set_capacity(bench.links["port"], 2.0)
        if left:
            bench.network.start(path, 1e13 if left > 2000 else 1.0, again, left - 1)

    again(4000)
    bench.run(until=3000.0)
    assert len(ends) == 4001
    assert ends[-1] - ends[-501] == pytest.approx(500.0, rel=1e-9)


@pytest.mark.parametrize(
    ("links", "flows", "work"),
    [
        ({"p": 1.0}, [("p", 1.0, i, 2.0 * i + 1.0) for i in range(10)], (20, 10, 20)),  # one after the other
        (  # eight at one instant that meet are solved once, and at their end
            {"switch": 4.0, **{f"rail{i}": 1.0 for i in range(8)}},
            [(f"rail{i} switch", 1.0, i, 1.0) for i in range(8)],
            (2, 8, 2),
        ),
        # one more on one of fifty links touches nobody else
        ({f"p{i}": 1.0 for i in range(50)}, [*((f"p{i}", 2, i) for i in range(50)), ("p0", 9, 50, 1)], (5, 52, 5)),
    ],
)
def test_flows_cost_events_paths_and_solutions(links, flows, work):
    bench = Bench(**links)
    for flow in flows:
        bench.start(*flow)
    bench.run()
    network = bench.network
    assert (network.events, network.touched, network.solves) == work
    assert all(link.service == 0.0 for link in bench.links.values())  # counted from zero again


def test_links_that_cannot_limit_are_not_looked_at():
    """Eight ports fill their switch exactly, so only the ports count."""
    numbers = range(9)
    bench = Bench(leaf=400.0, **{f"port{i}": 50.0 for i in numbers}, **{f"memory{i}": 3350.0 for i in numbers})
    paths = [bench.path(f"memory{i} port{i} leaf") for i in range(8)]
    assert [path.live for path in paths] == [(bench.links[f"port{i}"],) for i in range(8)]
    ninth = bench.path("port8 leaf")
    assert all(path.live[-1] is bench.links["leaf"] for path in (*paths, ninth))


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.3, 0.5])
def test_a_flow_costs_nearly_as_little_on_512_gpus(load):
    small, large = (any_to_any_cost(nodes, load, flows_per_gpu=10) for nodes in (1, 64))
    assert large.touched < 3.0 * small.touched
    assert large.events <= small.events


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
    full = [link for link in path.links if load(link) >= link.capacity * (1 - SLACK)]
    others = [[other for other in link._paths if other.flows] for link in full]
    return any(all(rate(path) >= rate(other) * (1 - SLACK) for other in each) for each in others)


@check
@given(scenarios())
def test_no_link_is_exceeded_and_flows_have_bottlenecks(scenario):
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
def test_later_paths_find_the_same_rates(scenario):
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
