# SPDX-License-Identifier: Apache-2.0
"""Metrics of servers: Prometheus text, read before, during and after a workload."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from backends.live.http import LiveServer, body_of

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_BOUND = re.compile(r'(?:^|,)le="([^"]*)"')


@dataclass(frozen=True)
class Histogram:
    """Observations of one quantity, over all labels; *buckets* are cumulative, as Prometheus has them."""

    total: float = 0.0
    count: float = 0.0
    buckets: Mapping[float, float] = field(default_factory=dict)  # upper bound: observations up to it

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count > 0 else None

    def quantile(self, share: float) -> float | None:
        """Return the value that *share* of the observations do not exceed; None of no observations.

        Interpolates within a bucket as Prometheus does; in the last one, which has no upper bound, it is the bound
        below.

        >>> Histogram(total=9.0, count=10, buckets={1.0: 5, 2.0: 10, math.inf: 10}).quantile(0.75)
        1.5
        """
        if self.count <= 0 or not self.buckets:
            return None
        rank, below, before = share * self.count, 0.0, 0.0
        for bound in sorted(self.buckets):
            until = self.buckets[bound]
            if until >= rank:
                if math.isinf(bound) or until == before:
                    return below
                return below + (bound - below) * (rank - before) / (until - before)
            below, before = bound, until
        return below


@dataclass(frozen=True)
class Page:
    """One reading of a server's metrics, each summed over its labels."""

    gauges: dict[str, float] = field(default_factory=dict)  # values of the moment, such as running requests
    counters: dict[str, float] = field(default_factory=dict)  # since the start, with and without ``_total``
    histograms: dict[str, Histogram] = field(default_factory=dict)  # since the start


def parse(text: str) -> Page:
    """Return the numbers in the Prometheus *text*, summed over labels; lines of another format are skipped.

    >>> parse('# TYPE running gauge' + chr(10) + 'running{rank="0"} 2' + chr(10) + 'running{rank="1"} 3').gauges
    {'running': 5.0}
    """
    kinds: dict[str, str] = {}
    numbers: dict[str, float] = {}
    buckets: dict[str, dict[float, float]] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = [*line.split(maxsplit=3), ""][:4]
            kinds[name] = kind
        elif (match := _SAMPLE.match(line)) and not line.startswith("#"):
            name, labels, written = match.groups()
            try:
                value = float(written)
            except ValueError:
                continue
            if name.endswith("_bucket") and (bound := _BOUND.search(labels or "")):
                into = buckets.setdefault(name.removesuffix("_bucket"), {})
                at = float(bound.group(1))
                into[at] = into.get(at, 0.0) + value
            else:
                numbers[name] = numbers.get(name, 0.0) + value
    page = Page({}, {}, {})
    for name, kind in kinds.items():
        if kind == "histogram":
            total, count = (numbers.get(f"{name}_{part}", 0.0) for part in ("sum", "count"))
            page.histograms[name] = Histogram(total, count, buckets.get(name, {}))
        elif kind == "gauge" and name in numbers:
            page.gauges[name] = numbers[name]
        elif kind == "counter":
            page.counters.update({key: numbers[key] for key in (name, f"{name}_total") if key in numbers})
    return page


def difference(before: Page, after: Page) -> Page:
    """Return what *after* counted that *before* had not; gauges are those of *after*."""
    histograms = {}
    for name, now in after.histograms.items():
        then = before.histograms.get(name, Histogram())
        buckets = {bound: count - then.buckets.get(bound, 0.0) for bound, count in now.buckets.items()}
        histograms[name] = Histogram(now.total - then.total, now.count - then.count, buckets)
    counters = {name: value - before.counters.get(name, 0.0) for name, value in after.counters.items()}
    return Page(after.gauges, counters, histograms)


@dataclass(frozen=True, slots=True)
class MetricSample:
    """One number that a server reported at one time; a row of ``metrics.parquet``."""

    time: float  # seconds on the client's clock
    server: str
    metric: str  # the server's own name of it
    value: float


class Sampler:
    """Reads the metrics of *servers* every so many seconds while its block runs, and at both ends.

    A server without metrics has no samples, and that is no error.
    """

    def __init__(self, opened: Any, servers: Sequence[LiveServer], every: float) -> None:
        self.samples: list[MetricSample] = []
        self.first: dict[str, Page] = {}
        self.last: dict[str, Page] = {}
        self.restarted: list[str] = []  # servers with a counter that fell: they were started again meanwhile
        self._session, self._servers, self._every = opened, servers, every
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Sampler:
        await self._read()
        self.first = dict(self.last)
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._read()

    def reported(self) -> dict[str, Page]:
        """Return the counts of each server in between; those of a restarted server are since its restart."""
        return {
            name: difference(Page() if name in self.restarted else self.first.get(name, Page()), page)
            for name, page in self.last.items()
        }

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._every)
            await self._read()

    async def _read(self) -> None:
        await asyncio.gather(*map(self._read_one, self._servers))

    async def _read_one(self, server: LiveServer) -> None:
        import aiohttp

        now = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(5.0), self._session.get(f"{server.url}/metrics") as response:
                if response.status != 200:
                    return
                page = parse((await body_of(response)).decode(errors="replace"))
        except (aiohttp.ClientError, OSError, ValueError):  # TimeoutError is an OSError
            return
        before = self.last.get(server.name, Page()).counters
        fell = any(page.counters.get(key, 0.0) < was for key, was in before.items())
        if fell and server.name not in self.restarted:
            self.restarted.append(server.name)
        self.last[server.name] = page
        of_histograms = {
            f"{name}_{part}": value
            for name, one in page.histograms.items()
            for part, value in (("sum", one.total), ("count", one.count))
        }
        for name, value in (*page.gauges.items(), *page.counters.items(), *of_histograms.items()):
            if ":" in name and not name.endswith("_created") and math.isfinite(value):
                self.samples.append(MetricSample(now, server.name, name, value))
