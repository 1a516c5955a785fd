# SPDX-License-Identifier: Apache-2.0
"""Serve a trace or generated requests: router, prefill and decode engines, with KV moved through the interface.

`job` makes a `pdsim.serving.deployment.Deployment` of the configuration, `specs` the ranks that run it, and `result`
the rows, metrics and tables; `live_run` does the last for real servers.  Times in results are seconds from the start
of the workload on the job's clock, simulated or real.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, cast

import numpy as np

from experiments.serve import equal_ranks, tables
from pdsim.compute.forward import Compute, forward
from pdsim.compute.roofline import kv_shape
from pdsim.config import Config, ExperimentOptions, build, presets
from pdsim.core import plugins
from pdsim.core.errors import ConfigError
from pdsim.core.progress import ShowProgress
from pdsim.core.units import NotNegativeInt, PositiveInt, Seconds, format_size
from pdsim.hardware.machine import Machine
from pdsim.kv.contents import EVERY
from pdsim.kv.layout import Grid, KvShape
from pdsim.kv.messages import ROUTER, instance_of, rank_name
from pdsim.kv.policy import Staging
from pdsim.models.llm import Side
from pdsim.results.record import Result
from pdsim.serving import failures
from pdsim.serving.deployment import CpGather, Deployment, colocated_places, pages_per_rank, places
from pdsim.serving.load import OfferedLoad, offered_load, scaled
from pdsim.serving.requests import Request, RequestLog, RequestTable, request_columns
from pdsim.serving.workload import draw
from pdsim.sim.faults import CardOutage
from pdsim.sim.model import Model
from pdsim.transfer.job import Outcome, Place, RankResult, RankSpec
from pdsim.transfer.log import ArrayColumn, TransferLog, joined, rows

TARGETS = ("model", "real", "live")
SERVES = True
"""It places prefill and decode instances as ``parallel`` says, so the rules of serving apply."""
CONTENTS = 16 << 30
"""Bytes of KV that ``memory=tracked`` writes and compares at most: half a minute of one core."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions(ExperimentOptions):
    """Options of serving: how instances are used, and when requests are given up."""

    name: str = "serve"
    # colocated: engines like prefill's, on the GPUs of both sides
    deployment: Annotated[str, "one of disaggregated, colocated"] = "disaggregated"
    engines: NotNegativeInt = 0  # colocated ones; 0: as many as the GPUs of both sides hold
    # random, round_robin, least_tokens (outstanding), power_of_two, cache_aware, transfer_aware; first_token chooses
    # both sides together, by prefill's queue and the way of the KV
    router: str = "least_tokens"  # which prefill instance gets a request: pdsim.routers, docs/how-to.md
    decode_router: str = ""  # of decode instances, if another
    routers: PositiveInt = 1  # replicas of the router, which take requests in turn
    routers_sync: Seconds = 1.0  # between their exchanges of loads; 0: each knows only what it sent itself
    # attention group of a room: its number modulo dp; query: the least loaded
    dp_rank: Annotated[str, "one of room, query"] = "room"
    # of silence, after which a rank counts as gone; as time-outs of SGLang's handoff
    deadline: Annotated[Seconds, "> 0"] = 300.0
    # whether the router counts a request's own output tokens; else the mean of others so far
    output_known: bool = True
    # tokens outstanding at prefill from which on requests of priority 0 are refused; 0: never
    shed: NotNegativeInt = 0
    retries: NotNegativeInt = 3  # assumed: restarts of a request that loses its instance before a byte has moved
    # times that a user sends a request again which failed; it is computed from the beginning, as by vLLM and SGLang
    client_retries: NotNegativeInt = 0
    client_wait: Seconds = 1.0  # from the failure until then
    bootstrap_timeout: Seconds = 0.0  # of a room at prefill, for its pages at decode; 0: none (SGLang: 300 s)
    waiting_timeout: Seconds = 0.0  # from then until all of it has arrived; 0: none (SGLang: 300 s)

    @property
    def colocated(self) -> bool:
        """Whether engines prefill and decode in the same steps."""
        return self.deployment == "colocated"


def run(config: Config, target: Any, progress: ShowProgress) -> Result:
    """Serve the workload and return the outcome of every request.

    Raise a `ConfigError` before anything starts if it cannot be, and a `TransferError` if the job cannot be started.
    """
    options = ServeOptions.of(config)
    drawn = draw(config.workload, config.seed, config.model.context)
    if config.target == "live":
        if drawn.requests.after is not None:
            raise ConfigError("workload.arrivals=sessions has target=model or real only; choose other arrivals")
        from experiments.serve import live_run

        served = live_run.run(config, target, _live(config, drawn.requests), options.router, progress)
        return replace(served, notes=[*drawn.notes, *served.notes])
    what = job(config, options)
    requests = scaled(config.workload, what, drawn.requests, config.seed)
    offered = offered_load(what, requests)
    if offered is None:
        why = (
            "users wait for their answers"
            if config.workload.arrivals == "sessions"
            else "all requests arrive at once"
        )
        load = [f"load: unknown, {why}"]
    else:
        load = [line for line in (offered.line(config.workload), offered.warning(config.workload)) if line]
    check_fits(what, requests)
    check_contents(config, what, requests)
    progress(0.0, f"serving {len(requests)} requests", 1.0)
    outcome = _run(config, what, requests, target)
    progress(1.0, "")
    served = result(config, what, requests, outcome, offered)
    return replace(served, notes=[*load, *_pool_notes(config), *drawn.notes, *served.notes])


def prefill_pool(config: Config) -> tuple[Machine, Compute]:
    """Return the machine that prefill computes on, and its compute: those of *config* without `Machine.prefill`.

    Its GPUs and what joins them are of that other kind; cards, hosts and nodes are as in *config*.  Its compute is
    what ``compute=auto`` takes for it, unless *config* has one that was measured on no GPU.  Raise a `ConfigError`
    if there is no such machine, or it has no GPUs.
    """
    if not config.hw.prefill:
        return config.hw, config.compute
    other = _machine(config.hw.prefill)
    machine = replace(config.hw, gpu=other.gpu, interconnect=other.interconnect)
    if not (config.compute.chosen or config.compute.measured_gpu):
        return machine, config.compute
    return machine, presets.computing(
        replace(config, hw=machine), {}, (), (), lambda values: build(Compute, values, at="compute")
    )


@cache
def _machine(name: str) -> Machine:
    from pdsim.config.compose import compose  # which takes a while

    machine = compose([f"hw={name}"]).hw
    if machine.gpu is None:
        raise ConfigError(f"hw.prefill={name} has no GPUs; name one that has, such as 8xb200")
    return machine


def _pool_notes(config: Config) -> list[str]:
    if not config.hw.prefill:
        return []
    hw, compute = prefill_pool(config)
    name = hw.gpu.name if hw.gpu else ""
    why = f": {compute.chosen}" if compute.chosen else ""
    return [f"prefill computes on {name} (hw.prefill={config.hw.prefill}), compute={compute.name}{why}"]


def _run(config: Config, what: Deployment, requests: RequestTable, target: Any) -> Outcome:
    ranks = specs(config, what, requests)
    lost = _failures(config, what, requests)
    if not lost:
        if isinstance(target, Model) and config.simulate.fold == "auto":
            return equal_ranks.outcome(target, what, ranks)
        return cast("Outcome", target.run(ranks))
    down = [[each.at, each.until] for each in lost if each.what == ROUTER]
    cards = [CardOutage(*each.card, each.at, each.until) for each in lost if each.card]
    target = replace(target, outages=cards) if cards else target
    ranks[0] = replace(ranks[0], arguments={**ranks[0].arguments, "outages": down})
    return cast("Outcome", target.run(ranks, *failures.kills(lost)))


def _failures(config: Config, what: Deployment, requests: RequestTable) -> list[failures.Failure]:
    # With data-parallel attention the groups of an engine are instances by themselves.
    if config.failures == failures.Failures():
        return []
    sides = ((what.prefills, what.prefill_dp), (what.decodes, what.decode_dp))
    engines = {one: f"{number // dp} {one[:7]}" for side, dp in sides for number, one in enumerate(side)}
    ranks = specs(config, what, ())[1:]
    last = float(requests.arrival.max())
    engines = {spec.name: engines[instance_of(spec.name)] for spec in ranks}
    return failures.drawn(config.failures, ranks, engines.__getitem__, config.seed, last, config.hw.cards)


def on_model(config: Config, what: Deployment, requests: Sequence[Request]) -> Result:
    """Serve *requests* with *what* on the model of *config*, and return its `result`.

    Raise a `ConfigError` if one is larger than the pools.
    """
    check_fits(what, requests)
    check_contents(config, what, requests)
    model = Model(config.hw, config.backend, memory=config.memory, seed=config.seed, collective=config.collective)
    return result(config, what, requests, _run(config, what, RequestTable.of(requests), model))


def partial(config: Config, ended: Iterable[bytes], transfers: Iterable[bytes]) -> Result | None:
    """Return the partial result of a killed run of *config*, from its journals; None if they are empty."""
    requests = draw(config.workload, config.seed, config.model.context).requests
    if config.target == "live":
        from experiments.serve import live_run

        requests = _live(config, requests)
        served = live_run.partial(config, requests, ended)
    else:
        served = _partial(config, requests, RequestLog.read(ended), transfers)
    if served is None:
        return None
    count = len(served.requests["id"])
    failure = f"the run ended early: these are {count} of {len(requests)} requests, which had ended by then"
    return replace(served, failures=[failure, *served.failures])


def _live(config: Config, requests: RequestTable) -> RequestTable:
    # what the servers can do is theirs to say: only a load that is asked for needs the model of the deployment
    if not config.workload.load:
        return requests
    return scaled(config.workload, job(config, ServeOptions.of(config)), requests, config.seed)


def _partial(config: Config, requests: RequestTable, log: RequestLog, transfers: Iterable[bytes]) -> Result | None:
    if not len(log):
        return None
    what = job(config, ServeOptions.of(config))
    requests = scaled(config.workload, what, requests, config.seed)
    value = {"start": log.start, "rows": log}
    ranks = {name: RankResult(name, transfers=own) for name, own in TransferLog.by_rank(transfers).items()}
    seconds = float(np.nanmax(np.append(log.column("finished").values, 0.0)))
    model = Model(config.hw, config.backend, memory=config.memory, jitter=config.jitter, samples=config.samples)
    every = specs(config, what, requests)
    if config.target == "model" and (columns := equal_ranks.equal(model, what, every)):
        ranks = dict(equal_ranks.completed(ranks, every, columns))
    outcome = Outcome({ROUTER: RankResult(ROUTER, value=value)} | ranks, seconds)
    return result(config, what, requests, outcome, ended=True)


def observed(config: Config, table: Any, source: str) -> Result:
    """Return the requests *table* that `backends.live.observed.read` read from *source* as a live run's result.

    Columns are those of ``target=live``, so that `pdsim compare` can set a prediction beside them.
    """
    from backends.live.observed import served
    from experiments.serve import live_run

    return live_run.result(config, *served(table, source))


def job(config: Config, options: ServeOptions) -> Deployment:
    """Return the deployment: sizes, pools, times of forwards, the engine's rules and the handoff's policy.

    Raise a `ConfigError` if the model cannot be divided like that, or a choice does not go with target or handoff.
    """
    try:
        built = _job(config, options)
        if options.colocated:
            built = _colocated(config, built)
        if config.cache.prefill or config.cache.decode:
            _check_cache(config, built)
        if (built.prefill_time.exchange or built.decode_time.exchange) and config.target != "model":
            raise ValueError("experts that tokens travel to (parallel.*.ep) have target=model; leave ep at 1")
        if config.kv.layerwise and (
            config.kv.staging or config.target != "model" or config.engine.handoff != "push"
        ):
            raise ValueError("kv.layerwise has target=model, a pushed handoff and no staging; leave it at false")
        if config.kv.staging and config.engine.page_order == "heads":
            raise ValueError(
                "kv.staging cuts slices of pages by tokens; set engine.page_order=tokens or kv.staging=false"
            )
        built.check()
    except ValueError as error:
        sides = [
            f"tp={side.tp} pp={side.pp} cp={side.cp} dp={side.dp}" + (f" ep={side.ep}" if side.ep > 1 else "")
            for side in (config.parallel.prefill, config.parallel.decode)
        ]
        raise ConfigError(f"model={config.model.name} on parallel=({' to '.join(sides)}): {error}") from error
    return built


def _job(config: Config, options: ServeOptions) -> Deployment:
    parallel, shape = config.parallel, kv_shape(config.model)
    if options.colocated:
        parallel = replace(parallel, decode=parallel.prefill)
    if config.engine.packed:
        shape = replace(shape, head_bytes=2 * shape.head_bytes, packed=True)
    ranks = parallel.prefill.gpus + parallel.decode.gpus
    drafter, comes = config.engine.draft_layers, config.engine.draft_kv == "transferred"
    whole = replace(shape, layers=shape.layers + drafter)  # whose KV decode keeps in any case

    # KV is handed over in the pages of the side that has the smaller ones
    own = config.kv.page_size, config.kv.decode_page_size or config.kv.page_size
    size = min(own)
    kv, blocks = replace(config.kv, page_size=size), tuple(page // size for page in own)

    # the simulated GPUs have the memory of hw's, so prefill uses no more of a larger one
    hw, compute = prefill_pool(config)
    smaller = hw
    if config.hw.gpu is not None and hw.gpu is not None:
        smaller = replace(hw, gpu=replace(hw.gpu, memory=min(hw.gpu.memory, config.hw.gpu.memory)))

    def pool(side: Side, block: int, hw: Machine, shape: KvShape = whole) -> int:
        pages = pages_per_rank(side, config.model, shape, hw, kv, config.scheduler, ranks)
        return max(1, pages // block) * block

    pages, tiers = pool(parallel.prefill, blocks[0], smaller, whole if comes else shape), config.cache
    if tiers.host_ratio and not tiers.host:
        tiers = replace(tiers, host=tiers.host_ratio * pages * size)
    return Deployment(
        prefill=Grid(parallel.prefill.attention_tp, parallel.prefill.pp, parallel.prefill.cp),
        prefill_dp=parallel.prefill.dp,
        prefill_instances=parallel.prefill.instances,
        decode=Grid(parallel.decode.attention_tp, parallel.decode.pp, parallel.decode.cp),
        decode_dp=parallel.decode.dp,
        decode_instances=parallel.decode.instances,
        all_cp_ranks=config.kv.all_cp_ranks,
        gather=_gather(config),
        state_slots=config.kv.state_slots or config.scheduler.decode_batch,
        window_share=config.kv.window_share,
        shape=whole if comes else shape,
        page_size=size,
        prefill_block=blocks[0],
        decode_block=blocks[1],
        prefill_pages=pages,
        decode_pages=pool(parallel.decode, blocks[1], config.hw),
        slots=2 * config.scheduler.decode_batch,
        chunk=config.engine.step_tokens or config.scheduler.chunk,
        prefill_batch=config.scheduler.prefill_batch,
        decode_batch=config.scheduler.decode_batch,
        prefill_time=forward(config.model, hw, compute, parallel.prefill),
        decode_time=forward(config.model, config.hw, config.compute, parallel.decode, direct=True),
        policy=options.router,
        decode_policy=options.decode_router,
        routers=options.routers,
        routers_sync=options.routers_sync,
        rates=_rates(config) if {options.router, options.decode_router} & {"transfer_aware", "first_token"} else {},
        output_known=options.output_known,
        shed=options.shed,
        query_dp=options.dp_rank == "query",
        handoff=config.policy,
        staging=_staging(config, shape) if config.kv.staging else None,
        deadline=options.deadline,
        checked=EVERY if config.kv.checked is None else config.kv.checked,
        kv_dtype=config.model.element,
        retries=options.retries,
        asks=options.client_retries,
        asks_after=options.client_wait,
        bootstrap_timeout=options.bootstrap_timeout,
        waiting_timeout=options.waiting_timeout,
        engine=config.engine,
        layerwise=config.kv.layerwise,
        cache=tiers,
        autoscale=config.autoscale,
        seed=config.seed,
    )


def _gather(config: Config) -> CpGather | None:
    # Groups with data-parallel attention pad to the sum of their lengths, for which SGLang takes plain memory.
    side, library, memory, why = config.parallel.prefill, config.collective, config.kv.gather, ""
    if side.cp == 1 or library is None or config.target == "live":
        return None
    problem = plugins.missing(plugins.COLLECTIVES, library.implementation) if config.target == "real" else ""
    if problem:
        raise ValueError(f"context-parallel ranks gather: collective={library.name} {problem}")
    if memory != "plain" and side.dp > 1:
        memory, why = "plain", f"parallel.prefill.dp={side.dp} pads to unequal sums"
    cost = library.plain if memory == "plain" else library.symmetric
    return CpGather(memory=memory, pool=int(library.pool), cost=cost.queued(), fallback=why)


def _check_cache(config: Config, job: Deployment) -> None:
    if config.cache.early and config.cache.found == "scheduled":
        raise ValueError("cache.early sends pages at once, and those of cache.found=scheduled are not computed yet")
    tiers = job.cache
    if tiers.tiered and config.target != "model":
        raise ValueError("cache.host, cache.ssd and cache.remote have target=model; leave them at 0")
    token = job.shape.token_bytes(job.prefill.tp) * job.prefill.tp
    memory = config.hw.host.memory * config.hw.nodes
    if tiers.host * token * len(job.prefills) > memory:
        raise ValueError(
            f"cache.host={tiers.host:g} tokens of {token:g} B in {len(job.prefills)} instances are more than the "
            f"hosts' memory, {memory:g} B; set at most {memory / token / len(job.prefills):.3g}"
        )
    if job.shape.state.mamba or job.shape.state.window:
        raise ValueError("a prefix cache keeps no state beside KV; choose a model of full attention, or cache=none")
    if (config.memory == "tracked" or config.target != "model") and job.checked:
        raise ValueError(
            "pages that several requests share hold the bytes of the first, which others cannot be compared with; "
            "set kv.checked=0, or cache=none"
        )


def _colocated(config: Config, job: Deployment) -> Deployment:
    side = config.parallel.prefill
    if side.pp * side.cp > 1 or config.target != "model":
        raise ValueError("experiment.deployment=colocated has target=model, tp, dp and ep; leave pp and cp at 1")
    if config.workload.aborts:
        raise ValueError("experiment.deployment=colocated serves everybody; leave workload.aborts at 0")
    count = len(colocated_places(config.parallel, config.hw)) // side.tp
    asked = config.experiment.engines if isinstance(config.experiment, ServeOptions) else 0
    if asked > count:
        raise ValueError(
            f"experiment.engines={asked}, but the GPUs of both sides hold {count} of tp={side.tp}; lower it, or "
            "raise parallel.decode.instances or hw"
        )
    count = asked or count
    return replace(
        job,
        colocated=True,
        prefill_instances=count,
        decode_instances=count,
        decode_time=job.prefill_time,
        # a request has one row of state from its first step to its end
        decode_batch=min(job.decode_batch, job.state_slots) if job.shape.state.mamba else job.decode_batch,
        staging=None,
    )


def _rates(config: Config) -> dict[str, dict[str, float]]:
    # With data-parallel attention the groups of an engine are instances by themselves, on the engine's node.
    hw, parallel = config.hw, config.parallel
    near = hw.interconnect.rate if hw.interconnect.kind != "none" else hw.host.tcp_rate
    far = hw.nic.rate if hw.nic.count else hw.host.tcp_rate
    where = places(parallel, hw)
    nodes: dict[str, int] = {}
    for side, name, own in ((parallel.prefill, "prefill", where[0]), (parallel.decode, "decode", where[1])):
        for engine in range(side.instances):
            for group in range(side.dp):
                instance = f"{name}{engine}" if side.dp == 1 else f"{name}{engine}d{group}"
                nodes[instance] = own[engine * side.gpus // side.instances].node
    prefills, decodes = ([one for one in nodes if one.startswith(side)] for side in ("prefill", "decode"))
    return {one: {other: near if nodes[one] == nodes[other] else far for other in decodes} for one in prefills}


def _staging(config: Config, shape: KvShape) -> Staging:
    # Bytes; the buffer is for the side with more ranks, whose chunks are the smaller ones.
    kv, parallel = config.kv, config.parallel
    tokens = (config.scheduler.chunk // kv.page_size + 1) * kv.page_size
    chunk = tokens * shape.token_bytes(max(parallel.prefill.attention_tp, parallel.decode.attention_tp))
    buffer = int(kv.staging_buffer) or chunk
    return Staging(ring=int(kv.staging_ring), buffer=buffer, wait=kv.staging_wait, scatter=kv.staging_scatter)


def specs(config: Config, what: Deployment, requests: Sequence[Request]) -> list[RankSpec]:
    """Return the ranks of the job: the router on the first host, then prefill and decode.

    Names are ``router``, ``prefill0.0``, ``prefill0.1`` and so on: side, instance, and the rank within it.  With a
    colocated deployment there is a single program, the router's.
    """
    plain = what.plain()
    requests = RequestTable.of(requests)
    if what.colocated:
        gpus = colocated_places(config.parallel, config.hw)[: what.prefill_instances * config.parallel.prefill.tp]
        own = {"job": plain, "requests": requests, "places": [[one.node, one.gpu] for one in gpus]}
        return [RankSpec(ROUTER, "pdsim.serving.colocated:program", Place(), own)]
    arguments: dict[str, Any] = {"job": plain, "requests": requests}
    programs = [RankSpec(ROUTER, "pdsim.serving.router:program", Place(), arguments)]
    prefill, decode = places(config.parallel, config.hw)
    pushes = config.engine.handoff == "push"
    posts = {"prefill": config.policy.queues if pushes else None, "decode": None}
    for side, instances, dp, where in (
        ("prefill", what.prefills, what.prefill_dp, prefill),
        ("decode", what.decodes, what.decode_dp, decode),
    ):
        for number, instance in enumerate(instances):
            for index in range(what.grid(instance).size):
                given = {"instance": instance, "index": index, "job": plain}
                place = where[_gpu(what.grid(instance), dp, number, index)]
                name = rank_name(instance, index)
                programs.append(RankSpec(name, f"pdsim.serving.{side}:program", place, given, posts[side]))
    return programs


def _gpu(grid: Grid, dp: int, number: int, index: int) -> int:
    engine, group = divmod(number, dp)
    block, tp = divmod(index, grid.tp)
    return engine * dp * grid.size + (block * dp + group) * grid.tp + tp


def result(
    config: Config,
    what: Deployment,
    requests: Sequence[Request],
    outcome: Outcome,
    offered: OfferedLoad | None = None,
    *,
    ended: bool = False,
) -> Result:
    """Return columns, metrics, tables, notes and failures of *requests*, from *outcome*.

    *offered* is their load, computed here if it is not known.  With *ended*, only requests that had ended are there,
    as after a kill.  A router that was lost leaves every request with that as its status.
    """
    router = outcome.ranks[ROUTER]
    lost = f"PeerLost: {ROUTER}: {_line(router).removeprefix('PeerLost: ')}"
    value = router.value or {"start": 0.0, "rows": [["", "", 0, lost, *[None] * 8]] * len(requests)}
    requests = RequestTable.of(requests)
    columns = request_columns(requests, value)
    offered = offered or offered_load(what, requests)
    columns["path"], taken, moving = tables.moved(len(requests), outcome)
    columns |= tables.cached(outcome, len(requests))
    if requests.priority is not None and requests.priority.any():
        columns["priority"] = ArrayColumn(requests.priority)
    if requests.tenant is not None:
        columns |= tables.tenants(requests.tenant, config.workload.tenants)
    if ended:
        columns = rows(columns, tables.with_status(columns, bool))
    fallen = _failures(config, what, requests)
    # what fails because the configuration says so is counted, and is no failure of the run
    bad = {ROUTER: router} if fallen else outcome.ranks
    failed = [f"{name}: {_line(rank)}" for name, rank in bad.items() if rank.error]
    failed += [] if fallen else tables.failed(columns)
    others = config.backend.failover * (len(config.hw.cards) - 1) if fallen else 0
    more = tables.of_failures(fallen, value.get("changes", ()), columns, value.get("sent_again", (0, 0)), others)
    tenants = tables.of_tenants(columns, config.workload, config.slo)
    scaled_parts = tables.of_autoscale(what, value.get("scaled", ()), columns)
    return Result(
        summary=[
            *tables.metrics(columns, config.workload, config.slo, outcome),
            *tables.path_metrics(taken),
            *tables.load_metrics(offered),
            *tables.prefix_metrics(requests, what),
            *tables.cache_metrics(columns, what),
            *more[0],
            *scaled_parts[0],
        ],
        tables=[*tables.tables(columns, config.workload, outcome, taken), *more[1], *scaled_parts[1], *tenants[0]],
        requests=columns,
        transfers=joined(rank.transfers for rank in outcome.ranks.values()),
        failures=failed,
        notes=[
            *more[2],
            *scaled_parts[2],
            *tenants[1],
            *tables.notes(columns, config.workload, what, outcome, moving),
            *tables.path_notes(outcome),
        ],
        outcome=outcome,
        offered_load=None if offered is None else offered.plain(config.workload),
        start=value["start"],
    )


def _line(rank: RankResult) -> str:
    return next(iter(rank.error.splitlines()), "ended without a result")


def check_fits(what: Deployment, requests: Sequence[Request]) -> None:
    """Raise a `ConfigError` that names the first of *requests* that is larger than the pools of either side."""
    table = RequestTable.of(requests)
    if not len(table):
        return
    most = int(table.input.max())
    if what.staging and what.prefill.tp != what.decode.tp and not what.shape.latent_bytes:
        pages = min(what.page_count(most), what.page_count(what.chunk) + 1)
        block = pages * what.page_size * what.shape.token_bytes(max(what.prefill.tp, what.decode.tp))
        if block > what.staging.ring:
            raise ConfigError(
                f"kv.staging_ring={format_size(what.staging.ring)} holds no chunk of {format_size(block)}, which "
                "would go in slices; raise kv.staging_ring, or lower scheduler.chunk"
            )
    for side, tokens, have in (
        ("prefill", table.input, what.prefill_pages),
        ("decode", table.input + table.output, what.decode_pages),
    ):
        if _excess(what, side, int(tokens.max()), have):
            excesses = ((number, _excess(what, side, each, have)) for number, each in enumerate(tokens.tolist()))
            number, excess = next((number, excess) for number, excess in excesses if excess)
            raise ConfigError(f"request {number} needs {excess}")


def check_contents(config: Config, what: Deployment, requests: Sequence[Request]) -> None:
    """Raise a `ConfigError` if simulated memory has contents and the KV of *requests* is more than `CONTENTS`."""
    tokens = int(RequestTable.of(requests).input.sum())
    size = tokens * what.shape.token_bytes(1)
    if config.memory == "tracked" and size > CONTENTS:
        raise ConfigError(
            f"memory=tracked would write and compare {format_size(size)} of KV ({tokens} tokens of prompts), more "
            f"than {format_size(CONTENTS)}; lower workload.count, take a smaller model, or set memory=timing"
        )


def _excess(what: Deployment, side: str, tokens: int, have: int) -> str:
    window, least, pages = what.window_need(tokens), what.window_pages(have), what.page_count(tokens)
    if what.shape.state.window and window > least:
        return (
            f"{window} pages of sliding-window layers on the {side} side, whose ranks have {least}; "
            "raise kv.window_share or kv.pool, or lower kv.page_size"
        )
    if pages > have:
        return (
            f"{pages} pages of {what.page_size} tokens on the {side} side, whose ranks have {have}; raise kv.pool, "
            f"scheduler.memory_fraction or parallel.{side}.tp, or choose a workload of shorter requests"
        )
    return ""
