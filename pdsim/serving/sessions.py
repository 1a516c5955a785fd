# SPDX-License-Identifier: Apache-2.0
"""Users who think between the turns of a session: each waits for its answer before it asks again.

A turn's prompt is all that was said before, the answers included, and new tokens; so `hash_ids` of a session's
prompts begin alike, and those of all sessions do within `Workload.shared` tokens.  How many requests come at a time
depends on how fast they are answered: a closed loop, of which no offered load is known beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pdsim.core.errors import ConfigError
from pdsim.serving.requests import HASHED, Request, stream
from pdsim.serving.settings import Workload

__all__ = ["lengths", "sessions"]

_BLOCKS = 1 << 20  # numbers of blocks for each session


def lengths(random: np.random.Generator, count: int, mean: float, cv: float) -> npt.NDArray[np.int64]:
    """Return log-normal lengths of so many tokens on average, at least 1.

    *cv* is the coefficient of variation: of the logarithm, the variance is ``log(1 + cv**2)``. Rounding and the
    least of 1 move the mean of short lengths a little.

    >>> lengths(np.random.default_rng(0), 3, mean=100, cv=0.0).tolist()
    [100, 100, 100]
    """
    variance = math.log1p(cv * cv)
    drawn = random.lognormal(math.log(mean) - variance / 2, math.sqrt(variance), count)
    return np.maximum(1, np.rint(drawn)).astype(np.int64)


def sessions(workload: Workload, starts: Sequence[float], seed: int, context: int) -> list[Request]:
    """Return `Workload.count` requests of sessions of `Workload.turns` turns; a user's first is at one of *starts*.

    With `Workload.users` each of them begins a session when the one before is over; otherwise every start is a user
    of one session.  A session whose next prompt and answer would exceed *context* ends early: a new one begins.

    *arrival* of a first turn is seconds after the start, of a later one the think time after the answer to the
    request *after*.  Raise a `ConfigError` without a count.
    """
    count = workload.count
    if count is None:
        raise ConfigError("workload.arrivals=sessions has no end; set workload.count=N, requests of all users")
    new = lengths(stream(seed, "workload.input"), count, workload.input_mean, workload.input_cv).tolist()
    answers = lengths(stream(seed, "workload.output"), count, workload.output_mean, workload.output_cv).tolist()
    thinks = stream(seed, "workload.think").exponential(workload.think, count).tolist() if workload.think else [0.0]
    users = workload.users or math.ceil(count / workload.turns)
    turn, said, session = [0] * users, [0] * users, list(range(users))
    found: list[Request] = []
    for number in range(count):
        # users take turns, or those of one session follow one another
        user, back = (number % users, users) if workload.users else (number // workload.turns, 1)
        first = number < users if workload.users else number % workload.turns == 0
        prompt = (said[user] or workload.shared) + new[number]
        if turn[user] == workload.turns or prompt + answers[number] > context:
            turn[user], session[user] = 0, session[user] + users
            prompt = workload.shared + new[number]
        prompt = min(prompt, context - 1)
        answer = min(answers[number], context - prompt)
        arrival = starts[user] if first else thinks[number % len(thinks)]
        blocks = tuple(_block(session[user], index, workload.shared) for index in range(-(-prompt // HASHED)))
        found.append(Request(arrival, prompt, answer, None, blocks, -1 if first else number - back))
        turn[user], said[user] = turn[user] + 1, prompt + answer
    return found


def _block(session: int, index: int, shared: int) -> int:
    """Return the hash of the *index*-th block of a session's prompts.

    Blocks within *shared* tokens are alike in all sessions.
    """
    return index if (index + 1) * HASHED <= shared else (session + 1) * _BLOCKS + index
