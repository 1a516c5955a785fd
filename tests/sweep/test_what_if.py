"""What-ifs are other configurations: what they change, and that a run with them is the run of those numbers."""

from dataclasses import replace
from fnmatch import fnmatchcase

import pytest

import pdsim
from pdsim.config import plain
from pdsim.config.compose import compose
from pdsim.core.errors import ConfigError
from pdsim.core.progress import silent
from pdsim.sweep.what_if import WHAT_IFS, changed, exchanged, try_exchanges, try_what_ifs

WORDS = ("workload=poisson", "workload.count=12", "workload.rate=4")
BY_CAUSE = {each.cause: each for each in WHAT_IFS}


@pytest.fixture(scope="module")
def config():
    return compose(WORDS)


@pytest.mark.parametrize("cause", BY_CAUSE)
def test_each_relief_changes_something_of_the_default(config, cause):
    assert changed(config, BY_CAUSE[cause]) not in (None, config)


def test_a_relief_halves_or_doubles_what_it_names_and_nothing_else(config):
    easier = changed(config, BY_CAUSE["posting"])
    intra = config.backend.intra
    half = replace(intra, call=intra.call / 2, descriptor=intra.descriptor / 2)
    expected = {"call": half.call, "descriptor": half.descriptor, "rate": intra.rate, "latency": intra.latency}
    assert {name: getattr(easier.backend.intra, name) for name in expected} == expected
    assert (easier.hw, easier.workload, easier.compute) == (config.hw, config.workload, config.compute)
    assert changed(config, BY_CAUSE["compute"]).compute.scale == 0.5
    assert changed(config, BY_CAUSE["queue"]).workload.rate == 2.0
    assert changed(config, BY_CAUSE["admission"]).scheduler.decode_batch == 2 * config.scheduler.decode_batch


def test_every_key_that_a_relief_names_is_one_of_a_configuration():
    """A relief of an engine and of collectives names the keys of both, so one of the two has to have each."""
    calibrated = ("hw=2x8xmi300x_cx7", "backend=mori", "calibration=cx7-write")
    chosen = (WORDS, ("hw=link",), ("experiment=allgather", "hw=4xh200"), ("hw=2x8xh20",), calibrated)
    keys = {key for words in chosen for key in _keys(plain(compose(words)), "")}
    costs = ("backend.intra", "backend.inter", "collective.plain", "collective.symmetric")
    keys |= {
        f"{other}{key.removeprefix(at)}" for at in costs for key in keys if key.startswith(at) for other in costs
    }
    assert [
        name for each in WHAT_IFS for name in each.factors if not any(fnmatchcase(key, name) for key in keys)
    ] == []


def _keys(value, at):
    if isinstance(value, list):
        return {key for item in value for key in _keys(item, at)} | {at}
    if isinstance(value, dict):
        return {key for name, item in value.items() for key in _keys(item, f"{at}.{name}".lstrip("."))}
    return {at}


def test_a_relief_is_simulated_as_a_run_of_those_numbers(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = try_what_ifs(config, ["compute"], silent)
    for words, name in (((*WORDS, "compute.scale=0.5"), "compute"), (WORDS, "")):
        e2e = pdsim.simulate(*words).requests["e2e"].to_pylist()
        assert found[name].e2e == pytest.approx(sum(e2e) / len(e2e), rel=1e-12)
    one = try_what_ifs(config, [], silent, request=3)[""]
    assert (one.requests, one.e2e) == (1, pytest.approx(e2e[3], rel=1e-12))


def test_exchanging_the_only_difference_makes_all_of_it(config):
    other = compose((*WORDS, "backend=nixl"))
    assert list(exchanged(config, other)) == ["backend"]
    found = try_exchanges([config, other], silent)
    assert found["backend"] == found["B"] != found["A"]


def test_a_request_that_there_is_none_of_is_refused(config):
    with pytest.raises(ConfigError, match="request 99 did not end"):
        try_what_ifs(config, [], silent, request=99)
