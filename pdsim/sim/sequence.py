# SPDX-License-Identifier: Apache-2.0
"""Equal writes to one peer, one after the other, whose times are all known when the first is posted.

A chunk that goes in slices, or plane by plane, is up to hundreds of writes, each posted when the one before is
complete (`SimWriteSequence`).  While nothing meets them, their times follow from the first
(`Steps`), so they are one `Series` and cost one event.  They are reported together, at the
end of the last.  Whatever could change their times, or could see that they are not reported yet (another post of the
endpoint, the end of either side, a flow on their links), *cuts* the series first: what is complete is reported, the
write under way becomes a transfer of its own, and the rest is posted one by one until another series may begin.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from simpy.events import NORMAL

from pdsim.core.clock import LAST, Alarm
from pdsim.sim.hosts import ScheduledArrivals
from pdsim.sim.network import Plan
from pdsim.transfer import WriteSequence

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdsim.core.clock import Clock
    from pdsim.sim.network import Flow, Network, Path, Stages, Steps, Times
    from pdsim.transfer import Batch, Batches, Endpoint, Peer, Transfer

    Foresee = Callable[[Peer, Batch, int, bytes, str, Callable[[int, int, Transfer | None], None]], "Series | None"]

__all__ = ["Series", "SimWriteSequence"]


class SimWriteSequence(WriteSequence):
    """A `pdsim.transfer.WriteSequence` that posts many writes as one `Series` where their times are known.

    A series that is refused, or cut, is asked for again after a pause, counted in writes, that doubles each time.
    """

    def __init__(
        self,
        clock: Clock,
        endpoint: Endpoint,
        foresee: Foresee,
        peer: Peer,
        batches: Batches,
        notify: bytes,
        label: str,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        super().__init__(clock, endpoint, peer, batches, notify, label, progress)
        self._foresee = foresee
        self._series: Series | None = None  # that is under way
        self._pause = 1
        self._ask = 0  # how many writes are done when a series is asked for again

    def stop(self) -> None:
        """Let the write that is under way be the last one."""
        super().stop()
        if self._series is not None:
            self._series.cut()

    def _next(self) -> None:
        left = len(self._batches) - self.done
        if self.done >= self._ask and left > 1 and not self._stopped:
            batch = self._batches[self.done]
            self._series = self._foresee(self._peer, batch, left, self._notify, self._label, self._on_series)
            if self._series is not None:
                return
            self._back_off()
        super()._next()

    def _back_off(self) -> None:
        self._pause *= 2
        self._ask = self.done + self._pause

    def _on_series(self, count: int, nbytes: int, transfer: Transfer | None) -> None:
        self._series = None
        if count:
            self._count(count, nbytes)
        if transfer is None:
            super()._next()
            return
        if count >= self._pause:
            self._pause = 1
        self._back_off()
        self._follow(transfer)


class Series:
    """Equal writes of which *steps* are known.

    ``report(last, submitted, posted, ended, complete)`` is called with the times of those complete, *last* if none
    is under way, and ``resume(stages, flow)`` with the times of the one that is and its flow, if that is on the
    wire: it returns that write as a transfer.  *over* is called at last, with how many are complete and the transfer
    under way, which is None at the end.  All go to *peer*.
    """

    def __init__(
        self,
        network: Network,
        steps: Steps,
        peer: str,
        report: Callable[[bool, Times, Times, Times, Times], None],
        resume: Callable[[Stages, Flow | None], Transfer],
        over: Callable[[int, Transfer | None], None],
    ) -> None:
        self.peer = peer
        self._hardware = network.clock
        self._foreseen = network.foreseen
        self._steps = steps
        self._report = report
        self._resume = resume
        self._over = over
        self._stages: tuple[Times, ...] = ()
        self.notifications = ScheduledArrivals()
        self._plan: Plan
        self._alarm: Alarm | None = None

    def begin(self, path: Path, size: float, limit: float) -> bool:
        """Begin with the first write now, flows of *size* bytes over *path*; return whether all times are known.

        They are not if a write takes more than half of *limit*, so that it may time out once something meets it.
        """
        now = self._hardware.now
        self._plan = Plan(path, size, self._steps, now, self._expect, self._on_cut)
        if not self._foreseen.add(self._plan):
            return False
        self._expect()
        if self.notifications.times[0] - now > limit / 2:
            self._foreseen.drop(self._plan, 0)
            self._plan.forget()
            self._alarm = None
            return False
        return True

    def cut(self) -> None:
        """Report what is complete, and make the write under way a transfer."""
        self._foreseen.cut([self._plan])

    def _expect(self) -> None:
        self._stages = self._steps.stages(self._plan.start, self._plan.seconds)
        self.notifications.times = self._stages[-1].tolist()
        ended, complete = self._plan.last, self.notifications.times[-1]
        # without latency it completes with its flow, which is after all else of the instant
        self._alarm = Alarm(self._hardware, self._on_end, LAST if ended == complete else NORMAL)
        self._alarm.arm(complete)

    def _on_end(self, alarm: Alarm) -> None:
        if alarm is self._alarm:
            self._alarm = None
            count = len(self.notifications.times)
            self._foreseen.drop(self._plan, count)
            submitted, posted, _, ended, complete = self._stages
            self._report(True, submitted, posted, ended, complete)
            self._plan.forget()
            self._over(count, None)

    def _on_cut(self, flow: Flow | None) -> None:
        self._alarm = None
        count = bisect_left(self.notifications.times, self._hardware.now)
        self._report(False, *(self._stages[column][:count] for column in (0, 1, 3, 4)))
        submitted, posted, begin, end, complete = (float(column[count]) for column in self._stages)
        self._plan.forget()
        self._over(count, self._resume((submitted, posted, begin, end, complete), flow))
