# SPDX-License-Identifier: Apache-2.0
"""Find the most requests a second that given GPUs serve under an SLO, or the fewest GPUs that serve a given rate.

Deployments differ in parallelism, P:D ratio and copies; colocated engines are among them.  Closed form (`shapes`)
rules out what cannot reach the best found so far, simulations (`search`) decide about the rest, most promising
first, and the best are simulated again with more requests.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

from experiments.capacity import answer
from experiments.capacity.answer import Entry, Found
from experiments.capacity.search import LEAST, Capacity, Plan, Search, Shape, configured, listed, plans, served
from experiments.jobs import Parts
from pdsim.config import Config, ExperimentOptions, canonical
from pdsim.core.errors import ConfigError, RunWarning
from pdsim.core.progress import ShowProgress
from pdsim.core.units import Frequency, NotNegative, PositiveInt
from pdsim.results.evidence import of_servers
from pdsim.results.record import Result
from pdsim.serving.requests import RequestTable
from pdsim.serving.settings import Slo
from pdsim.serving.workload import draw
from pdsim.sweep.executors import interrupts_blocked
from pdsim.transfer.job import Target
from pdsim.version import __version__

TARGETS = ("model",)

_WAVE = 4
"""Deployments that are searched before the best of them rules out others, on any number of processes."""

_SEARCH, _AGAIN = 6, 3
"""Simulations of a search, and of one that begins at a known answer, about: for the time that is left."""


@dataclass(frozen=True, kw_only=True)
class CapacityOptions(ExperimentOptions):
    """What is compared and how finely.

    More *requests* narrow the interval of each probe; they should be hundreds.
    """

    name: str = "capacity"
    rate: Frequency = 0.0  # requests a second that the fewest GPUs are sought for; 0: the highest rate of all GPUs
    # disaggregated, colocated, or both
    deployment: Annotated[str, "one of any, disaggregated, colocated"] = "any"
    # tensor parallelism of prefill instances, and of colocated engines
    prefill_tp: Annotated[tuple[PositiveInt, ...], "non-empty"] = (1, 2, 4, 8)
    decode_tp: Annotated[tuple[PositiveInt, ...], "non-empty"] = (1, 2, 4, 8)  # and of decode instances
    # of either side, in every combination that fits, and colocated engines
    instances: Annotated[tuple[PositiveInt, ...], "non-empty"] = (1, 2, 3, 4, 5, 6, 7, 8)
    # other hw whose GPUs prefill may have, on nodes of its own: 8xb200; hw.nodes counts both kinds
    prefill_hw: tuple[str, ...] = ()
    prefill_prices: tuple[NotNegative, ...] = ()  # of a GPU of each of those for an hour, beside hw.price
    attainment: Annotated[float, "> 0 and < 1"] = 0.9  # share of requests that must meet the SLO
    requests: Annotated[int, ">= 100"] = 200  # of a probe
    finalists: PositiveInt = 3  # deployments that are simulated again, with more requests and half the tolerance
    final_requests: Annotated[int, ">= 100"] = 1000  # of a probe of those
    warmup: Annotated[float, ">= 0 and < 1"] = 0.1  # share of them, the first, that do not count
    tolerance: Annotated[float, "> 0 and < 1"] = 0.08  # of the load, to which the search goes on
    start: Annotated[float, "> 0 and < 1"] = 0.6  # load of the first probe of the first deployments
    router: str = "least_tokens"  # as `experiment.router` of experiment=serve
    processes: PositiveInt = 2  # that simulate deployments at the same time
    parts: str = ""  # file that keeps finished searches: those that it has are not run again


class _Searched(NamedTuple):
    key: str
    capacity: Capacity


@dataclass
class _Work:
    """The searches of a run, done by processes or read from a file of parts; progress is shown."""

    config: Config
    options: CapacityOptions
    requests: RequestTable
    mapped: Callable[..., Iterator[Capacity]]
    progress: ShowProgress
    parts: Parts[_Searched] | None
    done: int = 0  # requests simulated
    share: float = 0.0
    ran: int = 0
    resumed: int = 0

    def capacities(self, searches: Sequence[Search], left: int, text: str) -> list[Capacity]:
        """Return the answers of *searches*, in order; *left* estimates the requests simulated after them."""
        kept = self.parts.kept if self.parts else {}
        todo = [each for each in searches if each.key not in kept]
        options = self.options
        one = partial(
            Search.capacity,
            config=self.config,
            requests=self.requests,
            router=options.router,
            attainment=options.attainment,
            warmup=options.warmup,
        )
        found = {each.key: kept[each.key].capacity for each in searches if each.key in kept}
        self.resumed += len(found)
        self._show(left + sum(map(_requests, todo)), text)
        for number, (search, capacity) in enumerate(zip(todo, self.mapped(one, todo), strict=True), 1):
            found[search.key] = capacity
            if self.parts:
                self.parts.add(_Searched(search.key, capacity))
            self.ran += len(capacity.probes)
            self.done += sum(probe.requests for probe in capacity.probes)
            self._show(left + sum(map(_requests, todo[number:])), text)
        return [found[each.key] for each in searches]

    def _show(self, left: int, text: str) -> None:
        self.share = max(self.share, self.done / (self.done + left) if left else self.share)
        self.progress(self.share, text)


def _requests(search: Search) -> int:
    # that it simulates, about
    return search.requests * (_AGAIN if search.confident else _SEARCH if search.search and not search.rate else 1)


def run(config: Config, _: Target, progress: ShowProgress) -> Result:
    """Return the best deployment, all that were simulated, at one rate, and the Pareto front.

    The result does not depend on the number of processes.  Raise a `ConfigError` if no deployment fits, or for a
    file of parts of another configuration.
    """
    options = CapacityOptions.of(config)
    if options.prefill_prices and len(options.prefill_prices) != len(options.prefill_hw):
        raise ConfigError(
            f"experiment.prefill_prices has {len(options.prefill_prices)} prices for {len(options.prefill_hw)} of "
            "experiment.prefill_hw; give one for each"
        )
    if config.hw.prefill:
        raise ConfigError(f"hw.prefill={config.hw.prefill} fixes prefill; write experiment.prefill_hw to search")
    if not config.hw.gpus:
        raise ConfigError(f"experiment=capacity needs GPUs, hw={config.hw.name} has none; take hw=8xh200")
    workload = replace(config.workload, load=0.0)
    most = max(options.requests, options.final_requests)
    drawn = draw(replace(workload, count=min(most, workload.count or most)), config.seed, config.model.context)
    if tenants := workload.tenants:  # all of them share the steps of decode, and each waits for its own prompts
        limits = Slo(ttft=max(each.ttft for each in tenants), tpot=min(each.tpot for each in tenants))
        config = replace(config, slo=limits)
    shapes = listed(options.prefill_tp, options.decode_tp, options.instances, options.deployment, options.prefill_hw)
    fitting, refused = plans(config, tuple(shapes), drawn.requests, options.attainment)
    if not fitting:
        raise ConfigError(
            f"no deployment of experiment.prefill_tp, decode_tp and instances can serve model={config.model.name} "
            f"on hw={config.hw.name}: {next(iter(refused.values()))}"
        )
    for name in options.prefill_hw:
        if all(plan.shape.prefill_hw != name for plan in fitting):
            why = next((refused[shape] for shape in refused if shape.prefill_hw == name), "no layout is left")
            raise ConfigError(f"experiment.prefill_hw has {name}, which no deployment can use: {why}")
    with _mapping(options.processes) as mapped:
        work = _Work(config, options, drawn.requests, mapped, progress, _parts(config, options))
        found = (_fewest if options.rate else _highest)(work, fitting)
        span = _span(work, found.ranked[0]) if found.ranked else None
    found = replace(
        found,
        asked=options.rate,
        attainment=options.attainment,
        warmup=options.warmup,
        fitting=fitting,
        refused=refused,
        simulations=work.ran,
        span=span,
    )
    notes = [f"{work.resumed} searches were run before: experiment.parts={options.parts}"] if work.resumed else []
    best = found.best
    result = best and served(config, best.plan, drawn.requests, best.probe.rate, options.router)
    return Result(
        served=True,
        summary=answer.metrics(found, config),
        tables=answer.tables(found, config),
        requests=result.requests if result else {},
        transfers=result.transfers if result else (),
        notes=[*drawn.notes, *notes],
    )


def chosen(config: Config, metrics: Mapping[str, float | int | None]) -> Config:
    """Return the serving run of the best deployment of a search with these *metrics*, with the same requests.

    Raise a `ConfigError` if the search found no deployment at all.
    """
    options, names = CapacityOptions.of(config), ("prefill_tp", "decode_tp", "prefill_instances", "decode_instances")
    parts, load = [metrics.get(f"best_{name}") for name in names], metrics.get("best_load")
    if load is None or any(part is None for part in parts):
        raise ConfigError("the search found no deployment, so there is none to explain")
    count = max(options.requests, options.final_requests)
    count = min(count, config.workload.count or count)
    kind = int(metrics.get("best_prefill_hw") or 0)
    sizes = [int(part or 0) for part in parts]
    shape = Shape(sizes[0], sizes[1], sizes[2], sizes[3], ("", *options.prefill_hw)[kind])
    own = configured(config, shape, options.router)
    return replace(own, workload=replace(config.workload, count=count, load=load, scaling="time"))


def _parts(config: Config, options: CapacityOptions) -> Parts[_Searched] | None:
    if not options.parts:
        return None
    alike = replace(config, experiment=replace(options, parts="", processes=1))
    of = hashlib.sha256(f"{__version__} {canonical(alike, 'output')}".encode()).hexdigest()
    return Parts(Path(options.parts), {"capacity": 1, "configuration": of}, _Searched, "searches")


@contextmanager
def _mapping(processes: int) -> Iterator[Callable[..., Iterator[Capacity]]]:
    if processes == 1:
        yield map
        return
    # what a search warns of, the closed form did before: processes would say it again, beside the result
    quiet = partial(warnings.simplefilter, "ignore", RunWarning)
    with interrupts_blocked():
        pool = multiprocessing.get_context("spawn").Pool(processes, quiet)
    with pool:  # ends them if left early
        yield pool.imap


def _highest(work: _Work, fitting: Sequence[Plan]) -> Found:
    # Closed form bounds each deployment.  Those that may beat the best so far are simulated, first at its rate.
    options = work.options
    order = sorted(fitting, key=lambda plan: (-plan.bound * plan.copies, plan.shape))
    order = [plan for plan in order if plan.bound]
    if not order:
        return _nearest(work, fitting, 0.0)
    entries: dict[Shape, Entry] = {}
    finals = options.finalists * (_AGAIN + 1) * options.final_requests
    best = 0.0
    while wave := [plan for plan in order if plan.bound * plan.copies > best and plan.shape not in entries][:_WAVE]:
        searches = [
            Search(
                plan=plan,
                rate=best / plan.copies,
                requests=options.requests,
                start=max(LEAST, options.start * plan.bound / plan.full),
                tolerance=options.tolerance,
            )
            for plan in wave
        ]
        open_ = sum(plan.bound * plan.copies > best and plan.shape not in entries for plan in order) - len(wave)
        text = f"{len(entries)} deployments simulated, at most {open_ + len(wave)} left; best {best:.3g} requests/s"
        answers = work.capacities(searches, open_ * options.requests + finals, text)
        entries |= {plan.shape: _entry(plan, plan.copies, own) for plan, own in zip(wave, answers, strict=True)}
        best = max(_rate(entry) for entry in entries.values())
    settled: set[Shape] = set()
    while some := _finalists(entries.values(), settled, options.finalists):
        searches = [
            Search(
                plan=each.plan,
                requests=options.final_requests,
                start=each.probe.load * (1.0 if each.capacity.best else 0.9),
                tolerance=options.tolerance / 2,
                confident=True,
            )
            for each in some
        ]
        answers = work.capacities(
            searches, len(some) * options.final_requests, f"{len(some)} finalists simulated again"
        )
        entries |= {
            each.plan.shape: _entry(each.plan, each.copies, own) for each, own in zip(some, answers, strict=True)
        }
        settled |= {each.plan.shape for each in some}
    ranked, failed = _ranked(entries.values())
    alike = []
    if ranked:
        finalists = [entry for entry in (*ranked, *failed) if entry.plan.shape in settled]
        others = [(each.plan, each.copies) for each in finalists if each is not ranked[0]]
        alike = [ranked[0], *_at_rate(work, others, ranked[0].rate)]
    return Found(ranked=ranked, failed=failed, alike=alike)


def _finalists(entries: Iterable[Entry], settled: set[Shape], count: int) -> list[Entry]:
    # The best *count*, and the best of each kind; after that any that is ranked above all of those.
    ranked, failed = _ranked(entries)
    order = [*ranked, *failed]
    some = order[: 1 if settled else count]
    if not settled:
        some += [
            one
            for kind in dict.fromkeys(each.plan.shape.kind for each in order)
            if (one := next(each for each in order if each.plan.shape.kind == kind)) not in some
        ]
    return [each for each in some if each.plan.shape not in settled]


def _fewest(work: _Work, fitting: Sequence[Plan]) -> Found:
    # By the number of GPUs, fewest first, until a deployment holds with many requests.
    options, rate = work.options, work.options.rate
    able = [
        (plan, copies) for plan in fitting for copies in range(1, plan.copies + 1) if plan.bound * copies >= rate
    ]
    if not able:
        return _nearest(work, fitting, rate)
    levels: dict[int, list[tuple[Plan, int]]] = {}
    for plan, copies in sorted(able, key=lambda one: (one[0].gpus * one[1], -one[0].bound * one[1], one[0].shape)):
        levels.setdefault(plan.gpus * copies, []).append((plan, copies))
    failed: list[Entry] = []
    finals = options.finalists * options.final_requests
    for gpus, those in levels.items():
        text = f"{len(those)} deployment{'s' * (len(those) > 1)} of {gpus} GPUs at {rate:g} requests/s"
        entries = _at_rate(work, those, rate, options.requests, finals, text)
        hopeful, others = _ranked(entries)
        hopeful += [each for each in others if each.probe.attainment + each.probe.half >= options.attainment]
        if hopeful:
            some = hopeful[: options.finalists]
            kinds = {each.plan.shape.kind for each in some}
            for each in (*hopeful, *others):  # the best of each other kind
                if each.plan.shape.kind not in kinds:
                    some.append(each)
                    kinds.add(each.plan.shape.kind)
            alike = _at_rate(work, [(each.plan, each.copies) for each in some], rate)
            sure, _ = _ranked(alike)
            if sure:
                again = {(each.plan.shape, each.copies) for each in alike}
                rest = [each for each in entries if (each.plan.shape, each.copies) not in again]
                ranked, unable = _ranked([*alike, *rest])
                ranked = [*sure, *(each for each in ranked if each not in sure)]
                return Found(ranked=ranked, failed=[*unable, *failed], alike=alike)
            entries = [*alike, *(each for each in entries if each not in some)]
        failed = sorted([*entries, *failed], key=_nearness)
    return Found(ranked=(), failed=failed)


def _at_rate(
    work: _Work, those: Sequence[tuple[Plan, int]], rate: float, requests: int = 0, left: int = 0, text: str = ""
) -> list[Entry]:
    # Simulate copies of deployments at one *rate* of all of them together, with the same requests.
    options = work.options
    searches = [
        Search(
            plan=plan,
            rate=rate / copies,
            requests=requests or options.final_requests,
            search=False,
            tolerance=options.tolerance,
        )
        for plan, copies in those
    ]
    answers = work.capacities(searches, left, text or f"{len(those)} deployments compared at {rate:.3g} requests/s")
    return [_entry(plan, copies, own) for (plan, copies), own in zip(those, answers, strict=True)]


def _span(work: _Work, best: Entry) -> tuple[float, float] | None:
    # If latencies are a factor off, so are the limits that the model has to meet: its capacity is that of others.
    options, servers = work.options, of_servers(configured(work.config, best.plan.shape, work.options.router))
    if servers is None:
        return None
    ttft, tpot = servers.factors["ttft_p90"], servers.factors["tpot_p99"]
    searches = [
        Search(
            plan=best.plan,
            requests=options.requests,
            start=best.probe.load,
            tolerance=options.tolerance,
            confident=True,
            eased=eased,
        )
        for eased in ((1 / ttft, 1 / tpot), (ttft, tpot))
    ]
    low, high = work.capacities(searches, 0, "its 95 % interval")
    # at a load of 1 the closed form ends the search: what servers give in all was as far off as their end to end
    most = high.high if high.high < 1.0 else servers.factors["e2e_p50"]
    return best.rate_at(min(low.low, best.probe.load)), best.rate_at(max(most, best.probe.load))


def _nearest(work: _Work, fitting: Sequence[Plan], rate: float) -> Found:
    # Closed form rules out all: the nearest are simulated nevertheless, at *rate* or where hardly anybody is served.
    slo = work.config.slo

    def excess(plan: Plan) -> tuple[float, float, Shape]:
        return max(1.0, plan.ttft / slo.ttft, plan.tpot / slo.tpot), -plan.bound * plan.copies, plan.shape

    some = sorted(fitting, key=excess)[:_WAVE]
    entries = []
    for plan in some:
        own = rate or LEAST * plan.full * plan.copies
        entries += _at_rate(work, [(plan, plan.copies)], own, work.options.requests)
    return Found(ranked=(), failed=sorted(entries, key=_nearness))


def _entry(plan: Plan, copies: int, capacity: Capacity) -> Entry:
    probe = capacity.best or max(capacity.probes, key=lambda one: (one.attainment, one.load))
    return Entry(plan=plan, copies=copies, capacity=capacity, probe=probe)


def _rate(entry: Entry) -> float:
    return entry.rate if entry.capacity.best else 0.0


def _nearness(entry: Entry) -> tuple[float, int, Shape]:
    return -entry.probe.attainment, entry.gpus, entry.plan.shape


def _ranked(entries: Iterable[Entry]) -> tuple[list[Entry], list[Entry]]:
    # Those that hold, most requests first and of equal rates most within the SLO; and those that do not.
    every = list(entries)
    able = [each for each in every if each.capacity.best is not None]
    unable = [each for each in every if each.capacity.best is None]
    return sorted(able, key=lambda each: (-round(each.rate, 9), *_nearness(each))), sorted(unable, key=_nearness)
