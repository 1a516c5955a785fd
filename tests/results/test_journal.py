"""What a run that was killed had written by then can be shown, compared and reported."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pdsim.cli.main import main
from pdsim.serving import requests
from pdsim.serving.router import Router

WORDS = ["hw=8xh200", "workload=poisson", "workload.count=60", "workload.rate=20", "workload.input_mean=300"]


class Killed(BaseException):
    """Ends a run in the middle, as nothing that it could handle."""


def test_a_killed_run_shows_what_it_had_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(requests, "JOURNAL_BLOCK", 8)
    assert main(["run", "--quiet", f"output={tmp_path / 'whole'}", *WORDS]) == 0
    (whole,) = (tmp_path / "whole").iterdir()
    assert not list(whole.glob("*.journal"))

    ended = Router._close

    def close(self: Router, *arguments: object) -> None:
        ended(self, *arguments)  # type: ignore[arg-type]
        if self.generated[0] == 30:
            raise Killed

    with monkeypatch.context() as context:
        context.setattr(Router, "_close", close)
        with pytest.raises(Killed):
            main(["run", "--quiet", f"output={tmp_path / 'killed'}", *WORDS])
    (folder,) = (tmp_path / "killed").iterdir()
    assert folder.name.endswith(".incomplete")
    assert main(["show", "--json", str(folder)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["failures"] == ["the run ended early: these are 24 of 60 requests, which had ended by then"]
    assert found["metrics"]["requests"]["value"] == 24
    kept, every = (pq.read_table(place / "requests.parquet").to_pylist() for place in (folder, whole))
    assert [row | {"path": None} for row in kept] == [every[row["id"]] | {"path": None} for row in kept]
    assert main(["compare", str(folder), str(whole)]) == 0
