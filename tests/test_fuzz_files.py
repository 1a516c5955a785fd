"""Whatever others write, or that was edited: what is raised is the documented error, and of one line a mistake."""

from random import Random

import pytest

from pdsim.calibration import samples
from pdsim.core.errors import ConfigError
from pdsim.kv import messages
from pdsim.serving.settings import Workload
from pdsim.serving.workload import load
from tools import fuzz, fuzz_inputs

INPUTS = {"messages": 1000, "wire": 1000, "results": 60}
"""Of a family, here; of the others 150."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return fuzz.Bench(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.slow
@pytest.mark.parametrize("family", fuzz.FAMILIES)
def test_what_is_changed_is_refused_as_documented(bench, family):
    found = {number: fuzz.one(bench, family, 1, number) for number in range(INPUTS.get(family, 150))}
    assert {number: what for number, what in found.items() if what} == {}


def test_every_kind_of_message_is_fuzzed():
    assert {type(messages.decode(payload)) for payload in fuzz_inputs.payloads()[:-1]} == set(messages.KINDS)


def test_a_trace_whose_values_lie_too_deep_is_refused(tmp_path):
    path = tmp_path / "deep.jsonl"
    path.write_text('{"hash_ids": ' + "[" * 100_000 + "\n")
    with pytest.raises(ConfigError, match=r"deep\.jsonl:1: "):
        load(Workload(trace=str(path)), 0, 1000)


def test_a_comment_of_samples_may_say_nothing(tmp_path):
    path = tmp_path / "samples.csv"
    path.write_text("# source: \n# : \n# kind: measured\npattern,blocks,size,seconds\npair,1,4096,1e-5\n")
    assert samples.read(path).about == {"source": "", "": "", "kind": "measured"}


def test_right_answers_of_servers_serve_the_request():
    assert {fuzz_inputs.served(fuzz_inputs.answers(Random(number))).status for number in range(9)} == {"ok"}
