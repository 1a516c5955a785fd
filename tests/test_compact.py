"""Columns read as the lists that they stand for, and cross to another process as those."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from pdsim.kv.messages import Finished
from pdsim.serving.requests import Request, RequestLog, RequestTable
from pdsim.transfer.log import ArrayColumn, plain, rows

REQUESTS = [
    Request(0.0, 5, 2),
    Request(0.5, 1024, 3, 2.5, (7, 8), -1, 1),
    Request(0.5, 600, 1, None, (7, 1 << 40), 0, 0),
    Request(9.0, 4, 4),
]


def test_a_table_equals_the_requests_it_was_made_of():
    table = RequestTable.of(iter(REQUESTS))
    assert table == REQUESTS
    assert list(table) == REQUESTS
    assert [table[number] for number in range(-4, 4)] == REQUESTS * 2
    assert [(first, end) for first in range(4) for end in range(5) if table[first:end] != REQUESTS[first:end]] == []
    assert table[::-1] == REQUESTS[::-1]
    with pytest.raises(IndexError):
        table[4]


@pytest.mark.parametrize("which", [[1, 0, 0, 1], [0, 1, 1, 0], [1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1]])
def test_a_table_is_thinned_as_a_list_is(which: list[int]):
    kept = [request for request, keep in zip(REQUESTS, which, strict=True) if keep]
    assert RequestTable.of(REQUESTS).taken(np.array(which, bool)) == kept


def test_hashes_may_have_more_than_63_bits():
    odd = [*REQUESTS, Request(10.0, 1, 1, None, (1 << 64, 3))]
    assert list(RequestTable.of(odd)) == odd


def test_a_log_reads_as_rows_here_and_in_another_process():
    ended = Finished(1, *map(float, range(8)))
    late = Finished(3, *map(float, range(8)), first=8.0)
    log = RequestLog(4)
    log.put(0, "prefill0", "decode1", 64, "ok", ended)
    log.put(1, "prefill0", "decode0", 0, "PeerLost: gone", None)
    log.put(2, "prefill0", "decode1", 64, "ok", late)
    stamps = [float(number) for number in range(8)]
    found = [
        ["prefill0", "decode1", 64, "ok", *stamps],
        ["prefill0", "decode0", 0, "PeerLost: gone", *[None] * 8],
        ["prefill0", "decode1", 64, "ok", *stamps, 8.0, None],
        ["", "", 0, "", *[None] * 8],
    ]
    assert log == found
    assert msgspec.msgpack.decode(msgspec.msgpack.encode({"rows": log}, enc_hook=plain)) == {"rows": found}
    assert RequestLog.of(found) == log


def test_a_column_is_a_sequence_of_python_values():
    column = ArrayColumn(np.array([1.5, np.nan]))
    assert column == [1.5, None]
    assert column[1] is None
    assert column.known().tolist() == [1.5]
    words = ArrayColumn(np.array([1, 0, 1]), ("a", "b"))
    assert [*rows({"word": words, "other": [1, 2, 3]}, np.array([True, False, True])).values()] == [
        ["b", "b"],
        [1, 3],
    ]
