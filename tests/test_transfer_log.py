"""Logs and tables keep columns, read as the lists that they stand for, and cross to another process as those."""

from dataclasses import dataclass

import msgspec
import numpy as np
import pytest

from pdsim.kv.messages import Finished
from pdsim.results.schema import transfers_table, transfers_tables
from pdsim.results.store import JournalFile, entries
from pdsim.serving.requests import Request, RequestLog, RequestTable
from pdsim.transfer import TransferRecord
from pdsim.transfer import log as transfer_log
from pdsim.transfer.log import ArrayColumn, Kind, RecordRun, TransferLog, joined, plain, rows, shapes


def record(number: int, **changes: object) -> TransferRecord:
    times = (number + 0.1, number + 0.2, number + 0.3, number + 0.4, number + 0.5)
    return TransferRecord("model:x", "write", "a", "b", 64, 2, *times, label="1/0/sliced")._replace(**changes)


LOST = record(1, status="PeerLost", label="2/0/sliced")
RECORDS = [record(0), LOST, *map(record, range(2, 9)), record(9, source="c")]
SERIES = RecordRun(Kind("model:x", "write", "a", "b", "ok"), "1/0/sliced", 64, 2, 7)


@dataclass(frozen=True)
class Holder:
    transfers: object


@pytest.fixture
def log():
    made = TransferLog(RECORDS[:2])
    times = (np.array([number + tenth / 10 for number in range(2, 9)]) for tenth in range(1, 6))
    made.extend_run(SERIES, times)
    made.append(RECORDS[9])
    return made


def test_a_log_reads_as_and_equals_its_records(log):
    assert list(log) == RECORDS
    assert [log[i] for i in range(-10, 10)] == RECORDS * 2
    assert log[3:5] == RECORDS[3:5]
    assert all(type(value) in (str, int, float) for value in log[4])
    with pytest.raises(IndexError):
        log[10]
    assert log == RECORDS
    assert Holder(log) == Holder(TransferLog(RECORDS))
    assert log != RECORDS[:-1]
    assert log != [*RECORDS[:-1], record(10)]
    assert TransferLog() == []
    both = joined([log, RECORDS[:2], joined([log])])
    assert both == [*RECORDS, *RECORDS[:2], *RECORDS]
    assert [both[i] for i in (0, 11, -1)] == [RECORDS[0], RECORDS[1], RECORDS[9]]
    assert both[9:11] == [RECORDS[9], RECORDS[0]]


@pytest.mark.parametrize("rows", [1, 3, 4, 100])
def test_tables_in_pieces_are_the_table_of_all(log, rows):
    import pyarrow as pa

    pieces = list(transfers_tables(joined([log, RECORDS]), rows))
    assert pa.concat_tables(pieces).combine_chunks().equals(transfers_table([*RECORDS, *RECORDS]))
    assert len(pieces) == -(-20 // rows) or rows in (3, 4)


def test_a_log_in_memory_of_other_names_writes_no_file(tmp_path):
    journal = JournalFile(tmp_path / "transfers.journal")
    log = TransferLog(RECORDS, rank="a", spill=journal).renamed({"a": "d"})
    assert log == [each._replace(source={"a": "d"}.get(each.source, each.source)) for each in RECORDS]
    assert not list(tmp_path.iterdir())


def test_a_log_with_records_elsewhere_reads_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(transfer_log, "KEPT", 3)
    journal = JournalFile(tmp_path / "transfers.journal")
    log = TransferLog(RECORDS, rank="a", spill=journal)
    assert log == RECORDS
    assert [log[number] for number in range(10)] == RECORDS
    assert transfers_table(log) == transfers_table(TransferLog(RECORDS))
    assert shapes(joined([log, log])) == shapes([*RECORDS, *RECORDS])
    kept = TransferLog.by_rank(entries(tmp_path / "transfers.journal"))
    assert kept == {"a": RECORDS[:9]}  # the last are in memory only


def test_a_journal_that_was_cut_short_has_its_whole_entries(tmp_path):
    path = tmp_path / "a.journal"
    journal = JournalFile(path)
    positions = [journal.append(b"one"), journal.append(b"more")]
    assert [*map(journal.read, positions)] == [b"one", b"more"]
    path.write_bytes(path.read_bytes()[:-1])
    assert list(entries(path)) == [b"one"]
    assert not list(entries(tmp_path / "none"))


REQUESTS = [
    Request(0.0, 5, 2),
    Request(0.5, 1024, 3, 2.5, (7, 8), -1, 1),
    Request(0.5, 600, 1, None, (7, 1 << 40), 0, 0),
    Request(9.0, 4, 4, None, (1 << 64, 3)),  # hashes may have more than 63 bits
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
def test_a_table_is_thinned_as_a_list_is(which):
    kept = [request for request, keep in zip(REQUESTS, which, strict=True) if keep]
    assert RequestTable.of(REQUESTS).taken(np.array(which, bool)) == kept


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
    kept = rows({"word": words, "other": [1, 2, 3]}, np.array([True, False, True]))
    assert [*kept.values()] == [["b", "b"], [1, 3]]
