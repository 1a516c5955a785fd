"""The published KV tables are read in the units that they are in: MiB and GiB here, 10^6 and 10^9 bytes there."""

import csv

import pytest

from pdsim.core.repository import data
from tools import kv_tables
from tools.kv_tables import H20, H800, calls, configuration, phases, served

TABLES = data("kv_tables")
PAGE = 16


def rows(name):
    lines = (TABLES / f"{name}.csv").read_text().splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def test_the_h800_table_has_two_planes_a_layer_and_counts_gib_and_one_page_more_than_the_prompt():
    for row in rows("vllm_mooncake_h800_qwen3_8b_tp8"):
        token = 2 * 36 * 8 * 128 * 2  # planes, heads, elements, bytes
        assert int(row["kv_bytes"]) == token * int(row["tokens"])
        moved = token * (int(row["tokens"]) + PAGE)
        assert float(row["reported_gibs"]) == pytest.approx(
            moved / 2**30 / (float(row["transfer_ms"]) * 1e-3), rel=0.03
        )


def test_the_h20_table_keeps_each_of_four_heads_twice_and_counts_decimal_bytes():
    for row in rows("sglang_mooncake_h20_qwen3_235b_tp8"):
        token = 2 * 94 * 8 * 128 * 2  # eight ranks, one head each
        assert int(row["kv_bytes"]) == token * int(row["tokens"])
        moved = float(row["kv_bytes"]) / 1e9
        assert float(row["reported_gbs"]) == pytest.approx(moved / (float(row["transfer_ms"]) * 1e-3), rel=0.01)


@pytest.mark.parametrize(
    ("table", "measured", "longer"), [(H20, phases, 0), (H800, calls, PAGE)], ids=["h20", "h800"]
)
def test_what_is_configured_meets_a_table_that_nothing_was_fitted_to(table, measured, longer, tmp_path):
    name, words = table
    tokens, published = kv_tables.table(name)
    config = configuration(words, [count + longer for count in tokens], tmp_path)
    errors = abs(measured(served(config)) / published - 1.0)
    assert errors.mean() < 0.15
    assert errors.max() < 0.30


def test_the_phase_begins_where_sglang_stamps_its_transfer_after_the_send(tmp_path):
    name, words = H20
    tokens = kv_tables.table(name)[0][:2]
    late, soon = (
        phases(served(configuration((*words, f"engine.prefill.send={send}"), tokens, tmp_path)))
        for send in ("50ms", "0s")
    )
    assert late == pytest.approx(soon, rel=1e-9)
