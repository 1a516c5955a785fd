"""The rate of a point is that of its transfers: neither pauses of a program nor ranks that begin apart count."""

from experiments.validate.values import values
from pdsim.results.record import Result
from pdsim.transfer import TransferRecord


def transfer(source, target, submitted, seen, operation="write"):
    return TransferRecord("mine", operation, source, target, 1000, 1, *(submitted,) * 3, seen, seen, label="point")


def rate(*records):
    found = values("transfer", Result(summary=(), transfers=records))
    (found,) = [value.value for value in found if value.quantity == "rate"]
    return found


def flow(source, target, times, **what):
    return [transfer(source, target, *time, **what) for time in times]


def test_without_pauses_it_is_the_bytes_of_each_flow_over_its_time():
    assert rate(*flow("a", "b", [(0.0, 1.0), (1.0, 2.0)]), *flow("b", "a", [(0.0, 4.0)])) == 1000.0 + 250.0


def test_that_ranks_begin_apart_changes_nothing():
    together = rate(*flow("a", "b", [(0.0, 1.0)]), *flow("b", "a", [(0.0, 2.0)]))
    assert rate(*flow("a", "b", [(0.0, 1.0)]), *flow("b", "a", [(7.0, 9.0)])) == together


def test_pauses_between_transfers_do_not_count():
    assert rate(*flow("a", "b", [(0.0, 1.0), (1.5, 2.5)]), *flow("b", "a", [(0.0, 1.0)])) == 2000.0


def test_transfers_that_are_under_way_together_share_their_time():
    assert rate(*flow("a", "b", [(0.0, 2.0), (1.0, 3.0), (1.5, 2.0)]), *flow("b", "a", [(0.0, 1.0)])) == 2000.0


def test_a_flow_that_waits_for_another_of_its_initiator_is_not_paused():
    # of the schedules "rounds" and "serial": a's second transfer to b begins when that to c has ended
    to_b, to_c = flow("a", "b", [(0.0, 1.0), (3.0, 4.0)]), flow("a", "c", [(1.0, 3.0)])
    assert rate(*to_b, *to_c) == 500.0 + 500.0


def test_the_initiator_of_a_read_is_the_sink():
    # b reads from a; what a reads meanwhile fills no pause of b
    reads = flow("a", "b", [(0.0, 1.0), (2.0, 3.0)], operation="read")
    other = flow("b", "a", [(0.0, 4.0)], operation="read")
    assert rate(*reads, *other) == 1000.0 + 250.0
