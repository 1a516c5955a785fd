"""A real link: ranks in namespaces of their own, all they say over it, and nothing of it left behind."""

import os
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from backends.emulation.link.emulated_link import Lateness, joined, missing_requirements
from backends.emulation.link.namespaces import DEVICE
from backends.jobs.launcher import Processes
from pdsim.core.errors import BackendUnavailable, TransferError
from pdsim.hardware.machine import LinkChange, NetworkLink
from pdsim.transfer.job import Place
from tests.backends import programs
from tests.support.engines import spec

pytestmark = pytest.mark.skipif(
    bool(missing_requirements()), reason=f"needs network namespaces: {missing_requirements()}"
)

LINK = NetworkLink(rate=1e8, delay=1e-3)


def at(node, name, program, **arguments):
    return replace(spec(name, program, **arguments), place=Place(node))


def run(engine, *ranks, nodes=2, link=LINK):
    outcome = Processes(engine, deadline=60, device_capacity=1 << 24, link=link, nodes=nodes).run(ranks)
    assert not [result.error for result in outcome.ranks.values() if result.error]
    return outcome


def state():
    """Return what a link could leave: children, descriptors, this thread in another namespace."""
    me = psutil.Process()
    return set(me.children(recursive=True)), me.num_fds(), Path("/proc/thread-self/ns/net").readlink()


def test_every_rank_is_in_its_nodes_namespace_with_its_device(mooncake):
    names = ["a", "b", "c"]
    where = {"a": 0, "b": 1, "c": 1}
    ranks = [
        at(where[name], name, programs.tell_network, others=[one for one in names if one != name]) for name in names
    ]
    found = {name: rank.value for name, rank in run(mooncake, *ranks).ranks.items()}
    inside = {name: value[0] for name, value in found.items()}
    assert inside["b"] == inside["c"] != inside["a"]
    assert str(Path("/proc/self/ns/net").readlink()) not in inside.values()
    for name, (_, uri, devices) in found.items():
        assert uri.startswith(f"tcp://10.78.0.{where[name] + 1}:")
        assert devices == [DEVICE, "lo"]


@pytest.mark.slow
@pytest.mark.parametrize("ends", [(0, 1), (2, 0)], ids=["one hop", "two hops back"])
def test_transfers_between_nodes_arrive_whole(any_engine, ends):
    if any_engine.name == "nixl_shm":
        pytest.skip("memory is shared within a node only")
    one, other = ends
    ranks = at(one, "a", programs.write_many, to="b", count=10), at(other, "b", programs.be_written, by="a")
    outcome = run(any_engine, *ranks, nodes=3)
    assert len(outcome.ranks["a"].transfers) == 10
    assert "tcp" in outcome.ranks["a"].engine


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cut", "stall"])
def test_what_is_under_way_survives_a_cut_and_a_stall(mooncake, kind):
    link = replace(LINK, changes=(LinkChange(kind=kind, start=0.02, end=0.3),))
    ranks = at(0, "a", programs.write_many, to="b", count=200), at(1, "b", programs.be_written, by="a")
    records = run(mooncake, *ranks, link=link).ranks["a"].transfers
    assert len(records) == 200
    assert max(record.seen for record in records) > 0.3


def test_a_rank_that_dies_is_proven_quiesced_on_another_node(any_engine):
    """Other connections between the same nodes, whose ends are alive, are not taken for its."""
    if any_engine.name == "nixl_shm":
        pytest.skip("memory is shared within a node only")
    ranks = [at(0, "a", programs.write_and_die, to="b"), at(1, "b", programs.outlive, writer="a", beside="c")]
    target = Processes(any_engine, deadline=60, device_capacity=1 << 24, link=LINK, nodes=2)
    outcome = target.run([*ranks, at(0, "c", programs.stay, by="b")])
    assert (outcome.ranks["b"].error, outcome.ranks["b"].value) == ("", "proven")


def test_a_link_says_how_many_packets_it_passed_on_too_late(mooncake):
    target = Processes(mooncake, deadline=60, device_capacity=1 << 24, link=LINK, nodes=2)
    ranks = at(0, "a", programs.write_many, to="b", count=10), at(1, "b", programs.be_written, by="a")
    target.run(ranks)
    (found,) = target.lateness
    assert found.packets > 10
    assert found.late <= found.packets
    assert target.notes == ([found.complaint] if found.complaint else [])


def test_more_than_one_late_packet_in_a_hundred_is_a_complaint():
    assert Lateness(1000, 10, 0.02).complaint == ""
    assert Lateness(1000, 11, 0.02).complaint.startswith(
        "the link was late: 1.1% of 1000 packets by more than 1 ms, 20.0 ms at most"
    )


def test_a_packet_forwarder_that_has_died_is_an_error():
    with joined(LINK, 2) as network:
        children = psutil.Process().children()
        (forwarder,) = [child for child in children if "packet_forwarder.py" in " ".join(child.cmdline())]
        forwarder.kill()
        with pytest.raises(TransferError, match="the packet forwarder ended with exit code -9"):
            network.lateness()


def test_nothing_is_left_when_a_rank_fails(mooncake):
    before = state()
    ranks = [at(0, "a", programs.say_and_die, code=1), at(1, "b", programs.sleep, seconds=600)]
    Processes(mooncake, deadline=1.5, link=LINK, nodes=2).run(ranks)
    assert state() == before


def test_nothing_is_left_when_the_packet_forwarder_cannot_be_made(monkeypatch):
    before = state()
    monkeypatch.setattr("backends.emulation.link.emulated_link.FORWARDER", Path("/nowhere.py"))
    with pytest.raises(BackendUnavailable, match="packet forwarder did not start: exit code 2"), joined(LINK, 2):
        pass
    assert state() == before


def test_who_may_not_make_namespaces_is_told_what_it_takes():
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.setuid(65534)
        os.write(writer, missing_requirements().encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader) as said:
        assert "run as root with /dev/net/tun, or use hw=loopback" in said.read()
