"""The columns of the Parquet files: derived as nixlbench defines them, each with its type, unit and definition."""

import numpy as np
import pyarrow as pa
import pytest

from pdsim.results import schema
from pdsim.results.schema import arrow_array, requests_table, requests_tables, transfers_table
from pdsim.transfer.log import ArrayColumn
from tests.support.configs import record


@pytest.mark.parametrize(
    ("kind", "values", "rows"),
    [
        ("float64", [1.5, None, 2, float("inf")], [1.5, None, 2.0, float("inf")]),
        ("float64", ArrayColumn(np.array([0.1, np.nan])), [0.1, None]),
        ("float64", np.arange(6.0)[::2], [0.0, 2.0, 4.0]),
        ("int64", [1, None, -(2**62)], [1, None, -(2**62)]),
        ("int64", ArrayColumn(np.array([3.0, np.nan])), [3, None]),
        ("int64", np.array([3, 4], dtype=np.int32), [3, 4]),
        ("string", ["a", None, "", "ü€"], ["a", None, "", "ü€"]),
        ("string", ArrayColumn(np.array([1, 0, 1]), ["ok", None]), [None, "ok", None]),
        ("string", [], []),
    ],
)
def test_an_array_has_the_values_and_nulls(kind, values, rows):
    array = arrow_array(values, pa.type_for_alias(kind))
    array.validate(full=True)
    assert (str(array.type).replace("double", "float64"), array.to_pylist()) == (kind, rows)


@pytest.mark.parametrize(("kind", "values"), [("float64", ["x"]), ("string", [1]), ("int64", [2**80])])
def test_what_a_type_does_not_hold_is_refused(kind, values):
    with pytest.raises((ValueError, OverflowError)):
        arrow_array(values, pa.type_for_alias(kind))


def test_stages_add_up_and_a_failed_transfer_has_no_bandwidth():
    ok, failed = transfers_table([record(), record(status="PeerLost")]).to_pylist()
    stages = {name: ok[f"{name}_us"] for name in ("prep", "post", "tx", "poll", "latency")}
    assert stages == pytest.approx({"prep": 1, "post": 2, "tx": 10, "poll": 4, "latency": 13})
    assert (failed["status"], failed["bw_gbs"]) == ("PeerLost", None)


@pytest.mark.parametrize("table", [transfers_table([]), transfers_table([record()]), requests_table({})])
def test_every_column_has_a_unit_and_a_definition(table):
    assert all({b"unit", b"definition"} <= set(field.metadata) for field in table.schema)
    assert all(field.metadata[b"definition"] for field in table.schema)
    assert table.schema.metadata[b"pdsim.schema"] == str(schema.VERSION).encode()


def test_requests_keep_their_rows_and_what_is_left_out_is_null():
    table = requests_table({"id": [0, 1], "ttft": [0.5, None], "status": ["ok", "PeerLost"]})
    assert table.select(["id", "ttft", "status", "e2e"]).to_pylist() == [
        {"id": 0, "ttft": 0.5, "status": "ok", "e2e": None},
        {"id": 1, "ttft": None, "status": "PeerLost", "e2e": None},
    ]


def test_tables_of_some_rows_together_are_the_table():
    columns = {"id": ArrayColumn(np.arange(5)), "ttft": [0.5, None, 1.5, 2.5, 3.5], "status": ["ok"] * 5}
    pieces = list(requests_tables(columns, rows=2))
    assert [piece.num_rows for piece in pieces] == [2, 2, 1]
    assert pa.concat_tables(pieces).to_pylist() == requests_table(columns).to_pylist()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"mood": ["good"]}, "requests has columns mood without type, unit and definition"),
        ({"id": [0, 1], "ttft": [0.5]}, "columns of different lengths"),
        ({"id": ["first"]}, "requests column id does not hold int64"),
    ],
)
def test_wrong_columns_of_requests_are_refused(columns, message):
    with pytest.raises(ValueError, match=message):
        requests_table(columns)
