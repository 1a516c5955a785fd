"""A decode instance that holds the first pages of a request already receives only the rest."""

from dataclasses import replace
from typing import Any

import pytest

from pdsim.kv.layout import AUX_BYTES
from pdsim.models.llm import Hybrid, Side
from pdsim.serving.block_manager import DecodePages
from pdsim.serving.settings import SchedulerLimits
from pdsim.serving.workload import Request
from tests.support.serving import GQA, MLA, POOL, Served, simulate

PAGE = 16  # tokens
ROW = 2 * GQA.layers * GQA.kv_heads * GQA.head_dim * 2  # bytes of a token
REQUEST = Request(0.0, 100, 20)  # 7 pages, in chunks of 32 tokens, and an eighth for the output


def serve(held: int, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Served:
    """Serve a request of which each decode instance holds the first *held* pages."""
    with monkeypatch.context() as context:
        context.setattr(DecodePages, "_cached", lambda *_: held)
        changes = {"model": GQA, "scheduler": SchedulerLimits(chunk=32, decode_batch=8)} | changes
        return simulate([REQUEST], **changes, memory="tracked")


@pytest.mark.parametrize("held", [0, 1, 2, 3, 6])  # of 7; two are a chunk
def test_bytes_are_those_of_the_pages_that_are_not_there(held, monkeypatch):
    (row,) = serve(held, monkeypatch).rows
    assert row["status"] == "ok"  # contents verified
    # as the reference has it: ceil((input - prefix) / page) pages are sent
    assert row["nbytes"] == (7 - held) * PAGE * ROW + AUX_BYTES


SIDES = [{"prefill": Side(tp=prefill), "decode": Side(tp=decode)} for prefill, decode in ((1, 2), (2, 1), (4, 4))]
CASES = [
    *[(sides, 4, ROW) for sides in SIDES],
    ({"model": MLA}, 2, MLA.layers * MLA.latent_dim * 2),
    ({"model": replace(MLA, hybrid=Hybrid(index_bytes=12))}, 2, MLA.layers * (MLA.latent_dim * 2 + 12)),
    ({"model": replace(GQA, hybrid=Hybrid(pattern="aw", window=40))}, 2, ROW // 2),  # the window is sent whole
]


@pytest.mark.parametrize(("changes", "held", "row"), CASES)
def test_ranks_write_the_rest_to_where_it_belongs(changes, held, row, monkeypatch):
    ((whole,), (rest,)) = (serve(pages, monkeypatch, **changes).rows for pages in (0, held))
    assert whole["status"] == rest["status"] == "ok"
    assert whole["nbytes"] - rest["nbytes"] == held * PAGE * row


def test_context_parallel_ranks_share_the_positions_of_the_rest(monkeypatch):
    kv = replace(POOL, all_cp_ranks=True)
    _, outcome, (row,) = serve(3, monkeypatch, prefill=Side(tp=1, cp=2), kv=kv)
    assert row["status"] == "ok"
    written = [sum(record.nbytes for record in outcome.ranks[f"prefill0.{rank}"].transfers) for rank in range(2)]
    # four pages, two each, and rank 0 has the metadata
    assert written == [2 * PAGE * ROW + AUX_BYTES, 2 * PAGE * ROW]


def test_a_decode_side_that_holds_all_of_a_request_is_refused(monkeypatch):
    assert serve(7, monkeypatch).statuses == ["MessageError: 7 pages held of 100 tokens; hold less than all"]
