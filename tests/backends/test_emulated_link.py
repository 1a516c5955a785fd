"""A real link: ranks in namespaces of their own, all they say over it, and nothing of it left behind."""

import os
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from backends.emulation.guest import engines, machine, mori
from backends.emulation.link.emulated_link import DEVICE, Lateness, joined, missing_requirements
from backends.jobs.launcher import Processes
from pdsim.core.errors import BackendUnavailable, TransferError
from pdsim.hardware.machine import LinkChange, NetworkLink
from pdsim.transfer.job import Place
from tests.backends import programs
from tests.support.engines import spec

LACKS = missing_requirements()
needs_link = pytest.mark.skipif(bool(LACKS), reason=f"needs network namespaces: {LACKS}")

LINK = NetworkLink(rate=1e8, delay=1e-3)


def at(node, name, program, **arguments):
    return replace(spec(name, program, **arguments), place=Place(node))


@pytest.fixture
def run():
    def run(engine, *ranks, link=LINK):
        if engine.name == "nixl_shm":
            pytest.skip("memory is shared within a node only")
        run.target = Processes(engine, deadline=60, device_capacity=1 << 24, link=link, nodes=3)
        return run.target.run(ranks).ranks

    return run


def writing(count, one=0, other=1):
    return at(one, "a", programs.write_many, to="b", count=count), at(other, "b", programs.be_written, by="a")


@needs_link
def test_every_rank_is_in_its_nodes_namespace_with_its_device(mooncake, run):
    where = {"a": 0, "b": 1, "c": 1}
    ranks = [at(node, name, programs.tell_network, others=[*where.keys() - {name}]) for name, node in where.items()]
    told = {name: rank.value for name, rank in run(mooncake, *ranks).items()}
    inside = {name: namespace for name, (namespace, _, _) in told.items()}
    assert inside["b"] == inside["c"] != inside["a"]
    assert str(Path("/proc/self/ns/net").readlink()) not in inside.values()
    for name, (_, uri, devices) in told.items():
        assert uri.startswith(f"tcp://10.78.0.{where[name] + 1}:")
        assert devices == [DEVICE, "lo"]


@needs_link
@pytest.mark.slow
@pytest.mark.parametrize("ends", [(0, 1), (2, 0)], ids=["one hop", "two hops back"])
def test_transfers_between_nodes_arrive_whole(any_engine, run, ends):
    ranks = run(any_engine, *writing(10, *ends))
    assert (ranks["a"].error, ranks["b"].error, len(ranks["a"].transfers)) == ("", "", 10)
    assert "tcp" in ranks["a"].engine
    (late,) = run.target.lateness
    assert late.packets > 10
    assert late.late <= late.packets
    assert run.target.notes == ([late.complaint] if late.complaint else [])


@needs_link
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cut", "stall"])
def test_what_is_under_way_survives_a_cut_and_a_stall(mooncake, run, kind):
    link = replace(LINK, changes=(LinkChange(kind=kind, start=0.02, end=0.3),))
    writer = run(mooncake, *writing(200), link=link)["a"]
    assert (writer.error, len(writer.transfers)) == ("", 200)
    assert max(record.seen for record in writer.transfers) > 0.3


@needs_link
def test_a_rank_that_dies_is_proven_quiesced_on_another_node(mooncake, run):
    """Other connections between the same nodes, whose ends are alive, are not taken for its."""
    ranks = [at(0, "a", programs.write_and_die, to="b"), at(1, "b", programs.outlive, writer="a", beside="c")]
    survivor = run(mooncake, *ranks, at(0, "c", programs.stay, by="b"))["b"]
    assert (survivor.error, survivor.value) == ("", "proven")


def test_more_than_one_late_packet_in_hundred_is_a_complaint():
    assert Lateness(1000, 10, 0.02).complaint == ""
    assert Lateness(1000, 11, 0.02).complaint.startswith("the link was late: 1.1% of 1000 packets by more than 1 ms")


@needs_link
def test_a_packet_forwarder_that_has_died_is_an_error():
    with joined(LINK, 2) as network:
        children = psutil.Process().children()
        (forwarder,) = [child for child in children if "packet_forwarder.py" in " ".join(child.cmdline())]
        forwarder.kill()
        with pytest.raises(TransferError, match="the packet forwarder ended with exit code -9"):
            network.lateness()


@needs_link
def test_nothing_is_left_when_a_rank_or_the_forwarder_fails(mooncake, monkeypatch):
    def state():  # what a link could leave: children, descriptors, this thread in another namespace
        me = psutil.Process()
        return set(me.children(recursive=True)), me.num_fds(), Path("/proc/thread-self/ns/net").readlink()

    before = state()
    ranks = [at(0, "a", programs.say_and_die, code=1), at(1, "b", programs.sleep, seconds=600)]
    Processes(mooncake, deadline=1.5, link=LINK, nodes=2).run(ranks)
    assert state() == before
    monkeypatch.setattr("backends.emulation.link.emulated_link.FORWARDER", Path("/nowhere.py"))
    with pytest.raises(BackendUnavailable, match="packet forwarder did not start: exit code 2"), joined(LINK, 2):
        pass
    assert state() == before


@needs_link
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


def test_everything_that_the_guest_needs_is_named_at_once(monkeypatch, tmp_path):
    for name in ("PATH", "HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(machine, "PROVIDER", "no-such-library.so")
    monkeypatch.setattr(mori, "_candidates", lambda: iter(()))
    said = engines.missing_requirements("mori")
    assert "apt-get install -y --no-install-recommends qemu-system-x86 util-linux iproute2 ibverbs-providers" in said
    assert [word for word in ("gcc", "binutils", "Python 3.12") if word not in said] == []
    with pytest.raises(BackendUnavailable, match=r"apt-get install .* qemu-system-x86"), machine.boot():
        pass
    assert not list(tmp_path.iterdir())
    others = "backend=mooncake, mori, mori_inline, nixl; for backend=nixl_shm use hw=loopback"
    assert others in engines.missing_requirements("nixl_shm")
