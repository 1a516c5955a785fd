"""Sharing against three independent answers: a linear programme, a text-book solver, and SimGrid's."""

import math
import os
import random
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import linprog

from pdsim.core.clock import Clock
from pdsim.sim.network import Network

ORACLE = Path(os.environ.get("PDSIM_ORACLE", Path(__file__).parents[3] / "shared" / "data" / "oracle"))


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


# --- a linear programme: rates at one instant ----------------------------------------------------------------------


def lexicographic_max_min(capacity, flows):
    """Rates of *flows*, (links, cap): make the lowest rate as high as can be, hold who has enough, and go on."""
    count = len(flows)
    uses = np.array([[hops.count(link) for hops, _ in flows] for link in range(len(capacity))], float)
    rates = np.full(count, math.nan)
    while np.isnan(rates).any():
        rising = np.isnan(rates)
        level = -solve([0.0] * count + [-1.0], uses, capacity, flows, rates, rising, 0.0).fun
        for flow in np.flatnonzero(rising):
            wish = [0.0] * (count + 1)
            wish[flow] = -1.0
            if -solve(wish, uses, capacity, flows, rates, rising, level).fun <= level * (1 + 1e-6):
                rates[flow] = level
        assert not np.isnan(rates[rising]).all()
    return rates


def solve(cost, uses, capacity, flows, rates, rising, floor):
    """Variables: a rate per flow, and the level t below all that rise, t >= *floor*."""
    below = [[-float(i == flow) for i in range(len(flows))] + [1.0] for flow in np.flatnonzero(rising)]
    rows = [[*row, 0.0] for row in uses] + below
    limits = [*capacity, *[0.0] * len(below)]
    bounds = [
        (0.0, None if cap == math.inf else cap) if np.isnan(rate) else (rate * (1 - 1e-12), rate)
        for (_, cap), rate in zip(flows, rates, strict=True)
    ]
    answer = linprog(cost, A_ub=rows, b_ub=limits, bounds=[*bounds, (floor * (1 - 1e-12), None)], method="highs-ds")
    assert answer.success, answer.message
    return answer


@pytest.mark.parametrize("seed", range(60))
def test_rates_are_those_of_a_linear_programme(seed):
    rng = random.Random(seed)
    capacity = [rng.uniform(1.0, 10.0) for _ in range(rng.randint(1, 5))]
    flows = [
        (
            tuple(rng.choices(range(len(capacity)), k=rng.randint(1, 3))),  # a link may stand twice
            rng.uniform(0.2, 4.0) if rng.random() < 0.4 else math.inf,
        )
        for _ in range(rng.randint(1, 7))
    ]
    clock = Clock()
    network = Network(clock)
    links = [network.link(str(i), c) for i, c in enumerate(capacity)]
    paths = [network.path([links[i] for i in hops], cap) for hops, cap in flows]
    for path in rng.sample(paths, len(paths)):
        network.start(path, 1e9, lambda _: None)
    clock.run(until=1.0)
    assert [path.rate for path in paths] == pytest.approx(list(lexicographic_max_min(capacity, flows)), rel=1e-9)


# --- the text-book solver: a whole run, small ----------------------------------------------------------------------


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


# --- SimGrid: thousands of flows on machines of up to 512 GPUs -----------------------------------------------------


@pytest.mark.skipif(not ORACLE.is_dir(), reason=f"no completion times of SimGrid in {ORACLE}; set PDSIM_ORACLE")
@pytest.mark.parametrize(
    "name",
    ["single_98", "nvl_7", "pd8tp1_7", "pd8tp8_7", "pd64tp8_7", "pd64tp1_3", "pd64tp1_7", "pd64tp1os2_45"],
)
def test_ends_are_those_of_simgrid(name):
    with np.load(ORACLE / f"{name}.npz") as key:
        hops = np.split(key["path_links"], np.cumsum(key["path_length"])[:-1])
        flows = list(zip(key["start"].tolist(), key["path"].tolist(), key["size"].tolist(), strict=True))
        ends = simulate(key["link_capacity"].tolist(), [(tuple(path), math.inf) for path in hops], flows)
        assert ends == pytest.approx(key["finish"], rel=1e-8)
