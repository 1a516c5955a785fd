"""Sharing against a text-book solver; `benchmarks.sharing` compares with SimGrid."""

import math
import random

import numpy as np
import pytest

from pdsim.core.clock import Clock
from pdsim.sim.network import Network


def simulate(capacity, paths, flows):
    """Return the end of each flow; *paths* are (links, cap), *flows* are (start, path, size) in order of start."""
    clock = Clock()
    network = Network(clock)
    links = [network.link(str(i), c) for i, c in enumerate(capacity)]
    ways = [network.path([links[i] for i in hops], cap) for hops, cap in paths]
    ends = [math.nan] * len(flows)

    def end(flow):
        ends[flow] = clock.now

    def source():
        for number, (start, path, size) in enumerate(flows):
            if start > clock.now:
                yield clock.at(start)
            network.start(ways[path], size, end, number)

    clock.process(source())
    clock.run()
    return np.array(ends)


def fill(capacity, flows):
    """Progressive filling: all rates rise together, and a flow stops where its cap or a full link stops it."""
    left, rates, rising = list(capacity), {}, dict(flows)
    while rising:
        users = [sum(hops.count(link) for hops, _ in rising.values()) for link in range(len(left))]
        shares = [room / n if n else math.inf for room, n in zip(left, users, strict=True)]
        level = min([*shares, *(cap for _, cap in rising.values())])
        reached = level * (1 + 1e-12)
        for flow, (hops, cap) in list(rising.items()):
            if cap <= reached or any(shares[link] <= reached for link in hops):
                rates[flow] = level
                del rising[flow]
                for link in hops:
                    left[link] -= level
    return rates


def text_book(capacity, paths, flows):
    """Solve everything anew at every start and every end."""
    now, arrivals, ends, left = 0.0, list(enumerate(flows)), [math.nan] * len(flows), {}
    while arrivals or left:
        rates = fill(capacity, {flow: paths[flows[flow][1]] for flow in left})
        until_end = min((left[flow] / rate for flow, rate in rates.items()), default=math.inf)
        until_start = arrivals[0][1][0] - now if arrivals else math.inf
        step = min(until_end, until_start)
        now = arrivals[0][1][0] if until_start <= until_end else now + step
        for flow, rate in rates.items():
            left[flow] -= rate * step
            if left[flow] <= 1e-12 * flows[flow][2]:
                ends[flow] = now
                del left[flow]
        while arrivals and arrivals[0][1][0] <= now:
            flow, (_, _, size) = arrivals.pop(0)
            left[flow] = size
    return np.array(ends)


@pytest.mark.parametrize("ties", [False, True], ids=["random", "ties"])
@pytest.mark.parametrize("seed", range(10))
def test_ends_are_those_of_the_text_book(seed, ties):
    """Half of the runs are full of equal capacities, sizes and instants."""
    rng = random.Random(seed)
    draw = (lambda low, high: float(rng.randint(low, high))) if ties else rng.uniform
    capacity = [draw(1, 5) for _ in range(6)]
    paths = [
        (tuple(rng.choices(range(6), k=rng.randint(1, 4))), rng.choice([math.inf, draw(1, 2)])) for _ in range(12)
    ]
    flows = sorted((draw(0, 9), rng.randrange(12), draw(1, 9)) for _ in range(40))
    assert simulate(capacity, paths, flows) == pytest.approx(text_book(capacity, paths, flows), rel=1e-9)
