"""An engine with chunked prefill: each step decodes all running requests and fills up with pieces of prompts.

A step has a budget of tokens.  Every running request takes one of them; what is left goes to prompts, in the order of
`engine.scheduler`.  So decode never waits for a whole prompt, and each chunk of a prompt makes a step of decode longer.
Steps without prompts are in closed form, as in `pdsim.serving.decode.steps`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from simpy.events import AnyOf, Event

from pdsim.clock import Clock
from pdsim.errors import ConfigError
from pdsim.kv.messages import Submit
from pdsim.kv.pages import page_pool
from pdsim.serving.decode.steps import RunningBatch
from pdsim.serving.deployment import Deployment
from pdsim.serving.seams import scheduler_of
from pdsim.transfer import Program

__all__ = ["ColocatedEngine", "ColocatedRequest"]


@dataclass(slots=True)
class ColocatedRequest:
    """A request at an engine; times are seconds on the clock, -1 while unknown."""

    request: Submit
    done: int = 0  # tokens of the prompt that a step has covered or covers now
    started: float = -1.0  # its first step
    prefilled: float = -1.0  # the end of its last step with a piece of the prompt, which gives the first token
    finished: float = -1.0


class ColocatedEngine:
    """One engine of *job*, whose ranks compute alike; ``finished(request)`` is called at the end of each.

    A request has pages for its prompt and all of its output from its first step on, so none is ever preempted.
    """

    def __init__(self, clock: Clock, job: Deployment, finished: Callable[[ColocatedRequest], None]) -> None:
        self.clock = clock
        self.job = job
        self.pages = page_pool(job.engine.pages, job.decode_pages)
        self.policy = scheduler_of(job.engine)
        self.peak_batch = 0
        self._finished = finished
        self._batch = RunningBatch(job.decode_time, job.decode_batch, job.engine.decode, job.engine.overlap)
        self._queue: deque[ColocatedRequest] = deque()  # not prefilled
        self._open: dict[int, ColocatedRequest] = {}  # have pages
        self._news: Event | None = None

    def submit(self, request: Submit) -> None:
        """Take *request*, which the next step may begin."""
        self._queue.append(ColocatedRequest(request))
        if self._news is not None and not self._news.triggered:
            self._news.succeed()

    def run(self) -> Program:
        """Serve, for ever.

        Raise a `ConfigError` if the scheduler gives a piece that does not fit.
        """
        while True:
            pieces, ends = self._pieces()
            if pieces:
                yield self.clock.at(self._batch.begin_mixed(self.clock.now, pieces))
                self._batch.advance(self.clock.now)
            elif len(self._batch):
                yield from self._decode()
            else:
                self._batch.begin(self.clock.now)
                self._news = Event(self.clock)
                yield self._news
                continue
            for number in self._batch.finished():
                self._end(self._open[number])
            for one in ends:
                self._first_token(one)

    def _decode(self) -> Program:
        """Decode until a request ends, or to the end of the step in which another comes."""
        done = self.clock.at(self._batch.begin(self.clock.now))
        self._news = Event(self.clock)
        yield AnyOf(self.clock, [done, self._news])
        boundary = self._batch.boundary(self.clock.now)
        if boundary > self.clock.now:
            yield self.clock.at(boundary)
        self._batch.advance(self.clock.now)

    def _pieces(self) -> tuple[list[tuple[int, int]], list[ColocatedRequest]]:
        """Return the pieces of prompts in the next step, and the requests whose prompts it completes."""
        budget = self.job.chunk - len(self._batch)
        pieces: list[tuple[int, int]] = []
        ends: list[ColocatedRequest] = []
        partial: list[ColocatedRequest] = []
        while self._queue and budget > 0 and len(pieces) < self.job.prefill_batch:
            chosen = self.policy.prefill(self._queue, budget)
            if chosen is None:
                break
            one, tokens = self._queue[chosen[0]], chosen[1]
            if one.started < 0 and not self._begin(one):
                break
            if not 0 < tokens <= min(budget, one.request.input - one.done):
                raise ConfigError(
                    f"engine.scheduler={self.job.engine.scheduler} gave {tokens} tokens of room {one.request.room}, "
                    f"which has {one.request.input - one.done} left in a step of {budget}; give 1 to the lesser"
                )
            pieces.append((one.done, tokens))
            one.done += tokens
            budget -= tokens
            del self._queue[chosen[0]]
            (ends if one.done == one.request.input else partial).append(one)
        self._queue.extendleft(reversed(partial))
        return pieces, ends

    def _begin(self, one: ColocatedRequest) -> bool:
        """Give *one* its pages and a place in the batch; return whether there are any."""
        request = one.request
        if len(self._open) >= self.job.decode_batch:
            return False
        if self.pages.allocate(request.room, self.job.page_count(request.input + request.output)) is None:
            return False
        self._open[request.room] = one
        self.peak_batch = max(self.peak_batch, len(self._open))
        one.started = self.clock.now
        return True

    def _first_token(self, one: ColocatedRequest) -> None:
        one.prefilled = self.clock.now
        if one.request.output == 1:
            self._end(one)
        else:
            self._batch.join(one.request.room, one.request.input + 1, one.request.output - 1)

    def _end(self, one: ColocatedRequest) -> None:
        one.finished = self.clock.now
        del self._open[one.request.room]
        self.pages.release(one.request.room)
        self._finished(one)
