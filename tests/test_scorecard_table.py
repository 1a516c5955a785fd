"""``python -m tools.scorecard`` keeps the errors of a run beside those of AISimulate, and prints their table."""

from __future__ import annotations

import json

import pytest

from pdsim.core.errors import ConfigError
from tools import scorecard

COLUMNS = ["servers", "gpu", "rows are", "count", *(f"{name} %" for name in scorecard.NAMES)]


def run_of(folder, *tables):
    known = {"pdsim": "1.0", "git": {"commit": "0123456789", "dirty": False}}
    (folder / "run.json").write_text(json.dumps(known))
    (folder / "summary.json").write_text(json.dumps({"tables": tables}))
    return folder


def test_a_run_replaces_only_the_rows_of_pdsim(tmp_path):
    path = tmp_path / "scorecard.csv"
    peer = f"{scorecard.PEER},colocated,b200,2,40,1,2,3,4,5,6,page\n"
    path.write_text(f"{','.join(scorecard.HEADS)}\npdsim,colocated,mi355x,9,1,1,1,1,1,1,1,old\n{peer}")
    rows = [
        ["colocated", "b200", "in-sample", 3, 9.49, 1.0, 2.5001, 3.0, 4.0, 5.0, 6.0],
        ["disaggregated", "b200", "in-sample", 6, 10.0, 1.0, None, 3.0, 4.0, None, 6.0],
        ["colocated, steady", "b200", "in-sample", 1, 8.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        ["colocated", "h200", "in-sample", 4, 7.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    ]
    scorecard.keep(run_of(tmp_path, {"title": "Errors", "columns": COLUMNS, "rows": rows}), path)
    kept = path.read_text()
    assert kept.endswith(peer)
    assert kept.count("pdsim 1.0, 01234567") == 4
    assert list(scorecard.table(path))[2:] == [
        "| 4 H200 | 7; 1,2,3; 4,5,6 | - |",
        "| 3 B200 (AISimulate 2) | 9; 1,3,3; 4,5,6 | 40; 1,2,3; 4,5,6 |",
        "| 1 of these, steady | 8; 1,2,3; 4,5,6 | - |",
        "| 6 B200, disaggregated | 10; 1,-,3; 4,-,6 | - |",
    ]


def test_a_run_without_errors_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match="has no table of errors; name a run of pdsim validate --against inferencex"
    ):
        scorecard.keep(run_of(tmp_path), tmp_path / "scorecard.csv")
