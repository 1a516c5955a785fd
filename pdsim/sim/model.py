# SPDX-License-Identifier: Apache-2.0
"""A modelled job: the machine, its ranks, and the run from the first event to the end of the last rank."""

from __future__ import annotations

import gc
import importlib
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from simpy.core import EmptySchedule

from pdsim.core.errors import ConfigError
from pdsim.hardware.costs import Jitter
from pdsim.sim.collective import SharedGroup, join
from pdsim.sim.endpoint import SimEndpoint
from pdsim.sim.faults import CardOutage, Chance, Draws, Faults, Observer
from pdsim.sim.hosts import HostLatency, JobClock, RankClock, ScheduledComputations, SimChannel
from pdsim.sim.memory import DeviceMemory, SimDevice
from pdsim.sim.network import Network
from pdsim.sim.posting import Fabric
from pdsim.sim.topology import SideTraffic, Site, Topology
from pdsim.transfer import Program
from pdsim.transfer.job import Outcome, Rank, RankResult, RankSpec, ranks_named
from pdsim.transfer.log import Compact, TransferLog, joined, plain

if TYPE_CHECKING:
    from simpy.events import Event

    from pdsim.core.clock import Clock
    from pdsim.hardware.costs import Collective, Engine
    from pdsim.hardware.machine import LinkChange, Machine
    from pdsim.transfer import Spill
    from pdsim.transfer.job import SampleRow


_log = logging.getLogger(__name__)

STRIDE = 16384
"""Events between two calls of `Model.progress`."""


@dataclass(frozen=True)
class Model:
    """The simulated `pdsim.transfer.job.Target`: *machine* and *engine* on a virtual clock.

    *memory* is ``"timing"`` (sizes only) or ``"tracked"`` (contents too).  Nothing is left to chance but *faults*
    and *jitter*, which are drawn from *seed*: equal arguments give equal outcomes, bit for bit, on any machine.
    Ranks that still run after *limit* seconds end with an error that names them.  With *samples*, the use of links,
    memories and what programs register (`Rank.gauge`) is kept at so many instants or up to twice as many, but not
    with ``faults.shuffle``.  ``progress(now, done, of)`` is called now and then with what a rank has counted
    (`Rank.counts`).  With *journal*, records and rows of requests are left there, so that memory does not grow.
    Network cards fail and work again as *outages* say.
    """

    machine: Machine
    engine: Engine
    memory: str = "timing"
    seed: int = 0
    progress: Callable[[float, int, int], None] | None = None
    faults: Faults | None = None
    limit: float = inf
    observer: Observer | None = None
    collective: Collective | None = None
    jitter: Jitter | None = None
    samples: int = 0
    journal: JobJournal | None = None
    outages: Sequence[CardOutage] = ()

    def __post_init__(self) -> None:
        if self.memory not in ("timing", "tracked"):
            raise ConfigError(f"memory={self.memory!r} must be 'timing' or 'tracked'")
        if not self.limit > 0:
            raise ConfigError(f"limit={self.limit} must be > 0 seconds")

    def run(
        self,
        ranks: Sequence[RankSpec],
        kill: Mapping[str, float | Sequence[float]] | None = None,
        restart: Mapping[str, float | Sequence[float]] | None = None,
    ) -> Outcome:
        """Run *ranks* until all have ended; see `pdsim.transfer.job.Target`.  A rank may have several times here.

        A program that raises ends its own rank only.  When nothing is scheduled any more, the ranks that still wait
        end with an error.  Raise a `ConfigError` for a name that occurs twice or is not there, a place that the
        machine does not have, or a program that cannot be imported.
        """
        often, *rest = gc.get_threshold()
        gc.set_threshold(max(often, 70_000), *rest)  # at 65,000 transfers under way collections took half the time
        try:
            return _ModelJob(self, ranks, _times(kill or {}), _times(restart or {})).run()
        finally:
            gc.set_threshold(often, *rest)

    def using(self, engine: Engine) -> Model:
        return replace(self, engine=engine)


def _times(moments: Mapping[str, float | Sequence[float]]) -> dict[str, Sequence[float]]:
    return {name: at if isinstance(at, Sequence) else (at,) for name, at in moments.items()}


class JobJournal(Protocol):
    """Where a modelled job leaves what it need not keep in memory: `pdsim.results.store`."""

    @property
    def transfers(self) -> Spill:
        """Blocks of records."""

    @property
    def requests(self) -> Spill:
        """Rows of requests that are over."""


class _Records:
    def __init__(self, rank: str = "", model: Model | None = None, sampling: Sampling | None = None) -> None:
        journal = None if model is None else model.journal
        self.transfers = TransferLog(rank=rank, spill=None if journal is None else journal.transfers)
        self.transfer = self.transfers.append
        self.series = self.transfers.extend_run
        self.spill = None if journal is None else journal.requests
        self._sampling = sampling
        self._observer = None if model is None else model.observer

    def gauge(self, kind: str, name: str, read: Callable[[], float]) -> None:
        if self._sampling is not None:
            self._sampling.gauges[kind, name] = read

    def inspect(self, program: object) -> None:
        if self._observer is not None:
            self._observer.joined(program)


class _ModelJob:
    def __init__(
        self,
        model: Model,
        specs: Sequence[RankSpec],
        kill: Mapping[str, Sequence[float]],
        restart: Mapping[str, Sequence[float]],
    ) -> None:
        for what, times in (("kill", kill), ("restart", restart)):
            ranks_named([spec.name for spec in specs], **{what: {name: min(at) for name, at in times.items()}})
        self._specs = {spec.name: (spec, _load(spec)) for spec in specs}
        faults, jitter = model.faults, model.jitter
        shuffled = faults is not None and faults.shuffle
        self._model = model
        self._chance = Chance(faults, model.seed) if faults is not None else None
        self._clock = JobClock(self._chance.ties if self._chance is not None and shuffled else None)
        self._network = Network(self._clock)
        self._topology = Topology(model.machine, self._network)
        draws = Draws(jitter, model.seed) if jitter is not None and jitter != Jitter() else None
        ranks = Counter(spec.place for spec in specs if spec.place.gpu is not None)
        crowded = [place for place, count in ranks.items() if count > 1]
        sampled = model.samples and not shuffled
        self._sampling = Sampling(self._clock, self._network, model.samples) if sampled else None
        shared = self._clock, self._network, self._topology, model.engine, self._chance, model.observer
        self._fabric = Fabric(*shared, draws, crowded)
        self._steady = not (model.observer or self._chance or draws or model.outages or kill or restart)
        self._groups: dict[tuple[str, ...], SharedGroup] = {}
        self._channels: dict[str, SimChannel] = {}
        self._scheduled: dict[Hashable, list[ScheduledComputations]] = {}
        self._memories: dict[str, DeviceMemory] = {}
        self._ranks: dict[str, Any] = {}  # by name: the `Rank` of the last incarnation, all of whose parts are ours
        self._live: dict[str, Any] = {}  # those that have not ended
        self._results: dict[str, RankResult] = {}
        for name in self._specs:
            self._start(name)
        for times, then in ((kill, self._kill), (restart, self._restart)):
            for name, moments in times.items():
                for at in moments:
                    self._at(at, then, name)
        if isfinite(model.limit):
            self._at(
                model.limit, self._end_all, "Overrun", f"still run after {model.limit:g} s, the limit of the model"
            )
        for outage in model.outages:
            self._at(outage.start, self._fabric.fail, (outage.node, outage.card))
            self._at(outage.end, self._fabric.repair, (outage.node, outage.card))
        for change in model.machine.link.changes if model.machine.link is not None else ():
            self._at(change.start, self._change, change)
        if faults is not None:
            self._plan(faults)
        if self._chance is not None and faults is not None and isfinite(faults.until):
            self._at(faults.until, self._chance.calm)

    def _at(self, when: float, function: Callable[..., object], *arguments: Any) -> None:
        def call(_: Any) -> None:
            function(*arguments)

        self._clock.call_at(when, call, None)

    # --- what happens to links and ranks ---

    def _change(self, change: LinkChange) -> None:
        assert self._topology.chain is not None
        now = self._clock.now
        end = self._topology.chain.recovery(now, change.end) if change.kind == "cut" else change.end
        for link in self._network.links:
            if link.name in (f"link{change.hop}.up", f"link{change.hop}.down"):
                self._at(end, self._network.set_capacity, link, link.nominal)
                self._network.set_capacity(link, link.nominal * change.share)

    def _plan(self, faults: Faults) -> None:
        links = {link.name: link for link in self._network.links}
        slow_ranks = {slow.rank: slow.start for slow in faults.slow}
        pauses = {pause.rank: pause.start for pause in faults.pauses}
        ranks_named(tuple(self._specs), **{"faults.slow": slow_ranks, "faults.pauses": pauses})
        for pause in faults.pauses:
            self._at(pause.start, self._pause, pause.rank, pause.end)
        for slow in faults.slow:
            self._at(slow.start, self._slow, slow.rank, slow.factor)
            self._at(slow.end, self._slow, slow.rank, 1.0)
        for squeeze in faults.squeezes:
            link = links.get(squeeze.link)
            if link is None:
                raise ConfigError(f"faults.squeezes name link {squeeze.link!r}; there are {', '.join(links)}")
            self._at(squeeze.start, self._network.set_capacity, link, link.capacity * squeeze.factor)
            self._at(squeeze.end, self._network.set_capacity, link, link.capacity)

    def _slow(self, name: str, factor: float) -> None:
        if name in self._live:
            self._live[name].device.slowness = self._live[name].endpoint.poster.slowness = factor

    def _pause(self, name: str, end: float) -> None:
        if name in self._live:
            self._live[name].clock.pause(end)

    def _kill(self, name: str) -> None:
        if name in self._live:
            self._end(name, error=f"Killed: {name} was killed at {self._clock.now:g} s, as asked", by_force=True)

    def _restart(self, name: str) -> None:
        if name not in self._live:
            self._start(name)

    # --- the run ---

    def run(self) -> Outcome:
        while self._live:
            self._turn()
        return self._outcome()

    def _turn(self) -> None:
        try:
            self._clock.turn(STRIDE, self._live, lambda clock, error: self._fail(clock.name, error))
        except EmptySchedule:
            self._end_all("Deadlock", "wait for events that nothing will trigger any more")
        if self._model.progress is not None:
            read, of = next((rank.counted for rank in self._ranks.values() if rank.counted), (int, 0))
            self._model.progress(self._clock.now, read(), of)

    def _start(self, name: str) -> None:
        (spec, function), model = self._specs[name], self._model
        clock = RankClock(self._clock, name)
        site = self._topology.site(spec.place)
        host, observer = model.machine.host, model.observer
        copies = host.copies if site.gpu is None or model.machine.gpu is None else model.machine.gpu.copies
        host_latency = HostLatency(self._clock, host)
        traffic = SideTraffic.at(site, clock, self._network, self._topology)
        link = self._topology.memory(site)
        device = SimDevice(self._memory(site), clock, self._network, link, copies, host_latency, traffic)
        device.watch = observer.copied if observer is not None else None
        device.steady, device.scheduled = self._steady, self._scheduled
        records = _Records(name, model, self._sampling)
        endpoint = SimEndpoint(self._fabric, name, clock, device, site, records)
        hold = self._chance.message if self._chance is not None else None
        watch = observer.sent if observer is not None else None
        delay = self._delay if model.machine.link is not None else None
        channel = SimChannel(name, host, self._clock, clock, self._channels, hold, watch, delay, host_latency)
        device.latency = channel.latency_from
        names = tuple(self._specs)
        peers = names[: (place := names.index(name))] + names[place + 1 :]
        rank = Rank(name, clock, device, endpoint, channel, records, peers)
        if (library := model.collective) is not None:
            own = clock, device, records
            rank.groups = lambda names: join(self._groups, self._fabric, library, names, own)
        self._ranks[name] = self._live[name] = rank
        process = clock.process(_main(function, rank, _plain(dict(spec.arguments))))
        process.callbacks.append(lambda event: self._on_end(name, event))

    def _delay(self, sender: str, receiver: str) -> float:
        one, other = (Site(self._specs[name][0].place.node, None, None) for name in (sender, receiver))
        return self._topology.delay(one, other)

    def _memory(self, site: Site) -> DeviceMemory:
        memory = self._memories.get(site.name)
        if memory is None:
            machine = self._model.machine
            size = machine.host.memory if site.gpu is None or machine.gpu is None else machine.gpu.memory
            memory = DeviceMemory(site.name, size, tracked=self._model.memory == "tracked")
            self._memories[site.name] = memory
            if self._sampling is not None:
                self._sampling.gauges["pool", site.name] = lambda: memory.used / memory.capacity
        return memory

    def _on_end(self, name: str, event: Event) -> None:
        if event.ok:
            self._end(name, value=event.value)
            return
        event.defused = True
        assert isinstance(event.value, BaseException)
        self._fail(name, event.value)

    def _fail(self, name: str, error: BaseException) -> None:
        if not isinstance(error, Exception):
            raise error  # KeyboardInterrupt and the like are for us
        _log.debug("rank %s ended with an error", name, exc_info=error)
        self._end(name, error=f"{type(error).__name__}: {error}")

    def _end_all(self, kind: str, why: str) -> None:
        names = ", ".join(self._live)
        for name in tuple(self._live):
            self._end(name, error=f"{kind}: {names} {why}")

    def _end(self, name: str, value: Any = None, error: str = "", by_force: bool = False) -> None:
        # *by_force* it is killed: nobody is left to be told of its own transfers.  A rank that had ended before, and
        # was started again, has the transfers of all its incarnations.
        rank = self._live.pop(name)
        rank.clock.stop()
        rank.channel.close()
        if by_force:
            rank.endpoint.kill()
        else:
            rank.endpoint.close()
        rank.device.close()
        for group in self._groups.values():
            member = group.members.get(name)
            if member is not None and member.clock is rank.clock:  # not one that others, started again, wait in
                group.leave(name)
        before, transfers = self._results.get(name), rank.recorder.transfers
        if before is not None:
            transfers = joined([before.transfers, transfers])
        self._results[name] = RankResult(name, value, error, rank.endpoint.engine, transfers, rank.channel.refused)
        if self._model.observer is not None:
            self._model.observer.ended(name, error)

    def _outcome(self) -> Outcome:
        # The use of a link is what it carried over what it could have carried in that time, of a memory its peak.
        seconds, links = self._clock.now, {}
        for link in self._network.links:
            carried = link.carried
            if carried and seconds:
                # nominal: a link that is stalled when the job ends carries nothing at that instant
                links[link.name] = carried / (link.nominal * seconds)
        memories = self._memories.items()
        pools = {f"{name}/{pool}": peak for name, memory in memories for pool, peak in memory.peaks().items()}
        results = {name: self._results[name] for name in self._specs}
        samples = list(self._sampling.rows()) if self._sampling is not None else []
        return Outcome(results, seconds, links, pools, self._clock.events, samples)


def _load(spec: RankSpec) -> Callable[..., Program]:
    module, _, name = spec.program.partition(":")
    try:
        function: Callable[..., Program] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"program {spec.program!r} of rank {spec.name!r} is no 'package.module:function': {error}"
        ) from error
    return function


def _main(function: Callable[..., Program], rank: Rank, arguments: Mapping[str, Any]) -> Program:
    return _plain((yield from function(rank, **arguments)))


def _plain(value: Any) -> Any:
    # What would cross to another process; tables stay as they are.
    kept = (
        {name: part for name, part in value.items() if isinstance(part, Compact)} if isinstance(value, dict) else {}
    )
    rest = {name: part for name, part in value.items() if name not in kept} if kept else value
    crossed = msgspec.msgpack.decode(msgspec.msgpack.encode(rest, enc_hook=plain))
    return crossed | kept if kept else crossed


FIRST = 1e-4
"""Seconds between samples at first."""


class Sampling:
    """Keeps *count* to twice as many instants of a job, evenly spread.

    Links are sampled by what they have carried since the start, so a sample is the mean since the one before, also
    after every second one was dropped; *gauges*, by kind and name, are read at the instant.
    """

    def __init__(self, clock: Clock, network: Network, count: int) -> None:
        self.gauges: dict[tuple[str, str], Callable[[], float]] = {}
        self._clock = clock
        self._network = network
        self._most = 2 * count
        self._interval = FIRST
        self._times: list[float] = []
        self._carried: list[list[float]] = []  # by instant, of every link: bytes until then
        self._values: dict[tuple[str, str], list[float | None]] = {}
        self._tick(None)

    def _tick(self, _: object) -> None:
        # Once nothing else is scheduled it does not come back: its own events must not keep a job alive.
        self._read()
        if len(self._times) >= self._most:
            self._interval *= 2.0
            for kept in (self._times, self._carried, *self._values.values()):
                del kept[1::2]  # type: ignore[attr-defined]
        if self._clock.peek() < inf or len(self._times) == 1:  # else nothing happens any more, which must be noticed
            self._clock.call_at(self._clock.now + self._interval, self._tick, None)

    def _read(self) -> None:
        for key, read in self.gauges.items():
            self._values.setdefault(key, [None] * len(self._times)).append(read())
        self._times.append(self._clock.now)
        self._carried.append(self._network.carried())

    def rows(self) -> Iterator[SampleRow]:
        """Yield kind (``link`` or a gauge's), name, time and share of capacity of every sample.

        Links that carried nothing have no rows, gauges none from before they were made.
        """
        if self._clock.now > self._times[-1]:
            self._read()
        for index, link in enumerate(self._network.links):
            # the share is of the nominal capacity, also while a fault has the link squeezed
            carried = [each[index] if index < len(each) else 0.0 for each in self._carried]
            before, last = 0.0, 0.0
            for time, total in zip(self._times, carried, strict=True):
                if carried[-1] and link.nominal:
                    share = (total - last) / (link.nominal * (time - before)) if time > before else 0.0
                    yield "link", link.name, time, max(share, 0.0)
                before, last = time, total
        for (kind, name), values in self._values.items():
            for time, value in zip(self._times, values, strict=False):
                if value is not None:
                    yield kind, name, time, value
