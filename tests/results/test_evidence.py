"""A result says what it rests on: every source, and the weakest kind among them."""

from dataclasses import replace

import pytest

from pdsim.results.evidence import Evidence, gather
from tests.support.configs import ENGINE, LLM, MACHINE, make_config


def test_the_weakest_kind_is_that_of_the_weakest_number(tmp_path):
    proof = gather(make_config(tmp_path), serving=False)
    assert proof.weakest == "assumed"
    assert proof.kinds == {
        "measured": ["backend.intra.call"],
        "datasheet": ["hw.gpu.memory"],
        "assumed": ["hw.host.memory"],
    }


def test_a_measured_run_is_its_own_evidence(tmp_path):
    proof = gather(make_config(tmp_path, target="real"), serving=False)
    assert (proof.weakest, list(proof.sources)) == ("measured", ["transfers"])


def test_what_an_emulated_machine_took_is_no_measurement(tmp_path):
    proof = gather(make_config(tmp_path, target="real", hw=replace(MACHINE, gpus=0, guest=True)), serving=False)
    assert (proof.weakest, list(proof.sources)) == ("assumed", ["transfers"])


def test_a_measured_run_that_emulates_compute_rests_on_the_emulation(tmp_path):
    model = replace(LLM, sources={"layers": "published: config.json"})
    proof = gather(make_config(tmp_path, target="real", model=model), serving=True)
    assert proof.weakest == "assumed"
    assert list(proof.sources) == ["transfers", "model.layers", "compute"]


@pytest.mark.parametrize("changes", [{"hw": replace(MACHINE, sources={})}, {"backend": replace(ENGINE, sources={})}])
def test_a_model_without_sources_is_no_evidence_at_all(tmp_path, changes):
    assert gather(make_config(tmp_path, **changes), serving=False).weakest == "none"


def test_one_text_may_stand_for_several_numbers(tmp_path):
    hw = replace(MACHINE, sources={"nodes, gpus": "assumed: as asked"})
    assert {"hw.nodes", "hw.gpus"} <= set(gather(make_config(tmp_path, hw=hw), serving=False).sources)


def test_a_source_of_no_kind_is_refused():
    with pytest.raises(ValueError, match=r"hw\.x: source 'a friend' must begin with one of measured"):
        _ = Evidence({"hw.x": "a friend"}).kinds
