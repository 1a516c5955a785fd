"""The columns of the Parquet files: derived as nixlbench defines them, each with its unit and definition."""

import pytest

from pdsim.results import schema
from pdsim.results.schema import requests_table, transfers_table
from tests.support.configs import record


def test_stages_add_up_to_the_latency():
    row = transfers_table([record()]).to_pylist()[0]
    stages = {name: row[f"{name}_us"] for name in ("prep", "post", "tx", "poll", "latency")}
    assert stages == pytest.approx({"prep": 1, "post": 2, "tx": 10, "poll": 4, "latency": 13})


def test_a_failed_transfer_is_a_row_without_a_bandwidth():
    row = transfers_table([record(), record(status="PeerLost")]).to_pylist()[1]
    assert (row["status"], row["bw_gbs"]) == ("PeerLost", None)


@pytest.mark.parametrize("table", [transfers_table([]), transfers_table([record()]), requests_table({})])
def test_every_column_has_a_unit_and_a_definition_even_without_rows(table):
    assert all({b"unit", b"definition"} <= set(field.metadata) for field in table.schema)
    assert all(field.metadata[b"definition"] for field in table.schema)
    assert table.schema.metadata[b"pdsim.schema"] == str(schema.VERSION).encode()


def test_a_column_without_a_definition_is_refused():
    with pytest.raises(ValueError, match="requests has columns mood without type, unit and definition"):
        requests_table({"mood": ["good"]})


def test_requests_keep_their_rows_and_what_is_left_out_is_null():
    table = requests_table({"id": [0, 1], "ttft": [0.5, None], "status": ["ok", "PeerLost"]})
    assert table.select(["id", "ttft", "status", "e2e"]).to_pylist() == [
        {"id": 0, "ttft": 0.5, "status": "ok", "e2e": None},
        {"id": 1, "ttft": None, "status": "PeerLost", "e2e": None},
    ]


def test_columns_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="columns of different lengths"):
        requests_table({"id": [0, 1], "ttft": [0.5]})


def test_a_value_of_another_type_is_refused():
    with pytest.raises(ValueError, match="requests column id does not hold int64"):
        requests_table({"id": ["first"]})
