"""Jitter: delays that one seed repeats, that break convoys, and that are nothing unless they are asked for."""

from pdsim.core.clock import Clock
from pdsim.hardware.costs import Jitter
from pdsim.sim.faults import Draws
from pdsim.sim.network import Network
from pdsim.sim.posting import CopyEngine, PostingThread, SendQueue
from pdsim.sim.topology import Route
from tests.support.machines import cost


def crossing(draws=None, rounds=20):
    """Return the completions of two sources that post to the same two sinks in the same order."""
    clock = Clock()
    network = Network(clock)
    model = cost(call=0.0, descriptor=0.0, latency=0.0, in_order=True)
    log = []
    ports = {name: network.link(name, 100.0) for name in "abcd"}
    for source in "ab":
        poster, copier = PostingThread(), CopyEngine(clock, None, draws)
        lanes = []
        for sink in "cd":
            way, back = Route((ports[source], ports[sink]), 0.0), Route((ports[sink], ports[source]), 0.0)
            lanes.append(SendQueue(network, poster, model, way, back, source + sink, copier, draws))
        for _ in range(rounds):
            for lane in lanes:
                lane.post(100, 1, False, lambda posting: log.append((clock.now, posting.tag)), lane.name)
    clock.run()
    return log


def test_clockwork_keeps_a_convoy_for_ever():
    assert crossing()[-1][0] == 80.0  # 40 transfers of a second from each source, at half the rate


def test_copy_engines_that_jitter_drift_out_of_it():
    assert crossing(Draws(Jitter(copies=0.3), 3))[-1][0] < 70.0


def test_one_seed_gives_one_run_and_another_another():
    jitter = Jitter(starts=0.01, copies=0.01)
    assert crossing(Draws(jitter, 3)) == crossing(Draws(jitter, 3))
    assert crossing(Draws(jitter, 3)) != crossing(Draws(jitter, 4))


def test_delays_lie_between_nothing_and_what_is_set():
    draws = Draws(Jitter(starts=2.0), 0)
    found = [draws.start() for _ in range(1000)]
    assert 0.0 <= min(found) < 0.1
    assert 1.9 < max(found) < 2.0
    assert draws.copy() == 0.0
