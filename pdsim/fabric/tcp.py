"""What TCP adds to a transfer over a `Wire` whose way takes time: rounds of answers, and a window that grows.

Without an event for a packet, or for a round: the sums below say how long a transfer takes at least, and the flow that
carries its bytes at a fair share says the rest.

- An engine with *lanes* has that many blocks to a peer under way, each on a stream of its own that waits for the answer
  before it takes the next.  So *n* blocks take ``ceil(n / lanes)`` rounds of a round trip and a block's own bytes.
- A stream sends a window of bytes and waits for its acknowledgement; each that is acknowledged makes the window a byte
  larger (slow start, RFC 5681: it doubles in a round trip), until it covers what the way holds.  A link that loses
  nothing leaves it at that.  While a stream is idle its window is halved every retransmission time-out, down to where
  it began (RFC 2861).
- A stream never has more than `Wire.window` under way.
- Its window goes on growing when the way is full, so that bytes wait in front of it, and the retransmission time-out,
  which is a constant more than the round trip, grows with them.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdsim.fabric.machine import Wire

__all__ = ["Chain", "Streams"]


QUEUE = 0.35
"""Seconds of waiting bytes for each second that a stream has filled the way, as its estimate of the round trip has it.

Measured: disturbed transfers at 100 and 200 Mbit/s; 0.5 if no acknowledgement came late."""


class Streams:
    """The TCP streams of one direction between two endpoints.

    *trip* is the time of the way there and back, *answer* what an engine adds to it for each block, *rate* what the way
    carries at most.
    """

    __slots__ = (
        "_answer",
        "_initial",
        "_lanes",
        "_most",
        "_rate",
        "_segment",
        "_since",
        "_timeout",
        "_trip",
        "_used",
        "_window",
    )

    def __init__(self, wire: Wire, trip: float, answer: float, rate: float, lanes: int) -> None:
        self._trip = trip
        self._answer = answer
        self._rate = rate
        self._lanes = lanes
        self._segment = float(wire.segment)
        self._initial = float(wire.initial * wire.segment)
        self._most = float(wire.window)
        self._timeout = wire.timeout + trip
        self._window = self._initial
        self._since = -inf  # since when bytes have been under way without a pause
        self._used = -inf  # until when

    def start(self, now: float, blocks: int, nbytes: float) -> tuple[float, float]:
        """Let a transfer begin; return how long its bytes take at least, and what is to be added to the time they take.

        Both without the last answer.
        """
        lanes = min(blocks, self._lanes or 1)
        share = nbytes / lanes
        growing = self._grow(now, share, self._rate / lanes)
        least = nbytes * self._trip / (lanes * self._most)
        rounds = -(-blocks // self._lanes) if self._lanes else 1
        if rounds > 1:
            block = nbytes / blocks / self._rate
            least = max(least, (rounds - 1) * (self._trip + self._answer + block) + lanes * block)
        if now > self._used:
            self._since = now
        self._used = now + max(least, nbytes / self._rate + growing)
        return least, growing

    def timeout(self, now: float) -> float:
        """Return after how many seconds without an answer a segment is sent again."""
        busy = max(0.0, min(now, self._used) - self._since) if self._used > -inf else 0.0
        return self._timeout + min(self._most / self._rate, QUEUE * busy)

    def restart(self) -> float:
        """Return how long a stream waits for acknowledgements until a window of one segment has grown enough."""
        return self._waits(self._segment, inf)[0]

    def _grow(self, now: float, nbytes: float, rate: float) -> float:
        """Return how long a stream that sends *nbytes* waits for acknowledgements, and keep the window it ends with."""
        before = self._after_idle(now)
        waits, window = self._waits(before, nbytes, rate)
        # it grows only as far as it is used
        self._window = min(self._most, max(before, min(window, 2.0 * nbytes)))
        return waits

    def _waits(self, window: float, nbytes: float, rate: float = 0.0) -> tuple[float, float]:
        """Return how long *nbytes* wait for acknowledgements at first, and the window after them."""
        rate = rate or self._rate
        waits, left, full = 0.0, nbytes, rate * self._trip
        while window < full and left > window:
            waits += self._trip - window / rate
            left -= window
            window *= 2.0
        return waits, window + left

    def _after_idle(self, now: float) -> float:
        times = (now - self._used) / self._timeout
        if times < 1.0:
            return self._window
        return max(self._initial, self._window / float(1 << min(int(times), 64)) if times < inf else 0.0)


class Chain:
    """A `Wire` and all streams over it."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self._streams: list[Streams] = []

    def streams(self, trip: float, answer: float, rate: float, lanes: int) -> Streams:
        """Return new `Streams`, with its arguments."""
        made = Streams(self.wire, trip, answer, rate, lanes)
        self._streams.append(made)
        return made

    def recovery(self, now: float, end: float) -> float:
        """Return when streams that are cut from *now* to *end* send on.

        The retransmission timer fires a time-out after what was sent last, and each time takes twice as long to fire
        again (RFC 6298); the first time it fires after the end is when the stream goes on, with a window of a segment.
        """
        wait = max((each.timeout(now) for each in self._streams), default=self.wire.timeout)
        fires = now + wait
        while fires < end:
            wait *= 2.0
            fires += wait
        return fires + max((each.restart() for each in self._streams), default=0.0)
