"""`pdsim sweep --search optuna`: the real library chooses the points; seeded, resumed, and refused in one line."""

import pytest

from pdsim.cli.main import main
from pdsim.cli.optuna_search import OptunaSearch
from pdsim.core.errors import ConfigError
from pdsim.sweep.collect import read_ledger
from tests.test_cli import QUICK

pytest.importorskip("optuna", reason="needs optuna")
SPACE = (
    "host_factor=interval(0.5,2)",
    "hw=8xh20,8xh200",
    "--search",
    "optuna",
    "--maximize",
    "bw_max_gbs",
)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def searched(trials, folder):
    status = main(["sweep", *QUICK, *SPACE, "--trials", str(trials), f"output={folder}", "-q"])
    (found,) = folder.glob("sweep-*")
    return status, list(read_ledger(found)[0].values())


@pytest.mark.slow
def test_a_search_is_seeded_goes_on_and_gets_better(tmp_path, in_this_process):
    status, first = searched(8, tmp_path / "a")
    assert (status, len(first)) == (0, 8)
    _, again = searched(8, tmp_path / "b")
    assert [row["point"] for row in again] == [row["point"] for row in first]
    _, more = searched(24, tmp_path / "a")
    assert more[:8] == first
    rate = [row["metrics"]["bw_max_gbs"] for row in more]
    assert sum(rate[16:]) / len(rate[16:]) > sum(rate[:8]) / 8
    assert all(0.5 <= float(row["overrides"]["host_factor"]) <= 2.0 for row in more)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("seed=1,2", "--search", "optun"), "--search optun is not known; write --search optuna"),
        (("seed=1,2", "--trials", "4"), "--trials needs --search optuna"),
        (("--search", "optuna"), "--search has nothing to choose; write KEY=A,B or KEY=interval(LOW,HIGH)"),
        (("seed=1,2", "--search", "optuna", "--trials", "0"), "--trials 0: must be a whole number >= 1"),
        (
            ("hw=8xh20,8xh200", "--search", "optuna", "--seeds", "2"),
            "--seeds with --search would search for a lucky",
        ),
        (("seed=1,2", "--search", "optuna", "--maximize", "a", "--minimize", "b"), "name one metric together"),
        (("compute.scale=interval(1,2)",), "compute.scale=interval(...) has no list of values; add --search optuna"),
        (
            ("hw=8xh20,9xh20", "--search", "optuna", "--trials", "4"),
            "hw=9xh20 does not exist; did you mean hw=8xh20?",
        ),
    ],
)
def test_what_cannot_be_searched_is_one_line(words, said, capfd, tmp_path):
    assert main(["sweep", *QUICK, *words]) == 2
    err = capfd.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_a_metric_that_there_is_none_of_is_refused_with_the_nearest():
    row = {"status": "ok", "metrics": {"goodput": 2.0, "ttft_p50_s": 0.5}, "gpus": 4}
    assert OptunaSearch().of(row) == 0.5
    assert OptunaSearch(metric="ttft_p50_s", minimized=True).of(row) == 0.5
    assert OptunaSearch().of(row | {"status": "infeasible", "metrics": {}}) is None
    with pytest.raises(ConfigError, match=r"no metric 'ttft_p5_s'; did you mean ttft_p50_s\?"):
        OptunaSearch(metric="ttft_p5_s").of(row)
