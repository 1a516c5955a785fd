# SPDX-License-Identifier: Apache-2.0
"""Where a request's handoff stands, on either side."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["Status", "advance"]


class Status(IntEnum):
    """The states of a handoff, in order; the minimum over the ranks of a group is the status of the group.

    ::

        BOOTSTRAPPING -> WAITING -> TRANSFERRING -> SUCCESS
              |             |            |
              +-------------+------------+--------> FAILED

    SUCCESS and FAILED absorb (`advance`); invariant I1 of `docs/faults.md` checks that.
    """

    FAILED = 0
    BOOTSTRAPPING = 1  # the other side has not been heard of
    WAITING = 2  # for input: pages are known, no bytes have moved
    TRANSFERRING = 3
    SUCCESS = 4


for (
    _member
) in Status:  # a look-up on the class goes through a descriptor until Python 3.12, which takes ten times as long
    type.__setattr__(Status, _member.name, _member)


def advance(old: Status, new: Status) -> Status:
    """Return the status after *old* when *new* is reported.

    FAILED and SUCCESS absorb; otherwise FAILED wins and nothing goes back.  (A plain maximum would not do: FAILED is
    the smallest, so that a failed handoff could become a success.)

    >>> advance(Status.TRANSFERRING, Status.WAITING).name, advance(Status.FAILED, Status.SUCCESS).name
    ('TRANSFERRING', 'FAILED')
    """
    failed = Status.FAILED
    if old is failed or old is Status.SUCCESS:
        return old
    return new if new is failed or new > old else old
