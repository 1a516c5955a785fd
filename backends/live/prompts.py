# SPDX-License-Identifier: Apache-2.0
"""Prompts of exact length: token ids drawn from a seed, so that equal `hash_ids` are equal blocks of tokens."""

from __future__ import annotations

from itertools import islice

import msgspec
import numpy as np
import numpy.typing as npt

from pdsim.serving.workload import HASHED, Request

__all__ = ["encoded", "token_ids"]

Ids = npt.NDArray[np.int64]

WORDS = ("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not")
"""Frequent words, most of which are one token to most tokenizers."""


def token_ids(request: Request, number: int, seed: int, vocabulary: int) -> Ids:
    """Return the prompt of the *number*-th request: ``request.input`` ids, int64.

    A block that `Request.hash_ids` names depends on its id and *seed* only; the rest also on *number*. The lower
    sixteenth of *vocabulary* is left out: special tokens are there.
    """
    low = vocabulary // 16
    blocks = [_drawn(seed, "block", name, HASHED, low, vocabulary) for name in _named(request)]
    rest = request.input - HASHED * len(blocks)
    if rest > 0:
        blocks.append(_drawn(seed, "request", number, rest, low, vocabulary))
    return np.concatenate(blocks)[: request.input]


def encoded(request: Request, number: int, seed: int, vocabulary: int, prompts: str) -> bytes:
    """Return the prompt as JSON: a list of ids, or with *prompts* ``"text"`` a string of as many words."""
    ids = token_ids(request, number, seed, vocabulary).tolist()
    if prompts == "text":
        return msgspec.json.encode(" ".join(WORDS[one % len(WORDS)] for one in ids))
    return msgspec.json.encode(ids)


def _named(request: Request) -> list[int]:
    return list(islice(request.hash_ids, -(-request.input // HASHED)))


def _drawn(seed: int, kind: str, name: int, count: int, low: int, high: int) -> Ids:
    entropy = [seed, *kind.encode(), *divmod(name & (1 << 64) - 1, 1 << 32)]
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy))).integers(low, high, count)
