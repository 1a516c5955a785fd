"""The published KV tables are read in the units that they are in: MiB and GiB here, 10^6 and 10^9 bytes there."""

import pytest

from pdsim.core.repository import data
from tools import kv_tables
from tools.kv_tables import H20, H800, calls, configuration, phases, served

TABLES = data("kv_tables")
PAGE = 16


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
