"""`pdsim explain`: phases add up, the greatest comes first, and two runs differ by what was changed."""

import json
import re

import pytest

import pdsim
from pdsim.core.errors import ConfigError
from pdsim.results.explain import accounts, causes, difference
from pdsim.results.store import Run
from tests.support.configs import make_config, make_result, record


def kept(folder, *records):
    return Run(make_config(folder)).finish(make_result(transfers=records))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folders of two runs that served: of NVLink, and of NIXL with another layout."""
    words = {"workload": "poisson", "workload.count": 8, "workload.rate": 2}
    words["output"] = str(tmp_path_factory.mktemp("runs"))
    other = {"backend": "nixl", "parallel.decode.tp": 2}
    return [pdsim.simulate(**(words | more)).folder for more in ({}, other)]


def test_stages_of_transfers_are_their_means(tmp_path):
    stages = {"prep": pytest.approx(1e-6), "post": pytest.approx(2e-6), "tx": pytest.approx(10e-6)}
    size = {"nbytes": 65536, "batch_size": 16, "poll": pytest.approx(4e-6)}
    folder = kept(tmp_path, record(), record(start=1.0), record(status="PeerLost"))
    assert causes(folder) == {"transfer": stages, "size": size}
    with pytest.raises(ConfigError, match="kept no requests and no transfers that ended"):
        causes(kept(tmp_path, record(status="PeerLost")))


def test_accounts_add_up_to_the_time_of_the_requests(runs):
    e2e = pdsim.load(runs[0]).requests["e2e"].to_pylist()
    assert sum(accounts(runs[0]).values()) == pytest.approx(sum(e2e) / len(e2e), rel=1e-9)
    assert sum(accounts(runs[0], 5).values()) == pytest.approx(e2e[5], rel=1e-9)
    with pytest.raises(ConfigError, match="has no request 8 that ended; there are 0 to 7"):
        accounts(runs[0], 8)


def test_the_difference_of_two_runs_is_a_sentence_with_numbers(runs):
    (requests, transfers), _ = difference(runs)
    pattern = r"nixl serves a request [\d.,]+ times slower \(.+ in the mean\), [\d.]+ % of it by transfer \(.+\)"
    assert re.fullmatch(pattern, requests)
    pattern = r"nixl is [\d.,]+ times slower in a transfer \(.+\): [\d.,]+ times the descriptors \(.+\) at .+ each"
    assert re.fullmatch(pattern, transfers)
    same, _ = difference([runs[0], runs[0]])
    assert [line.partition(" the same time")[0] for line in same] == ["B serves a request in", "B takes"]


def test_explain_names_what_helps_and_what_differs(runs, pdsim_says):
    first, second = map(str, runs)
    status, out, _ = pdsim_says("explain", first)
    assert (status, out.splitlines()[0].partition(": ")[0]) == (0, "mean of requests")
    assert out.splitlines()[1].startswith("what helps most: forwards take half as long (compute): ")
    assert re.search(r"^compute .*-\d\d\.\d %.* forwards take half as long$", out, re.MULTILINE)
    assert pdsim_says("explain", first, "--request", "3", "--fast")[1].startswith("request 3: ")
    out = pdsim_says("explain", first, second)[1]
    assert "A with backend of B" in out
    assert "A with parallel of B" in out
    assert json.loads(pdsim_says("explain", first, second, "--fast", "--json")[1])["folders"] == [first, second]
    assert pdsim_says("explain", first, "--request", "many")[0] == 2
    assert pdsim_says("explain", first, second, "--request", "1")[0] == 2
