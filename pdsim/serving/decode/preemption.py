# SPDX-License-Identifier: Apache-2.0
"""What becomes of the KV of preempted requests: it goes to host memory and comes back, or is computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pdsim.kv.messages import Offload
from pdsim.serving.decode.block_manager import DecodeRequest
from pdsim.serving.decode.decode_worker import DecodeWorker

__all__ = ["Retraction", "pieces_again"]


class Retraction:
    """What goes to host memory, and back, at a boundary between two steps of the leader *worker*.

    Tokens are noted by `out` and `back`; `move` puts the KV of all of them on the links of every rank, and *then* is
    called when the leader's part is there.  SGLang's decode scheduler waits for these copies, too.  While they are
    *under_way* no step is, and what comes is seen to after the next: whoever notices it sets *news*.
    """

    def __init__(self, worker: DecodeWorker, followers: list[str], then: Callable[[bool], None]) -> None:
        self.under_way = False
        self.news = False
        self._worker = worker
        self._followers = followers
        self._then = then
        self._tokens = [0, 0]

    def __bool__(self) -> bool:
        """Return whether there is anything to move."""
        return any(self._tokens)

    def out(self, tokens: int) -> None:
        """Note that KV of so many *tokens* goes to host memory."""
        self._tokens[0] += tokens

    def back(self, tokens: int) -> None:
        """Note that KV of so many *tokens* comes back."""
        self._tokens[1] += tokens

    def move(self) -> None:
        """Move what was noted."""
        worker = self._worker
        each = worker.job.shape.token_bytes(worker.job.decode.tp)
        (out, back), self._tokens = self._tokens, [0, 0]
        self.under_way = True
        worker.send(self._followers, Offload(worker.life, out * each, back * each))
        event = worker.offload(out * each, back * each)
        assert event.callbacks is not None
        event.callbacks.append(lambda _: None if worker.has_ended else worker.guard(self._moved))

    def _moved(self) -> None:
        news, self.under_way, self.news = self.news, False, False
        self._then(news)


def pieces_again(rooms: Iterable[DecodeRequest], budget: int) -> list[tuple[int, int]]:
    """Return what the next step computes again of *rooms*, at most *budget* tokens, and count it as done.

    A piece is ``(tokens computed before, tokens)``; running requests have taken their tokens of the step before.
    """
    pieces = []
    for room in rooms:
        tokens = min(budget, room.context - room.recomputed)
        if tokens <= 0:
            break
        pieces.append((room.recomputed, tokens))
        room.recomputed += tokens
        budget -= tokens
    return pieces
