"""`pdsim explain`: phases add up, the greatest comes first, and two runs differ by what was changed."""

import pytest

import pdsim
from pdsim.cli.main import main
from pdsim.errors import ConfigError
from pdsim.results.explain import causes, tables
from pdsim.results.store import Run
from tests.support.configs import make_config, make_result, record


def kept(folder, *records):
    return Run(make_config(folder)).finish(make_result(transfers=records))


def test_stages_of_transfers_are_their_means(tmp_path):
    found = causes(kept(tmp_path, record(), record(start=1.0), record(status="PeerLost")))
    assert found["transfer"] == {"prep": pytest.approx(1e-6), "post": pytest.approx(2e-6), "tx": pytest.approx(10e-6)}
    assert found["size"] == {"nbytes": 65536, "batch_size": 16}
    assert "request" not in found


def test_one_run_has_shares_the_greatest_first(tmp_path):
    table, size = tables([kept(tmp_path, record())])
    assert table.title == "Mean of transfers, 13 us: bound by tx"
    found = [(name, time, share) for name, time, share, _ in table.rows]
    assert found == [("tx", "10 us", "76.9 %"), ("post", "2 us", "15.4 %"), ("prep", "1 us", "7.7 %")]
    assert [row[1:] for row in size.rows] == [["64 KiB", "16"]]


def test_two_runs_differ_by_what_was_changed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runs = [pdsim.simulate("workload.count=4", **{"compute.scale": scale}) for scale in (1.0, 2.0)]
    first, second = (causes(run.folder)["request"] for run in runs)
    for run, means in zip(runs, (first, second), strict=True):
        e2e = run.requests["e2e"].to_pylist()
        assert sum(means.values()) == pytest.approx(sum(e2e) / len(e2e), rel=1e-9)
    assert second["compute"] == pytest.approx(2 * first["compute"], rel=0.01)
    assert main(["explain", *(str(run.folder) for run in runs)]) == 0
    assert "slower, most of it by compute" in capsys.readouterr().out


def test_a_run_that_kept_nothing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="kept no requests and no transfers that ended"):
        causes(kept(tmp_path, record(status="PeerLost")))
