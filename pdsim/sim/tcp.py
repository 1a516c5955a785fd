# SPDX-License-Identifier: Apache-2.0
"""What TCP adds to a transfer over a `NetworkLink` whose way takes time: rounds of answers, and a window that grows.

Without an event for a packet, or for a round: the sums below say how long a transfer takes at least, and the flow
that carries its bytes at a fair share says the rest.

- An engine with *lanes* has that many blocks to a peer under way, each on a stream of its own that waits for the
  answer before it takes the next.  So *n* blocks take ``ceil(n / lanes)`` rounds of a round trip and a block's own
  bytes.
- A stream sends a window of bytes and waits for its acknowledgement; each that is acknowledged makes the window a
  byte larger (slow start, RFC 5681: it doubles in a round trip), until it covers what the way holds.  A link that
  loses nothing leaves it at that.  While a stream is idle its window is halved every retransmission time-out, down
  to where it began (RFC 2861).
- A stream never has more than `NetworkLink.window` under way.
- Its window goes on growing when the way is full, so that bytes wait in front of it, and the times after which TCP
  suspects that something is lost, which follow the round trip, grow with them.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdsim.hardware.machine import NetworkLink


QUEUE = 0.4
"""Seconds by which the estimated round trip grows for each second that a stream has filled the way.

Twice as much is under way by then, for an answer is as old as the queue was long.  Measured: when
probes of cuts at 200 and 300 Mbit/s came; 0.5 if no acknowledgement came late."""

WRITABLE = 2 / 3
"""Share of its largest window at which the kernel lets a stream's engine write more.

Published: Linux's sk_stream_is_writeable, a third must be free."""

OVERHEAD = 960
"""Bytes that a segment takes in the send buffer beside its data.

Published: SKB_TRUESIZE(MAX_TCP_HEADER) of Linux.  Assumed: acknowledgements let go of one segment at a time, so that
each has a buffer of its own."""

PROBE = 2e-3
"""Seconds that a tail loss probe comes after two round trips.  Published: Linux's TCP_TIMEOUT_MIN_US."""

TICK = 4e-3
"""Seconds of a tick of the kernel's timers: CONFIG_HZ=250.  Measured: steps of the time-outs of cut streams."""


def late(wait: float) -> float:
    """Return how much later than after *wait* seconds a timer of the kernel fires, on average.

    Published: Linux's timer wheel, whose steps are of one tick up to 64 and of eight times as much for each eight
    times that.
    """
    step = TICK
    while wait >= 64 * step:
        step *= 8.0
    return step / 2.0


class Streams:
    """The TCP streams of one direction between two endpoints.

    *trip* is the time of the way there and back, *answer* what an engine adds to it for each block, *rate* what the
    way carries at most.
    """

    def __init__(self, wire: NetworkLink, trip: float, answer: float, rate: float, lanes: int) -> None:
        self._trip = trip
        self._answer = answer
        self._rate = rate
        self._lanes = lanes
        self._segment = float(wire.segment)
        self._initial = float(wire.initial * wire.segment)
        self._most = wire.window * wire.segment / (wire.segment + OVERHEAD)
        self._filled = wire.filled
        self._least = wire.timeout  # of what is waited for an answer, without the round trip
        self._timeout = wire.timeout + trip
        self._window = self._initial
        self._since = -inf  # since when bytes have been under way without a pause
        self._used = -inf  # until when

    def start(self, now: float, blocks: int, nbytes: float) -> tuple[float, float]:
        """Let a transfer begin; return the least time of its bytes and what is added, without the last answer."""
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

    def busy(self, now: float) -> float:
        """Return for how many seconds bytes have been under way without a pause."""
        return max(0.0, min(now, self._used) - self._since) if self._used >= now else 0.0

    def repaired(self, now: float, end: float) -> float:
        """Return when a stream that is cut from *now* to *end* sends on, with a window of a segment that grows.

        - What is under way for longer than the cut is not lost, and acknowledged, so that the rest is sent again
          while it arrives (SACK, RFC 6675).
        - After two round trips the last segment is sent again (RFC 8985).  If that comes through, the retransmission
          timer runs from when the oldest was sent, a round trip before the cut.
        - If not, it runs from then, and each time twice as long (RFC 6298), until a segment comes through.
        - The answer to that one says that segments before the cut had arrived, so the time-out counts as spurious
          (F-RTO, RFC 5682).  New data would show what is lost; with a buffer too full for any, nothing is sent until
          the next probe, after two of a round trip that is 7 / 8 of what it was and 1 / 8 of what these segments
          took.
        """
        length, waiting, smooth, stuck = end - now, *self._queued(now)
        if waiting > length:
            return end + max(0.0, self.restart() - (waiting - length))
        wait = 2.0 * smooth + PROBE
        fires = wait + late(wait)
        if fires >= length:
            return now + max(fires + self._trip, self._least) + self.restart()
        wait = self._least + smooth
        fires += wait + late(wait)
        while fires < length:
            wait *= 2.0
            fires += wait
        if stuck:
            fires += self._trip + 2.0 * (smooth + fires / 8.0) + PROBE
        return now + fires + self.restart()

    def _queued(self, now: float) -> tuple[float, float, bool]:
        # What is under way grows until it is the largest window, and is less than that by turns from then on.  Of
        # what has arrived, the acknowledgements of half a round trip are lost; they are what the first answer makes
        # up for.
        most, queue = self._most / self._rate, QUEUE * self.busy(now)
        if 2.0 * queue < most:
            return 2.0 * queue, self._trip + queue, False
        filled = self._filled * most
        return filled, self._trip + min(queue, filled), filled - self._trip / 2.0 > WRITABLE * most

    def restart(self) -> float:
        """Return the seconds that a stream waits for acknowledgements until a window of one segment has grown."""
        return self._waits(self._segment, inf)[0]

    def _grow(self, now: float, nbytes: float, rate: float) -> float:
        before = self._after_idle(now)
        waits, window = self._waits(before, nbytes, rate)
        # it grows only as far as it is used
        self._window = min(self._most, max(before, min(window, 2.0 * nbytes)))
        return waits

    def _waits(self, window: float, nbytes: float, rate: float = 0.0) -> tuple[float, float]:
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


class HopChain:
    """A `NetworkLink` and all streams over it, which a cut of the link stops together."""

    def __init__(self, wire: NetworkLink) -> None:
        self.wire = wire
        self._streams: list[Streams] = []

    def streams(self, trip: float, answer: float, rate: float, lanes: int) -> Streams:
        """Return new `Streams`, with its arguments."""
        made = Streams(self.wire, trip, answer, rate, lanes)
        self._streams.append(made)
        return made

    def recovery(self, now: float, end: float) -> float:
        """Return when streams that are cut from *now* to *end* send on: those that are busy, or any that may be."""
        busy = [each for each in self._streams if each.busy(now) > 0.0] or self._streams
        return max((each.repaired(now, end) for each in busy), default=max(end, now + self.wire.timeout))
