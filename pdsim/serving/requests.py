"""What a request is, and the streams of random numbers that workloads are drawn from."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

__all__ = ["HASHED", "Request", "stream"]

HASHED = 512
"""Tokens of a block that one of a Mooncake trace's `hash_ids` names."""


class Request(NamedTuple):
    """One request.

    Tokens are counts, not ids.  A request of *output* 1 ends with its prefill.
    """

    arrival: float  # seconds after the first could arrive
    input: int  # tokens
    output: int  # tokens, the first included
    patience: float | None = None  # seconds after its arrival at which its user leaves; None stays to the end
    hash_ids: tuple[int, ...] = ()  # of its prompt's blocks of `HASHED` tokens: equal ids are equal tokens
    after: int = -1  # the request whose end its user waits for; *arrival* is then the think time from there on
    priority: int = 0  # the higher goes first


def stream(seed: int, name: str) -> np.random.Generator:
    """Return the stream of random numbers called *name*: the same for one seed and name, whatever else is drawn.

    The name's bytes are part of the seed sequence, so two names never share numbers.

    >>> stream(0, "a").random() == stream(0, "a").random(), stream(0, "a").random() == stream(0, "b").random()
    (True, False)
    """
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *name.encode()])))
