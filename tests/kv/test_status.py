"""The end of a handoff is the end: neither failure nor success is ever taken back."""

from __future__ import annotations

from itertools import product

import pytest

from pdsim.kv.rooms import Status, advance


@pytest.mark.parametrize(("old", "new"), list(product(Status, Status)))
def test_no_status_goes_back(old: Status, new: Status):
    found = advance(old, new)
    if old in (Status.FAILED, Status.SUCCESS):
        assert found is old
    elif new is Status.FAILED:
        assert found is Status.FAILED
    else:
        assert found is max(old, new)


def test_a_group_is_as_far_as_its_last_rank_and_failed_if_one_is():
    assert min([Status.SUCCESS, Status.TRANSFERRING]) is Status.TRANSFERRING
    assert min([Status.SUCCESS, Status.FAILED, Status.WAITING]) is Status.FAILED
