"""A sweep ends in one file and one table: one row a point, the refused and the failed ones included."""

import io

import pyarrow.parquet as pq
import pytest

from pdsim.core.errors import ConfigError
from pdsim.sweep.collect import LEDGER, Ledger, points, show, table, write

DEFINITIONS = {"bw_gbs": "bytes over time"}


def row(name, rate, status="ok", evidence="assumed", hw="toy", **changes):
    """Return a row of a ledger."""
    about = {"point": name, "folder": name, "status": status, "error": "", "experiment": "transfer", "hw": hw}
    about |= {"backend": "fast", "target": "model", "seed": 7, "gpus": 2, "evidence": evidence}
    return about | {"overrides": {"workload.rate": str(rate), "hw": hw}, "metrics": {"bw_gbs": 2.5}} | changes


def test_a_row_has_the_overrides_seed_and_metrics(tmp_path):
    (kept,) = pq.read_table(write(tmp_path, [row("a1", 2.5)], DEFINITIONS)).to_pylist()
    assert kept == {
        "point": "a1", "folder": "a1", "status": "ok", "error": "", "experiment": "transfer", "hw": "toy",
        "backend": "fast", "target": "model", "seed": 7, "gpus": 2, "evidence": "assumed", "workload.rate": 2.5,
        "bw_gbs": 2.5,
    }  # fmt: skip


def test_the_table_begins_with_the_swept_keys(tmp_path):
    write(tmp_path, [row("a1", 1), row("a2", 2, hw="b", evidence="none")], DEFINITIONS)
    shown = table(tmp_path)
    assert list(shown.columns) == ["hw", "workload.rate", "status", "evidence", "bw_gbs"]
    assert shown.rows == [("toy", 1, "ok", "assumed", 2.5), ("b", 2, "ok", "none", None)]  # no evidence, no number


def test_a_sweep_that_was_killed_has_the_rows_that_it_appended(tmp_path):
    book = Ledger(tmp_path)
    book.append(row("a1", 1), DEFINITIONS)
    with (tmp_path / LEDGER).open("a") as file:
        file.write('{"point": "a2", "sta')
    assert points(tmp_path)["point"].to_pylist() == ["a1"]
    again = Ledger(tmp_path)
    again.append(row("a3", 3), DEFINITIONS)
    assert points(tmp_path)["point"].to_pylist() == ["a1", "a3"]


def test_a_ledger_that_was_changed_is_refused(tmp_path):
    (tmp_path / LEDGER).write_text("{}\n[1]\n")
    with pytest.raises(ConfigError, match=r"points\.jsonl is not what a sweep writes: 'point'; it was changed"):
        points(tmp_path)


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self):
        return True


def test_points_that_cannot_be_run_are_counted_and_shown_on_request(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    nothing = dict.fromkeys(("experiment", "backend", "target", "seed", "gpus", "evidence"))
    refused = [row(f"b{n}", n, "infeasible", error="8 GPUs needed", metrics={}, **nothing) for n in range(3, 6)]
    write(tmp_path, [row("a1", 1), row("a2", 2, metrics={"bw_gbs": 5.0}), *refused], DEFINITIONS)
    screen, pipe, all_of_it = Screen(), io.StringIO(), io.StringIO()
    show(tmp_path, screen)
    show(tmp_path, pipe)
    show(tmp_path, all_of_it, verbose=True)
    for file in screen, pipe:
        lines = file.getvalue().splitlines()
        assert [line.split() for line in lines if " ok " in line] == [["1", "ok", "2.500"], ["2", "ok", "5.000"]]
        assert f"3 more cannot be run (pdsim show -v {tmp_path}), such as: 8 GPUs needed" in lines
        assert "hidden" not in file.getvalue()
    assert all_of_it.getvalue().count("8 GPUs needed") == 3


def test_the_printed_table_has_the_first_metrics(tmp_path):
    rows = [row(f"a{n}", n, metrics={"goodput": 1.0 * n} | {f"m{k}": 1.0 * n for k in range(20)}) for n in (1, 2)]
    write(tmp_path, rows, {})
    pipe = io.StringIO()
    show(tmp_path, pipe)
    assert pipe.getvalue().splitlines()[2].split() == ["rate", "status", "goodput", *(f"m{k}" for k in range(7))]
    assert f"13 more metrics: pdsim show -v {tmp_path}\n" in pipe.getvalue()
