"""A decode instance that holds the first pages of a request already receives only the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from experiments.serve import ServeOptions, job, specs
from pdsim.kv.layout import AUX_BYTES
from pdsim.models.llm import Hybrid, Llm
from pdsim.models.parallel import Side
from pdsim.serving.decode import DecodeScheduler, decode_rank
from pdsim.serving.deployment import Deployment
from pdsim.serving.workload import Request
from pdsim.sim.model import Model
from pdsim.transfer import Program
from pdsim.transfer.job import Outcome, Rank
from tests.support.serving import GQA, MLA, ONE, configured

PAGE = 16  # tokens
REQUEST = Request(0.0, 100, 20)  # 7 pages, in chunks of 32 tokens, and an eighth for the output
SPARSE = replace(MLA, hybrid=Hybrid(index_bytes=12))
WINDOW = replace(GQA, hybrid=Hybrid(pattern="aw", window=40))


def decode(rank: Rank, *, instance: str, index: int, job: Any, held: int) -> Program:
    """A decode rank whose scheduler has some pages of every request, as one with a cache of prefixes would have."""
    engine = decode_rank(rank, Deployment.from_plain(job), instance, index)
    if isinstance(engine.scheduler, DecodeScheduler):
        engine.scheduler.pages.held = lambda _: held
    return (yield from engine.run())


def serve(held: int, model: Llm = GQA, prefill: Side = ONE, decode: Side = ONE, **kv: Any) -> Outcome:
    config = configured(prefill, decode, model)
    config = replace(
        config, kv=replace(config.kv, **kv), scheduler=replace(config.scheduler, chunk=32), memory="tracked"
    )
    ranks = []
    for spec in specs(config, job(config, ServeOptions()), [REQUEST]):
        if spec.name.startswith("decode"):
            arguments = {**spec.arguments, "held": held}
            spec = replace(spec, program="tests.serving.test_prefix:decode", arguments=arguments)
        ranks.append(spec)
    return Model(config.hw, config.backend, memory="tracked").run(ranks)


def nbytes(outcome: Outcome) -> int:
    _, _, moved, status, *_ = outcome.ranks["router"].value["rows"][0]
    assert status == "ok"  # contents verified
    return moved


@pytest.mark.parametrize("held", [0, 1, 2, 3, 6])  # of 7; two are a chunk
def test_bytes_are_those_of_the_pages_that_are_not_there(held: int):
    moved = nbytes(serve(held))
    # as the reference has it: ceil((input - prefix) / page) pages are sent
    assert moved == (7 - held) * PAGE * 2 * GQA.layers * GQA.kv_heads * GQA.head_dim * 2 + AUX_BYTES


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (4, 4)])
def test_ranks_of_any_number_write_the_rest_to_where_it_belongs(prefill: int, decode: int):
    whole, rest = (nbytes(serve(held, prefill=Side(tp=prefill), decode=Side(tp=decode))) for held in (0, 4))
    page = PAGE * 2 * GQA.layers * GQA.kv_heads * GQA.head_dim * 2
    assert whole - rest == 4 * page


def test_context_parallel_ranks_share_the_positions_of_the_rest():
    outcome = serve(3, prefill=Side(tp=1, cp=2), all_cp_ranks=True)
    nbytes(outcome)
    page = PAGE * 2 * GQA.layers * GQA.kv_heads * GQA.head_dim * 2
    written = [sum(record.nbytes for record in outcome.ranks[f"prefill0.{rank}"].transfers) for rank in range(2)]
    assert written == [2 * page + AUX_BYTES, 2 * page]  # four pages, two each, and rank 0 has the metadata


@pytest.mark.parametrize("model", [MLA, SPARSE, WINDOW], ids=["mla", "sparse index", "window"])
def test_state_goes_with_the_rest(model: Llm):
    whole, rest = (nbytes(serve(held, model)) for held in (0, 2))
    layers = model.layers if "w" not in model.hybrid.pattern else model.layers // 2
    row = model.latent_dim * 2 or 2 * model.kv_heads * model.head_dim * 2
    # index rows lie in the pages; the window is sent whole
    assert whole - rest == 2 * PAGE * layers * (row + model.hybrid.index_bytes)


def test_a_decode_side_that_holds_all_of_a_request_is_refused():
    rows = serve(7).ranks["router"].value["rows"]
    assert rows[0][3] == "MessageError: 7 pages held of 100 tokens; hold less than all"
