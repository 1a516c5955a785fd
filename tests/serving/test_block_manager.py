"""The pages of a scheduler: what a request gets, and what it gives back."""

from __future__ import annotations

from pdsim.kv.pages import PagePool, StatePool
from pdsim.serving.block_manager import BlockManager
from tests.kv.test_layout import HYBRID


def test_a_request_without_rows_of_state_gives_its_pages_back():
    blocks = BlockManager(PagePool(8), 4, StatePool(HYBRID.state, 4, slots=1, window_pages=6))
    for room, rows in ((1, True), (2, False)):
        given = blocks.allocate(room, 3)
        assert given is not None
        assert (blocks.allocate_state(room, 10, 10, given[0]) is not None) == rows
    assert blocks.report()["used_pages"] == 3
    blocks.release(1)
    assert blocks.report()["free_pages"] == 8
