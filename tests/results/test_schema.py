"""Columns of the Parquet files, the configuration as written, and percentiles."""

from dataclasses import replace
from io import BytesIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pdsim.config import as_written, canonical, config_yaml, load
from pdsim.config.compose import compose
from pdsim.core.errors import ConfigError
from pdsim.results import schema
from pdsim.results.record import distribution, mean, needed, percentile
from pdsim.results.schema import arrow_array, requests_table, requests_tables, transfers_table
from pdsim.sweep.points import name_of
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


def test_transfers_and_requests_keep_rows_and_nulls():
    ok, failed = transfers_table([record(), record(status="PeerLost")]).to_pylist()
    stages = {name: ok[f"{name}_us"] for name in ("prep", "post", "tx", "poll", "latency")}
    assert stages == pytest.approx({"prep": 1, "post": 2, "tx": 10, "poll": 4, "latency": 13})
    assert (failed["status"], failed["bw_gbs"]) == ("PeerLost", None)
    table = requests_table({"id": [0, 1], "ttft": [0.5, None], "status": ["ok", "PeerLost"]})
    assert table.select(["id", "ttft", "status", "e2e"]).to_pylist() == [
        {"id": 0, "ttft": 0.5, "status": "ok", "e2e": None},
        {"id": 1, "ttft": None, "status": "PeerLost", "e2e": None},
    ]


@pytest.mark.parametrize("table", [transfers_table([]), transfers_table([record()]), requests_table({})])
def test_every_column_has_a_unit_and_a_definition(table):
    assert all({b"unit", b"definition"} <= set(field.metadata) for field in table.schema)
    assert all(field.metadata[b"definition"] for field in table.schema)
    assert table.schema.metadata[b"pdsim.schema"] == str(schema.VERSION).encode()


def test_tables_of_some_rows_together_are_the_table():
    columns = {"id": ArrayColumn(np.arange(5)), "ttft": [0.5, None, 1.5, 2.5, 3.5], "status": ["ok"] * 5}
    pieces = list(requests_tables(columns, rows=2))
    assert [piece.num_rows for piece in pieces] == [2, 2, 1]
    assert pa.concat_tables(pieces).to_pylist() == requests_table(columns).to_pylist()


@pytest.mark.parametrize(("rows", "codec"), [(10, "LZ4"), (20_000, "ZSTD")])
def test_a_file_packs_seconds_by_place_and_the_rest_by_dictionary(rows, codec):
    table = requests_table({"id": list(range(rows)), "arrival": [one / 7 for one in range(rows)]})
    file = BytesIO()
    pq.write_table(table, file, **schema.packing(table))
    group = pq.ParquetFile(file).metadata.row_group(0)
    columns = {group.column(number).path_in_schema: group.column(number) for number in range(2)}
    assert {column.compression for column in columns.values()} == {codec}
    assert "BYTE_STREAM_SPLIT" in columns["arrival"].encodings
    assert "RLE_DICTIONARY" in columns["id"].encodings
    assert pq.read_table(file).equals(table, check_metadata=True)


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


SMOKE = ["workload=smoke"]
WORDS = (SMOKE, ["hw=2xh200", "backend=nixl"], [*SMOKE, "kv.staging=true"], SMOKE)


def test_what_was_written_before_leaves_no_trace(monkeypatch):
    configs = [compose(words) for words in WORDS]
    together = [(config_yaml(config), canonical(config), name_of(config)) for config in configs]
    assert together[0] == together[3] != together[2]
    equal = replace(configs[0], cache=replace(configs[0].cache, host=0), seed=0)
    assert config_yaml(equal) != together[0][0]  # 0 and 0.0 are equal, and written as they are
    for config, texts in zip(configs, together, strict=True):
        monkeypatch.setattr("pdsim.config._written", {})
        assert (config_yaml(config), canonical(config), name_of(config)) == texts


def test_a_value_of_another_type_is_typed_anew():
    values = as_written(compose(WORDS[0]))
    load(values)  # has kv.staging=False, which equals 0
    with pytest.raises(ConfigError, match=r"kv\.staging must be true or false, got 0"):
        load({**values, "kv": {**values["kv"], "staging": 0}})


@pytest.mark.parametrize(("q", "samples"), [(0, 1), (50, 1), (90, 10), (99, 100), (99.9, 1000)])
def test_a_percentile_needs_one_sample_beyond_it(q, samples):
    assert needed(q) == samples
    assert percentile([1.0] * samples, q) == 1.0
    assert percentile([1.0] * (samples - 1), q) is None


@pytest.mark.parametrize("q", [-1, 100, 101])
def test_a_percentile_outside_its_range_is_refused(q):
    with pytest.raises(ValueError, match=rf"q\(={q}\) must be >= 0 and < 100"):
        percentile([1.0], q)


def test_a_distribution_says_what_each_number_is_and_lacks():
    metrics = {each.name: each for each in distribution("ttft", "s", range(101), "time to the first token")}
    assert [each.value for each in metrics.values()] == [50.0, 50.0, 90.0, 99.0, None]
    assert list(metrics) == ["ttft_avg_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "ttft_p99_9_s"]
    assert metrics["ttft_p99_9_s"].definition == "p99.9 of: time to the first token; needs 1000 samples, has 101"
    assert mean([]) is None
