# SPDX-License-Identifier: Apache-2.0
"""Times of calls on a device: medians of repeats, in a CUDA graph, launched one by one, or on the processor.

Weights and keys and values are cold in a real forward, since each layer has its own.  So a case
brings several copies of its inputs, together larger than the L2 cache, and all of them are in one
graph, one after the other.  On a processor it is the time that this thread computed: what others do
there counts for nothing.

Samples are sums over as many calls as take a while, by CUDA events around them, so neither the
resolution of the events nor a single launch counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

__all__ = ["COLD", "Stopwatch", "Timing", "copies"]

COLD = 192 << 20
"""Bytes that the copies of a case's inputs have together: three times the L2 cache of an H200."""

Call = Callable[[], object]


def copies(nbytes: int, device: str, most: int = 256) -> int:
    """Return how many copies of inputs of *nbytes* are needed so that none is in a GPU's cache when its turn comes.

    One on a processor, and at most *most*.
    """
    return 1 if device == "cpu" else max(1, min(most, -(-COLD // max(nbytes, 1))))


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median of *repeats* samples, and their quartiles."""

    seconds: float
    low: float
    high: float
    repeats: int


class Stopwatch:
    """Times calls on a device, and returns the median of a few samples.

    Args:
        device: "cuda" or "cpu".
        seconds: About how long a case takes, over all samples.
        repeats: Samples of a case; three of one that takes longer than *seconds* by itself.
        agree: Returns the largest of the values of all ranks that call together, so that they make
            the same number of calls.
    """

    def __init__(
        self, device: str, seconds: float = 0.02, repeats: int = 7, agree: Callable[[float], float] = float
    ) -> None:
        self.device = device
        self._seconds = seconds
        self._repeats = repeats
        self._agree = agree

    def graph(self, calls: Sequence[Call]) -> Timing:
        """Return the time of one of *calls*, all captured in a CUDA graph.

        On a processor they run one after the other.
        """
        if self.device == "cpu":
            return self.eager(calls)
        import torch

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls[:3]:
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(max(1, 8 // len(calls))):
                for call in calls:
                    call()
        loops = len(calls) * max(1, 8 // len(calls))
        timing = self._on_gpu(graph.replay, loops)
        del graph
        return timing

    def eager(self, calls: Sequence[Call]) -> Timing:
        """Return the time of one of *calls*, launched one by one by this thread."""
        if self.device == "cpu":
            return self._on_host(calls)

        def every() -> None:
            for call in calls:
                call()

        every()
        return self._on_gpu(every, len(calls))

    def _on_gpu(self, run: Callable[[], object], loops: int) -> Timing:
        # It is taken by events around as many runs as take a while.
        import torch

        def elapsed(count: int) -> float:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(count):
                run()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) * 1e-3

        once = max(elapsed(1), 1e-6)
        once = self._agree(max(elapsed(1), 1e-6))  # the first replay uploads the graph
        count = max(1, round(self._seconds / self._repeats / once))
        # a case of many milliseconds needs fewer samples: its spread is small
        repeats = self._repeats if once < self._seconds else 3
        return _timing([elapsed(count) / count / loops for _ in range(repeats)])

    def _on_host(self, calls: Sequence[Call]) -> Timing:
        def elapsed(count: int) -> float:
            begin = time.thread_time()
            for _ in range(count):
                for call in calls:
                    call()
            return time.thread_time() - begin

        elapsed(1)
        once = self._agree(max(elapsed(1), 1e-7))
        count = max(1, round(self._seconds / self._repeats / once))
        return _timing([elapsed(count) / count / len(calls) for _ in range(self._repeats)])


def _timing(samples: Sequence[float]) -> Timing:
    ordered = sorted(samples)
    quarter = len(ordered) // 4
    return Timing(median(ordered), ordered[quarter], ordered[-1 - quarter], len(ordered))
