"""`experiment=allgather` on real ranks: Gloo on host memory, contents verified, the same rows as on the model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments.allgather import run
from pdsim.core.progress import silent
from tests.experiments.test_allgather import LIBRARY, configured, rows
from tests.support.configs import LOOPBACK
from tests.support.engines import gathering_target

pytest.importorskip("torch", reason="groups of real ranks need PyTorch")


def test_pieces_and_tokens_arrive_and_a_pool_grows_as_on_the_model():
    options = {"ranks": (2,), "size": (4096, 1 << 16), "batches": ((9, 9), (3, 50)), "repeat": 4}
    config = replace(configured(**options), target="real", hw=LOOPBACK)
    _, target = gathering_target("gloo")
    target.collective = replace(LIBRARY, timeout=60.0)
    real = run(config, target, silent)
    assert not real.failures
    found = rows(real)
    assert {row["status"] for row in found} == {"ok"}
    assert all(len(set(row["verified"].split("/"))) == 1 and row["verified"] != "0/0" for row in found)
    assert all(row["q1"] <= row["med us"] <= row["q3"] for row in found)
    assert {record.engine for record in real.transfers} == {"gloo:plain", "gloo:symmetric", "gloo:reserve"}
    assert [row["growths"] for row in found if row["pool"] == "symmetric"] == [0] * 4
    assert [row["growths"] for row in found if row["pool"] == "symmetric, grown"][:2] == [0, 1]
