"""What sharing does, in models small enough to work out by hand."""

import math

import pytest

from benchmarks.sharing import any_to_any_cost
from pdsim.core.clock import Clock
from pdsim.sim.network import Network


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def network(clock):
    return Network(clock)


@pytest.fixture
def done(clock):
    """The flows that have ended, as (time, tag)."""
    return []


@pytest.fixture
def start(clock, network, done):
    """Start a flow over links: start(links, size, tag, at=0.0, cap=math.inf)."""

    def start(links, size, tag, at=0.0, cap=math.inf):
        path = network.path(links, cap)

        def begin(_=None):
            flows[tag] = network.start(path, size, lambda tag: done.append((clock.now, tag)), tag)

        if at > clock.now:
            clock.at(at).callbacks.append(begin)
        else:
            begin()
        return path

    flows = start.flows = {}
    return start


def later(clock, at, function, *args):
    clock.at(at).callbacks.append(lambda _: function(*args))


class TestRates:
    def test_two_flows_share_a_link_and_the_last_speeds_up(self, clock, network, start, done):
        port = network.link("port", 100.0)
        start([port], 100.0, "a")
        start([port], 200.0, "b")
        clock.run()
        assert done == [(2.0, "a"), (3.0, "b")]

    def test_what_one_flow_cannot_use_another_gets(self, clock, network, start, done):
        """The parking lot: b is held to 1 by its second link, so a has the other 9."""
        shared, narrow = network.link("shared", 10.0), network.link("narrow", 1.0)
        start([shared], 9.0, "a")
        start([shared, narrow], 1.0, "b")
        clock.run(until=0.5)
        assert (network.path([shared]).rate, network.path([shared, narrow]).rate) == (9.0, 1.0)
        assert (shared.load, narrow.load) == (10.0, 1.0)
        clock.run()
        assert done == [(1.0, "a"), (1.0, "b")]

    def test_a_cap_alone_is_a_path_too(self, clock, network, start, done):
        start([], 6.0, "a", cap=3.0)
        start([], 3.0, "b", cap=3.0)
        clock.run()
        assert done == [(1.0, "b"), (2.0, "a")]

    def test_a_link_that_stands_twice_carries_every_byte_twice(self, clock, network, start, done):
        memory = network.link("memory", 10.0)
        start([memory, memory], 10.0, "copy")
        clock.run()
        assert done == [(2.0, "copy")]
        assert memory.carried == 20.0

    def test_a_chain_of_bottlenecks_is_followed_to_its_end(self, clock, network, start, done):
        """a's end frees the first link for b, which takes from c, which leaves more for d."""
        first, second, third = (network.link(name, cap) for name, cap in (("1", 2.0), ("2", 6.0), ("3", 9.0)))
        start([first], 1.0, "a")
        start([first, second], 100.0, "b")
        start([second, third], 100.0, "c")
        start([third], 100.0, "d")
        clock.run(until=0.5)
        assert [network.path(p).rate for p in ([first, second], [second, third], [third])] == [1.0, 4.5, 4.5]
        clock.run(until=1.5)
        assert [network.path(p).rate for p in ([first, second], [second, third], [third])] == [2.0, 4.0, 5.0]


class TestEnds:
    def test_flows_that_end_together_are_reported_in_start_order(self, clock, network, start, done):
        links = [network.link(str(i), 1.0) for i in range(3)]
        for link, tag in zip(reversed(links), "abc", strict=True):
            start([link], 2.0, tag)
        clock.run()
        assert done == [(2.0, "a"), (2.0, "b"), (2.0, "c")]

    def test_the_end_comes_after_all_else_of_its_instant(self, clock, network, start):
        log = []
        network.start(network.path([network.link("port", 1.0)]), 1.0, log.append, "flow")
        later(clock, 0.5, later, clock, 1.0, log.append, "timeout")  # scheduled after the end is
        clock.run()
        assert log == ["timeout", "flow"]

    def test_no_bytes_end_at_once_even_on_a_dead_link(self, clock, network, start, done):
        start([network.link("dead", 0.0)], 0.0, "a", at=1.0)
        assert done == []
        clock.run()
        assert done == [(1.0, "a")]

    def test_a_path_without_links_takes_no_time(self, clock, network, start, done):
        path = start([], 5.0, "a")
        assert done == []
        clock.run()
        assert done == [(0.0, "a")]
        assert path.carried == 5.0

    def test_done_may_start_the_next_flow(self, clock, network, done):
        path = network.path([network.link("port", 1.0)])

        def again(left):
            done.append(clock.now)
            if left:
                network.start(path, 1.0, again, left - 1)

        network.start(path, 1.0, again, 2)
        clock.run()
        assert done == [1.0, 2.0, 3.0]

    def test_done_may_abort_a_flow_that_ends_at_the_same_instant(self, clock, network):
        path, log = network.path([network.link("port", 2.0)]), []
        network.start(path, 1.0, lambda _: log.append(network.abort(twin)))
        twin = network.start(path, 1.0, lambda _: log.append("reported"))
        clock.run()
        assert log == [0.0]


class TestAbort:
    def test_it_tells_what_was_left_and_frees_the_link(self, clock, network, start, done):
        port = network.link("port", 10.0)
        start([port], 100.0, "a")
        path = start([port], 100.0, "b")
        later(clock, 2.0, lambda: done.append(network.abort(start.flows["a"])))
        clock.run()
        assert done == [90.0, (11.0, "b")]
        assert path.carried == port.carried == 110.0

    def test_of_a_flow_that_is_over_it_returns_nothing_left(self, clock, network, start):
        start([network.link("port", 1.0)], 1.0, "a")
        start([network.link("port", 1.0)], 1.0, "b")
        network.abort(start.flows["b"])
        clock.run()
        assert network.abort(start.flows["a"]) == 0.0
        assert network.abort(start.flows["b"]) == 0.0

    def test_a_flow_is_not_reported_at_its_ending_instant(self, clock, network, start, done):
        port = network.link("port", 2.0)
        start([port], 1.0, "a")
        start([port], 2.0, "b")
        later(clock, 1.0, lambda: network.abort(start.flows["a"]))
        clock.run()
        assert done == [(1.5, "b")]

    def test_it_leaves_the_end_of_another_that_is_due_now(self, clock, network, start, done):
        port = network.link("port", 2.0)
        start([port], 1.0, "a")
        start([port], 2.0, "b")
        later(clock, 1.0, lambda: (network.abort(start.flows["b"]), network.set_capacity(port, 0.0)))
        clock.run()
        assert done == [(1.0, "a")]


class TestCapacity:
    def test_a_dead_link_stalls_its_flows_until_it_is_back(self, clock, network, start, done):
        port, other = network.link("port", 1.0), network.link("other", 1.0)
        start([port], 2.0, "a")
        start([port, other], 1.0, "b")
        start([other], 3.0, "c")
        later(clock, 1.0, network.set_capacity, port, 0.0)
        later(clock, 5.0, network.set_capacity, port, 1.0)
        clock.run()
        assert done == [(3.5, "c"), (6.0, "b"), (7.0, "a")]

    def test_it_reaches_a_path_whose_flow_was_just_replaced(self, clock, network, start, done):
        port = network.link("port", 1.0)
        start([port], 10.0, "a")

        def replace():
            network.abort(start.flows["a"])
            network.set_capacity(port, 2.0)
            start([port], 2.0, "b")

        later(clock, 1.0, replace)
        clock.run()
        assert done == [(2.0, "b")]

    def test_an_idle_link_limits_when_the_others_grow(self, clock, network, start, done):
        memory, port = network.link("memory", 20.0), network.link("port", 10.0)
        start([memory, port], 50.0, "a")
        later(clock, 1.0, network.set_capacity, port, 100.0)
        clock.run()
        assert done == [(3.0, "a")]

    def test_an_idle_link_limits_a_new_path(self, clock, network, start, done):
        memory, one, two = network.link("memory", 15.0), network.link("one", 10.0), network.link("two", 10.0)
        start([memory, one], 17.5, "a")
        start([memory, two], 17.5, "b", at=1.0)
        clock.run()
        assert done == [(2.0, "a"), (pytest.approx(2.0 + 10.0 / 10.0), "b")]


class TestAccounts:
    def test_what_a_link_has_carried_is_exact_at_any_time(self, clock, network, start):
        port, narrow = network.link("port", 10.0), network.link("narrow", 1.0)
        start([port], 9.0, "a")
        start([port, narrow], 2.0, "b")
        seen = []
        for at in (0.5, 1.0, 1.5):
            later(clock, at, lambda: seen.append((port.carried, narrow.carried)))
        clock.run()
        assert seen == [(5.0, 0.5), (10.0, 1.0), (10.5, 1.5)]
        assert (port.carried, narrow.carried) == (11.0, 2.0)


class TestArguments:
    def test_equal_arguments_give_the_same_path(self, network):
        a, b = network.link("a", 1.0), network.link("b", 1.0)
        assert network.path([a, b]) is network.path((a, b))
        assert network.path([a, b]) is not network.path([a, b], 1.0)
        assert network.path([a, a]) is not network.path([a])

    @pytest.mark.parametrize("capacity", [-1.0, math.inf, math.nan])
    def test_a_capacity_is_finite_and_not_negative(self, network, capacity):
        with pytest.raises(ValueError, match=r"capacity\(=.*\) must be >= 0 and finite"):
            network.link("port", capacity)
        with pytest.raises(ValueError, match=r"capacity\(=.*\) must be >= 0 and finite"):
            network.set_capacity(network.link("port", 1.0), capacity)

    @pytest.mark.parametrize("size", [-1.0, math.inf, math.nan])
    def test_a_size_is_finite_and_not_negative(self, network, size):
        with pytest.raises(ValueError, match=r"size\(=.*\) must be >= 0 and finite"):
            network.start(network.path([network.link("port", 1.0)]), size, print)

    @pytest.mark.parametrize("cap", [0.0, -1.0, math.nan])
    def test_a_cap_is_positive(self, network, cap):
        with pytest.raises(ValueError, match=r"cap\(=.*\) must be > 0"):
            network.path([], cap)

    def test_a_link_of_another_network_is_refused(self, network):
        network.path([network.link("mine", 1.0)])
        foreign = Network(Clock()).link("foreign", 1.0)
        with pytest.raises(ValueError, match="must be of this network, <Link 'foreign' 1 bytes/s> is not"):
            network.path([foreign])


class TestRounding:
    """Each of these once went wrong in a fluid model: see `pdsim.sim.links`."""

    def test_a_rest_of_capacity_below_zero_does_not_loop(self, clock, network, start, done):
        """Sums of many rates leave -1e-17 of a full link, of which a new flow must not get a share."""
        port = network.link("port", 0.25)
        for tag in "abcd":
            start([port], 0.0625, tag, cap=0.0625)
        clock.run(until=0.5)
        port.free = -1e-17
        start([port], 0.025, "late")
        clock.run()
        assert done[0] == (1.0, "late")
        assert [tag for _, tag in done[1:]] == ["a", "b", "c", "d"]

    def test_ends_that_moved_do_not_pile_up(self, clock, network):
        """Each time that a link speeds up, its next end moves forward; the list of ends must forget the old ones."""
        port = network.link("port", 1.0)
        network.start(network.path([port]), 1e6, lambda _: None)
        lengths = []

        def speed_up(left):
            lengths.append(len(network._ends))
            network.set_capacity(port, port.capacity + 1e-3)
            if left:
                later(clock, clock.now + 0.1, speed_up, left - 1)

        speed_up(5000)
        clock.run(until=501.0)
        assert len(lengths) == 5001
        assert max(lengths) < 500

    def test_flows_that_end_together_but_for_rounding_end_in_one_event(self, clock, network, start, done):
        """0.1 + 0.2 is not 0.3, and the difference must not cost an event and a flow of 4e-17 bytes."""
        path = start([network.link("port", 3.0)], 0.3, "a")
        start(path.links, 0.2, "b", at=0.1 / 3.0)
        clock.run()
        assert [tag for _, tag in done] == ["a", "b"]
        assert done[0][0] == done[1][0]

    def test_a_busy_path_keeps_its_digits(self, clock, network):
        """Beside 1e16 bytes of service a byte is lost in rounding; the counter starts anew often enough."""
        port = network.link("port", 2e16)
        path = network.path([port])
        network.start(path, 1e17, lambda _: None)
        ends = []

        def again(left):
            ends.append(clock.now)
            if left == 2000:
                network.set_capacity(port, 2.0)
            if left:
                network.start(path, 1e13 if left > 2000 else 1.0, again, left - 1)

        again(4000)
        clock.run(until=3000.0)
        assert len(ends) == 4001
        assert ends[-1] - ends[-501] == pytest.approx(500.0, rel=1e-9)

    def test_a_link_that_empties_counts_its_service_from_zero(self, clock, network):
        port = network.link("port", 1e9)
        network.start(network.path([port]), 1e15, lambda _: None)
        clock.run()
        assert port.service == 0.0


class TestWork:
    """Seconds depend on the machine, events and paths touched do not."""

    def test_flows_one_after_the_other_cost_an_event_each(self, clock, network, start, done):
        port = network.link("port", 1.0)
        for i in range(10):
            start([port], 1.0, i, at=2.0 * i + 1.0)
        clock.run()
        assert (network.events, network.solver.touched, network.solver.solves) == (10, 10, 0)

    def test_flows_of_one_instant_that_meet_are_solved_once(self, clock, network, start, done):
        switch = network.link("switch", 4.0)
        for i in range(8):
            start([network.link(f"rail {i}", 1.0), switch], 1.0, i, at=1.0)
        clock.run()
        assert (len(done), network.events, network.solver.solves) == (8, 3, 2)

    def test_a_flow_elsewhere_touches_nobody(self, clock, network, start):
        ports = [network.link(str(i), 1.0) for i in range(100)]
        for i, port in enumerate(ports):
            start([port], 100.0, i)
        clock.run(until=1.0)
        before = network.solver.touched
        start([ports[0]], 1.0, "new")
        clock.run(until=2.0)
        assert network.solver.touched - before == 1

    def test_a_flow_replaced_by_another_of_its_path_needs_no_solving(self, clock, network):
        path = network.path([network.link("port", 1.0)])

        def again(left):
            if left:
                network.start(path, 1.0, again, left - 1)

        again(100)
        clock.run()
        assert network.solver.solves == 0

    def test_links_that_cannot_limit_are_not_looked_at(self, network):
        """Eight ports fill their switch exactly, so only the ports count."""
        up = network.link("leaf", 400.0)
        ports = [network.link(f"port {i}", 50.0) for i in range(8)]
        memory = [network.link(f"memory {i}", 3350.0) for i in range(8)]
        paths = [network.path([m, p, up]) for m, p in zip(memory, ports, strict=True)]
        assert [path.live for path in paths] == [(port,) for port in ports]
        ninth = network.path([network.link("port 8", 50.0), up])
        assert ninth.live[-1] is up
        assert all(path.live[-1] is up for path in paths)

    @pytest.mark.slow
    @pytest.mark.parametrize("load", [0.3, 0.5])
    def test_a_flow_costs_nearly_as_little_on_512_gpus(self, load):
        small, large = (any_to_any_cost(nodes, load, flows_per_gpu=10) for nodes in (1, 64))
        assert large.touched < 3.0 * small.touched
        assert large.events <= small.events
