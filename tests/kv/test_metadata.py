"""First-token metadata: where rows lie, which way they go, and whose slot they are stored in."""

from __future__ import annotations

import pytest

from pdsim.core.errors import MessageError
from pdsim.kv.layout import (
    AUX_BYTES,
    AUX_ROWS,
    HostMetadata,
    KvLayout,
    KvShape,
    read_metadata,
    write_metadata,
)
from pdsim.kv.peers import metadata_route
from pdsim.kv.policy import Policy

LAYOUT = KvLayout(KvShape(layers=2, heads=2, head_bytes=16), tp=1, page_size=4, pages=8, slots=3)
ROWS = tuple(bytes([index + 1]) * size for index, size in enumerate(AUX_ROWS))


@pytest.mark.parametrize(
    ("pool", "way", "memory"),
    [("default", "write", "device"), ("nvlink", "control", "host"), ("intra_node_nvlink", "write", "device")],
)
def test_the_pool_decides_by_its_whole_name(pool: str, way: str, memory: str):
    policy = Policy(pool=pool)
    assert (policy.metadata_by, policy.metadata_on) == (way, memory)


def test_rows_in_host_memory_cannot_be_written_by_the_engine():
    with pytest.raises(ValueError, match=r"use policy\.metadata=control"):
        Policy(metadata="write", metadata_memory="host")


def test_rows_that_do_not_pair_are_refused_or_fall_back():
    longer = (*AUX_ROWS, 64)
    assert metadata_route(Policy(), AUX_ROWS, AUX_ROWS) == ("write", "")
    with pytest.raises(MessageError, match=r"10 rows of 1600 B here, 11 of 1664 B there: run one version"):
        metadata_route(Policy(), AUX_ROWS, longer)
    found = metadata_route(Policy(metadata_fallback="control"), AUX_ROWS, longer)
    assert found == ("control", "10 rows of 1600 B here, 11 of 1664 B there")


def test_rows_come_back_as_they_were_stored_beside_those_of_other_slots():
    memory = HostMetadata(LAYOUT)
    write_metadata(memory, LAYOUT, 1, ROWS)
    assert read_metadata(memory, LAYOUT, 1, contents=True) == ROWS
    for slot in (0, 2):
        assert read_metadata(memory, LAYOUT, slot, contents=True) == tuple(bytes(size) for size in AUX_ROWS)


def test_more_and_longer_rows_than_there_are_here_are_cut():
    memory = HostMetadata(LAYOUT)
    write_metadata(memory, LAYOUT, 2, [row + b"more" for row in ROWS] + [b"another"])
    assert read_metadata(memory, LAYOUT, 2, contents=True) == ROWS
    assert read_metadata(memory, LAYOUT, 1, contents=True) == tuple(bytes(size) for size in AUX_ROWS)


def test_memory_without_contents_gives_as_many_bytes():
    assert sum(map(len, read_metadata(HostMetadata(LAYOUT), LAYOUT, 0, contents=False))) == AUX_BYTES


def test_what_lies_outside_the_rows_is_refused():
    memory = HostMetadata(LAYOUT)
    with pytest.raises(IndexError, match="outside the rows"):
        memory.write(LAYOUT.kv_bytes - 1, b"ab")
    with pytest.raises(IndexError, match="outside the rows"):
        memory.read(memory.size - 1, 2)
