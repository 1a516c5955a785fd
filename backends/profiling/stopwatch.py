# SPDX-License-Identifier: Apache-2.0
"""Times of calls on a device: medians of repeats, in a CUDA graph, launched one by one, or on the processor.

Weights and keys and values are cold in a real forward, since each layer has its own.  So a case brings several
copies of its inputs, together larger than the L2 cache, all of them in one graph.  Samples are sums over as many
calls as take a while, by CUDA events around them; on a processor they are the time that this thread computed.
"""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import torch

COLD = 192 << 20  # bytes that the copies of a case's inputs have together: three times the L2 cache of an H200
MOST = 256  # copies, of inputs that are small
Call = Callable[[], object]


def copies(nbytes: int, device: str, most: int) -> int:
    """Return how many copies of inputs of *nbytes* it takes for none to be in a GPU's cache at its turn."""
    return 1 if device == "cpu" else max(1, min(most, -(-COLD // max(nbytes, 1))))


class Timing(NamedTuple):
    """Seconds of one call: the median of *repeats* samples, and their quartiles."""

    seconds: float
    low: float
    high: float
    repeats: int


class Stopwatch:
    """Times calls on *device*, "cuda" or "cpu": the median of *repeats* samples, *seconds* or so together.

    *agree* returns the largest of the values of all ranks that call together, so that they make the same number of
    calls.
    """

    def __init__(
        self, device: str, seconds: float = 0.02, repeats: int = 7, agree: Callable[[float], float] = float
    ) -> None:
        self.device = device
        self._seconds = seconds
        self._repeats = repeats
        self._agree = agree

    def graph(self, calls: Sequence[Call]) -> Timing:
        """Return the time of one of *calls*, all captured in a CUDA graph; on a processor, one after the other."""
        if self.device == "cpu":
            return self.eager(calls)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls[:3]:
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph, rounds = torch.cuda.CUDAGraph(), max(1, 8 // len(calls))
        with torch.cuda.graph(graph):
            for _ in range(rounds):
                for call in calls:
                    call()
        timing = self._on_gpu(graph.replay, len(calls) * rounds)
        del graph
        return timing

    def eager(self, calls: Sequence[Call]) -> Timing:
        """Return the time of one of *calls*, launched one by one by this thread."""

        def every() -> None:
            for call in calls:
                call()

        every()
        return self._on_host(every, len(calls)) if self.device == "cpu" else self._on_gpu(every, len(calls))

    def _on_gpu(self, run: Call, loops: int) -> Timing:
        def elapsed(count: int) -> float:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(count):
                run()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) * 1e-3

        elapsed(1)  # the first replay uploads the graph
        once = self._agree(max(elapsed(1), 1e-6))
        # a case of many milliseconds needs fewer samples: its spread is small
        return self._timing(elapsed, once, loops, self._repeats if once < self._seconds else 3)

    def _on_host(self, run: Call, loops: int) -> Timing:
        def elapsed(count: int) -> float:
            begin = time.thread_time()
            for _ in range(count):
                run()
            return time.thread_time() - begin

        return self._timing(elapsed, self._agree(max(elapsed(1), 1e-7)), loops, self._repeats)

    def _timing(self, elapsed: Callable[[int], float], once: float, loops: int, repeats: int) -> Timing:
        count = max(1, round(self._seconds / self._repeats / once))
        samples = sorted(elapsed(count) / count / loops for _ in range(repeats))
        quarter = repeats // 4
        return Timing(median(samples), samples[quarter], samples[-1 - quarter], repeats)
