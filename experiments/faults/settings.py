# SPDX-License-Identifier: Apache-2.0
"""Unusual settings that kinds of `experiments.faults.scenario` make of a deployment and its requests."""

from collections.abc import Sequence
from dataclasses import fields, replace
from math import inf
from typing import Any

import numpy as np

from pdsim.compute.forward import ForwardModel
from pdsim.compute.roofline import Exchange, ForwardTime
from pdsim.config import Config
from pdsim.hardware.costs import Collective, CollectiveModel, Engine
from pdsim.hardware.machine import Host, Machine, Nic
from pdsim.kv.allgather import MEMORIES
from pdsim.kv.pages import ORDERS
from pdsim.kv.policy import Staging
from pdsim.models.llm import Parallel, Side
from pdsim.serving.autoscale import Autoscale
from pdsim.serving.deployment import Deployment
from pdsim.serving.requests import HASHED
from pdsim.serving.settings import Cache, HostCosts
from pdsim.serving.workload import Request

LONGEST = 24, 8
"""Input and output tokens of a request, at most."""

LARGE = 64
"""Tokens in the place of one."""

FULL = 1 << 16
"""Bytes of a symmetric pool for which one rank has not enough memory, and enough to gather without it."""

_ROUTES = "least_tokens", "power_of_two", "round_robin", "transfer_aware"
_LINES = CollectiveModel(path="nvlink", pattern="ring", latency=1e-4, step=2e-5, rate=2e6)
LIBRARY = Collective(
    name="trial", implementation="trial", plain=_LINES, symmetric=_LINES, pool=1 << 14, grow_latency=1e-4,
    grow_rate=1e9, timeout=60.0,
)  # fmt: skip
"""The library that gathers."""


def with_two_sizes(config: Config, random: np.random.Generator) -> Config:
    """Return *config* with pages on one side that are two or four of the other's."""
    small, (side, more) = config.kv.page_size, random.random(2).tolist()
    large = small * (2 if more < 0.5 else 4)
    prefill, decode = (small, large) if side < 0.5 else (large, small)
    return replace(config, kv=replace(config.kv, page_size=prefill, decode_page_size=decode))


def drafting(config: Config, random: np.random.Generator) -> Config:
    """Return *config* with speculative decoding, and lists of descriptors that are made at first contact."""
    tokens, accepted, share, layers, comes, prepare = random.random(6).tolist()
    engine = replace(
        config.engine,
        draft=1 + int(3 * tokens),
        acceptance=accepted,
        draft_share=0.5 * share,
        draft_layers=int(layers < 0.7 and config.model.hybrid.pattern == "a"),
        draft_kv="transferred" if comes < 0.5 else "recomputed",
        prepare=10.0 ** (-7.0 + 3 * prepare),
    )
    return replace(config, engine=engine)


def on_two_nodes(config: Config) -> Config:
    """Return *config* on two nodes of half the GPUs each, with network cards as slow as the links within one."""
    machine, intra = config.hw, config.backend.intra
    assert intra is not None
    cards = Nic(count=machine.gpus // 2, rate=machine.interconnect.rate, latency=5e-6)
    machine = replace(machine, nodes=2, gpus=machine.gpus // 2, nic=cards)
    return replace(
        config, hw=machine, backend=replace(config.backend, inter=replace(intra, path="rdma", overlap=True))
    )


def edge_lengths(requests: Sequence[Request], job: Deployment, random: np.random.Generator) -> list[Request]:
    """Return *requests* with inputs of whole pages or chunks, or one token more, and outputs of one or two tokens.

    A number of draws of its own for each keeps the first of more requests what they are among fewer.
    """
    lengths = []
    for request in requests:
        which, many, more, output = random.random(4).tolist()
        unit = (job.page_size, job.chunk, 1)[int(3 * which)]
        tokens = unit * (1 + int(many * max(1, LONGEST[0] // unit))) + int(2 * more)
        lengths.append(request._replace(input=min(tokens, LONGEST[0]), output=(1, 1, 2)[int(3 * output)]))
    return lengths


def limited(job: Deployment, random: np.random.Generator) -> Deployment:
    """Return *job* with a limit for a room's pages at decode, for all of it to arrive, or for both."""
    which, bootstrap, waiting = random.random(3).tolist()
    return replace(
        job,
        bootstrap_timeout=10 ** (-1.0 + bootstrap) if which < 0.7 else 0.0,
        waiting_timeout=10 ** (-1.0 + waiting) if which > 0.3 else 0.0,
    )


def full_queue(engine: Engine, random: np.random.Generator) -> Engine:
    """Return *engine* with room for few descriptors to one peer; half of the time more are refused.

    Then there is room for a probe's, 106 with a draft's layers: alone its writes must not fail.
    """
    size, full = int(random.integers(3)), "refuse" if random.random() < 0.5 else "wait"
    depth = ((4, 16, 64) if full == "wait" else (128, 192, 256))[size]
    paths = {name: getattr(engine, name) for name in ("intra", "inter")}
    return replace(engine, **{name: path and replace(path, depth=depth, full=full) for name, path in paths.items()})


def crowded(config: Config, random: np.random.Generator) -> Config:
    """Return *config* with pages of one or two tokens and larger batches: requests that grow run out of pages."""
    page, batch = random.random(2).tolist()
    limits = replace(config.scheduler, decode_batch=4 + int(5 * batch))
    return replace(config, kv=replace(config.kv, page_size=1 + int(2 * page)), scheduler=limits)


def small_ring(job: Deployment, random: np.random.Generator) -> Staging:
    """Return staging of *job* with a ring of a third of the longest prompt's part of a chunk to two of them."""
    assert job.staging is not None
    size, together, whole, buffer = random.random(4).tolist()
    tokens = (job.chunk // job.page_size + 1) * job.page_size  # of the buffer
    longest = job.staging.buffer * min(1.0, LONGEST[0] / tokens)
    ring = whole_ring(job, int(longest * 10.0 ** (0.8 * size - 0.5)), whole)
    own = int(job.staging.buffer * min(1.0, 0.3 + buffer))  # some chunks exceed it
    return replace(job.staging, ring=ring, buffer=own, scatter="chunk" if together < 0.85 else "writer")


def whole_ring(job: Deployment, ring: int, chance: float) -> int:
    """Return the bytes of a *ring*, half of the time of whole pages: then blocks end where it ends."""
    page = job.page_size * job.shape.token_bytes(max(job.prefill.tp, job.decode.tp))
    return ring if chance < 0.5 else max(1, ring // page) * page


def another_engine(engine: Engine, random: np.random.Generator) -> Engine:
    """Return *engine* with other stages, order, queues and threads, so that completions come in other orders."""
    chance = random.random(9).tolist()
    threads = 1 + int(3 * chance[0])

    changes: dict[str, Any] = {
        "overlap": chance[1] < 0.7,
        "pipelined": chance[1] < 0.35,
        "in_order": chance[2] < 0.5,
        "streams": chance[6] < 0.5,
        "one_stream": chance[7] >= 0.5,
        "queues": 1 + int(3 * chance[3]),
        "queue_rate": 1e6 if chance[4] < 0.5 else inf,
        "wire_descriptor": 1e-5 * (chance[5] < 0.5),
        "read": 1e-4 * chance[6],
        "read_descriptor": 1e-6 * chance[6],
        "read_rate": 1e6 if chance[7] < 0.5 else inf,
    }
    paths = {name: getattr(engine, name) for name in ("intra", "inter")}
    changed = {name: path and replace(path, **changes) for name, path in paths.items()}
    return replace(engine, threads=threads, serial=chance[8] if threads > 1 else 1.0, **changed)


def growing(job: Deployment, random: np.random.Generator) -> Deployment:
    """Return *job* whose decode admits requests with pages for their input, and preempts when others run short.

    Pools are one to one and a half of the longest requests; KV takes as long as some steps to host memory and back.
    """
    share, reserved, preemption, victim = random.random(4).tolist()
    engine = replace(
        job.engine,
        memory="grow",
        reserved_tokens=int(6 * reserved),
        preemption="recompute" if preemption < 0.5 else "retract",
        retract_rate=1e6,
        scheduler="fcfs" if victim < 0.5 else "least_generated",
    )
    return replace(job, engine=engine, decode_pages=int(job.page_count(sum(LONGEST)) * (1.0 + share / 2)))


def hosted(job: Deployment, random: np.random.Generator) -> Deployment:
    """Return *job* with the loops of SGLang or vLLM, each of their rules with an even chance.

    Host costs are half of the time none, otherwise from a hundredth of a forward to three.
    """
    chance = random.random(10).tolist()
    engine = replace(
        job.engine,
        ahead=chance[0] < 0.5,
        overlap=chance[1] < 0.5,
        pipeline=int(4 * chance[2]),
        posting_holds=chance[3] < 0.5,
        busy=1.0 + 2.0 * chance[4],
        variation=0.5 * (chance[5] < 0.5),
        proxy=1e-3 * chance[6],
        scheduler="fcfs" if chance[7] < 0.5 else "least_generated",
        page_order="tokens" if chance[8] < 0.5 or job.staging else "heads",
        pages=ORDERS[int(len(ORDERS) * chance[9])],
        prefill=_costs(random),
        decode=_costs(random),
        packed=bool(random.random() < 0.5) and not job.staging,
    )
    holds, notice, stall = random.random(3).tolist()
    if holds < 0.5:  # what comes holds decode's scheduler
        handoff = replace(
            job.handoff, notice=10.0 ** (-6.0 + 2.5 * notice), metadata_stall=10.0 ** (-5.0 + 2 * stall)
        )
        job = replace(job, handoff=handoff)
    handed, lock = random.random(2).tolist()
    if handed < 0.5:  # the scheduler has the lock that a queue's thread needs
        job = replace(job, handoff=replace(job.handoff, handover=10.0 ** (-5.0 + 2 * lock)))
    return replace(job, engine=engine)


def _costs(random: np.random.Generator) -> HostCosts:
    costs = {}
    for each in fields(HostCosts):
        chance, size = random.random(2).tolist()
        costs[each.name] = 10 ** (-5.0 + 2.5 * size) * (chance < 0.5) / (10 if each.name.endswith("_token") else 1)
    return HostCosts(**costs)


def pulled(job: Deployment, random: np.random.Generator) -> Deployment:
    """Return *job* with pulled handoffs, under leases that last from a few reads to the whole run."""
    lease = 10.0 ** float(random.uniform(-1.5, 1.5))
    engine = replace(job.engine, handoff="pull", recompute=1, memory="grow", lease=lease, heartbeat=lease / 3)
    engine = replace(engine, noticed="decode" if random.random() < 0.4 else "prefill")
    answer, slow = random.random(2).tolist()
    if slow < 0.5:  # users leave, and instances are lost, before the answer
        engine = replace(engine, prefill=replace(engine.prefill, answer=10.0 ** (-4.0 + 3.5 * answer)))
    return replace(job, engine=engine, staging=None)


def routed(job: Deployment, random: np.random.Generator) -> Deployment:
    """Return *job* with routing policies that need no cache, and retries from none to three."""
    policy, unknown, retries, by_chance, apart, other = random.random(6).tolist()
    routes = *_ROUTES, "random"
    return replace(
        job,
        policy="random" if by_chance < 0.1 else _ROUTES[int(4 * policy)],
        decode_policy=routes[int(5 * other)] if apart < 0.3 else "",
        output_known=unknown < 0.5,
        retries=int(4 * retries),
        rates=_rates(job, random),
    )


def _rates(job: Deployment, random: np.random.Generator) -> dict[str, dict[str, float]]:
    # What a router may know: bytes/s from each prefill instance to each decode instance; a third knows nothing.
    if random.random() < 1 / 3:
        return {}
    return {one: {other: 10.0 ** float(random.uniform(5.5, 7.0)) for other in job.decodes} for one in job.prefills}


def scaled(job: Deployment, random: np.random.Generator) -> Deployment:
    """Return *job* whose instances start and drain as a policy of autoscaling says, half of the time within GPUs."""
    policy, low, high, share, gpus = random.random(5).tolist()
    every, start, switch = (10.0 ** random.uniform((-1.7, -3.0, -3.0), (-0.5, -0.5, -1.0))).tolist()
    steps = [[0.04 * number, *random.integers(1, 4, 2).tolist()] for number in range(6)]
    options: tuple[dict[str, Any], ...] = (
        {"steps": steps, "day": 0.24},
        {"queue_up": 4 * high, "queue_down": 2 * low, "kv_up": 0.6 * high, "kv_down": 0.3 * low},
        {"queue": 6 * high, "queue_spare": 3 * low, "kv": 0.8 * high, "kv_spare": 0.3 * low},
    )
    which, sizes = int(3 * policy), (len(job.prefills) * job.prefill.size, len(job.decodes) * job.decode.size)
    least = job.prefill.size + job.decode.size
    autoscale = Autoscale(
        policy=("schedule", "thresholds", "saturation")[which],
        options=options[which],
        every=every,
        sample=every * (0.2 + 0.8 * share),
        start=start,
        switch=switch,
        gpus=least + int((sum(sizes) - least + 1) * 2 * gpus) if gpus < 0.5 else 0,
    )
    return replace(job, autoscale=autoscale)


def gathering(config: Config, sides: tuple[Side, Side], large: int, random: np.random.Generator) -> Config:
    """Return *config* whose prefill gathers KV, on *sides* unless it has context-parallel ranks already.

    It does so *large* times as fast.
    """
    if config.parallel.prefill.cp == 1:
        config = replace(config, parallel=Parallel(prefill=sides[0], decode=sides[1]))
    memory, (small, grow, full) = MEMORIES[int(random.integers(len(MEMORIES)))], random.random(3).tolist()
    lines = replace(_LINES, rate=large * _LINES.rate)
    pool = large * (1 << 8, 1 << 11, LIBRARY.pool)[int(3 * small)] if full < 0.7 else large * FULL
    library = replace(LIBRARY, plain=lines, symmetric=lines, pool=pool, grow=grow < 0.5)
    return replace(config, collective=library, kv=replace(config.kv, gather=memory))


def cached(
    job: Deployment, requests: Sequence[Request], random: np.random.Generator
) -> tuple[Deployment, list[Request]]:
    """Return *job* with a cache on at least one side; prompts are the beginnings of one to four texts."""
    side, radix, scheduled, early, host, limit, texts = random.random(7).tolist()
    tokens = LONGEST[0]
    cache = Cache(
        prefill=side < 0.7,
        decode=side > 0.4,
        eviction="radix" if radix < 0.5 else "block",
        found="scheduled" if scheduled < 0.3 else "computed",
        early=early < 0.5 and scheduled >= 0.3,  # what is only scheduled cannot be sent yet
        host=int(2 * tokens * host) if host > 0.5 and side < 0.7 else 0,
        limit=int(2 * tokens * limit) if limit > 0.7 else 0,
    )
    which = 1 + (random.random(len(requests)) * (1 + int(4 * texts))).astype(int)
    alike = [request._replace(hash_ids=(text,)) for request, text in zip(requests, which.tolist(), strict=True)]
    if cache.host:
        ssd, remote, shared, chunk, overlap = random.random(5).tolist()
        write = random.choice(("through", "through", "selective", "back"))
        prefetch = random.choice(("none", "best_effort", "timeout", "wait_complete"))
        cache = replace(
            cache,
            ssd=int(2 * tokens * ssd) if ssd > 0.6 else 0,
            remote=int(2 * tokens * remote) if remote > 0.6 else 0,
            shared=shared < 0.3,
            chunk=4 * job.page_size if chunk < 0.3 else 1,
            overlap=overlap < 0.3 and not cache.early and not job.layerwise,
            write=str(write),
            prefetch=str(prefetch),
            prefetch_timeout=0.01,
        )
    routes, pairs, ahead = random.random(3).tolist()
    if routes < 0.4:
        job = replace(job, policy="first_token" if pairs < 0.5 else "cache_aware", rates=_rates(job, random))
    if cache.found == "scheduled" and ahead < 0.7:  # rooms that fail between two forwards
        job = replace(job, engine=replace(job.engine, ahead=True))
    return replace(job, cache=cache, staging=None if cache.decode else job.staging), alike


def tiered(
    job: Deployment, requests: Sequence[Request], random: np.random.Generator
) -> tuple[Deployment, list[Request]]:
    """Return *job*, which caches, with a host tier of up to three of the longest prompts, often others below.

    Half of the time *requests* come by fours, three with one text: a short one, and two that have its pages, too.
    """
    size, write, prefetch, ssd, remote, small, late, block, fours = random.random(9).tolist()
    cache = replace(
        job.cache,
        prefill=True,
        # what has left host memory, where that is small, is below
        host=int(LONGEST[0] * ((1 + 2 * size) if small < 0.5 else (0.3 + 0.7 * size))),
        ssd=int(LONGEST[0] * (1 + 3 * ssd / 0.8)) if ssd < 0.8 else 0,
        remote=int(LONGEST[0] * (1 + 3 * remote / 0.6)) if remote < 0.6 else 0,
        write="through" if write < 0.5 else "selective" if write < 0.8 else "back",
        prefetch=("none", "best_effort", "timeout", "wait_complete")[int(4 * prefetch)],
        prefetch_timeout=10.0 ** (-4.0 + 2.5 * late),
        eviction="block" if block < 0.5 else job.cache.eviction,
    )
    if random.random() < 0.4 and not cache.early and not job.layerwise:
        cache = replace(cache, overlap=True)
    objects, few, more = random.random(3).tolist()
    if objects < 0.4:  # a prompt's last pages stay here alone
        cache = replace(cache, chunk=(2 + int(5 * objects)) * job.page_size)
    if few < 0.5:  # pages are taken while others of the same prompt are written
        job = replace(job, prefill_pages=int(job.page_count(LONGEST[0]) * (1.0 + more)))
    if len(job.prefills) > 1 and random.random() > 0.6:  # another instance writes what this one is about to
        cache = replace(cache, shared=True, write="selective" if random.random() < 0.6 else cache.write)
    if random.random() < 0.15 and cache.ssd + cache.remote:  # lower tiers alone
        cache = replace(cache, host=0, prefetch="none")
    alike = list(requests)
    for number, request in enumerate(requests if fours < 0.5 else ()):
        first = requests[number - number % 4]
        tokens = min(LONGEST[0], job.page_size + 1) if number % 4 == 0 else request.input
        text = (LARGE + number,) if number % 4 == 2 else first.hash_ids
        alike[number] = request._replace(arrival=first.arrival, hash_ids=text, input=tokens)
    return replace(job, cache=cache), alike


def in_blocks(
    job: Deployment, requests: Sequence[Request], machine: Machine, engine: Engine, random: np.random.Generator
) -> tuple[Deployment, list[Request], Machine, Engine]:
    """Return all with `LARGE` tokens in the place of each: prompts have several of the blocks that are hashed.

    Links are as much faster, so that times stay.  Lengths that are not whole are less by up to `LARGE` - 1, and
    prompts that begin alike part at a block.
    """
    cache, staging = job.cache, job.staging
    sizes = {name: LARGE * getattr(cache, name) for name in ("host", "ssd", "remote", "limit")}
    job = replace(
        job,
        page_size=LARGE * job.page_size,
        chunk=LARGE * job.chunk,
        shed=LARGE * job.shed,
        prefill_time=_reduced(job.prefill_time),
        decode_time=_reduced(job.decode_time),
        cache=replace(cache, **sizes, chunk=LARGE * cache.chunk if cache.chunk > 1 else 1),
        engine=replace(
            job.engine,
            retract_rate=LARGE * job.engine.retract_rate,
            prefill=_by_tokens(job.engine.prefill),
            decode=_by_tokens(job.engine.decode),
        ),
        staging=staging and replace(staging, ring=LARGE * staging.ring, buffer=LARGE * staging.buffer),
    )
    changed = []
    for request in requests:
        whole, less, *parts = random.random(5).tolist()
        tokens, ids = LARGE * request.input - int(LARGE * less) * (whole < 0.6), list(request.hash_ids)
        for part in parts[: (tokens - 1) // HASHED] if ids else ():
            ids.append(10 * ids[-1] + (part < 0.3))
        changed.append(request._replace(input=tokens, hash_ids=tuple(ids)))
    assert machine.gpu is not None
    gpu, joint, nic = machine.gpu, machine.interconnect, machine.nic
    machine = replace(
        machine,
        gpu=replace(gpu, memory_rate=LARGE * gpu.memory_rate, pcie=LARGE * gpu.pcie),
        interconnect=replace(joint, rate=LARGE * joint.rate),
        nic=replace(nic, rate=LARGE * nic.rate),
    )
    paths = {name: getattr(engine, name) for name in ("intra", "inter")}
    rates = {
        name: path
        and replace(
            path,
            queue_rate=LARGE * path.queue_rate,
            read_rate=LARGE * path.read_rate,
            descriptor=path.descriptor / LARGE,  # one a token, where heads part
            wire_descriptor=path.wire_descriptor / LARGE,
            read_descriptor=path.read_descriptor / LARGE,
        )
        for name, path in paths.items()
    }
    return job, changed, machine, replace(engine, **rates)


def _reduced(time: ForwardModel) -> ForwardTime:
    assert isinstance(time, ForwardTime)
    return replace(time, token_allreduce=time.token_allreduce / LARGE)


def _by_tokens(costs: HostCosts) -> HostCosts:
    each = {field.name: getattr(costs, field.name) / LARGE for field in fields(costs) if "_token" in field.name}
    return replace(costs, **each)


def used(
    job: Deployment, requests: Sequence[Request], random: np.random.Generator
) -> tuple[Deployment, list[Request]]:
    """Return *job* whose users ask again when they fail, and whose router is slow, has replicas or refuses some.

    A quarter of the *requests* has a priority, and in half of the scenarios a quarter comes after an earlier one.
    """
    asks, after, slow, sync, shed, limit, sessions = random.random(7).tolist()
    each = random.random((len(requests), 3)).tolist()
    changed = []
    for number, (request, (priority, follows, earlier)) in enumerate(zip(requests, each, strict=True)):
        request = request._replace(priority=int(priority < 0.25))
        if number and sessions < 0.5 and follows < 0.25:
            request = request._replace(arrival=0.05 * earlier, after=int(number * earlier))
        changed.append(request)
    engine = replace(job.engine, proxy=10.0 ** (-3.5 + 2.0 * slow) if slow < 0.7 else job.engine.proxy)
    if random.random() < 0.3:
        engine = replace(engine, scheduler="priority")
    job = replace(
        job,
        engine=engine,
        asks=int(3 * asks),
        asks_after=10.0 ** (-3.0 + 2.5 * after),
        routers=1 + int(3 * sync),
        routers_sync=0.1 * (sync > 0.5),
        shed=int(LONGEST[0] * (1 + 3 * limit)) if shed < 0.4 else 0,
        retries=max(job.retries, 1),
    )
    return job, changed


def other_writes(job: Deployment, random: np.random.Generator) -> Deployment:
    """Return *job* with any calls, queues, notifications and way of metadata that go together."""
    queues, shard, call, slices, pages, notify, metadata, back, memory = random.random(9).tolist()
    control = metadata > 0.7
    policy = replace(
        job.handoff,
        queues=max(1 if job.staging else 0, (0, 1, 2, 4)[int(4 * queues)]),
        shard="session" if shard < 0.5 else "room",
        call=("chunk", "plane", "descriptor")[int(3 * call)],
        slices=("", "chunk", "plane")[int(3 * slices)],
        grouping="runs" if pages < 0.6 else "pages",
        notify="write" if job.staging else ("write", "message", "poll")[int(3 * notify)],
        metadata="control" if control else "batch" if metadata < 0.35 else "write",
        metadata_memory="host" if control and memory < 0.5 else "",
        metadata_fallback="control" if back < 0.5 else "",
    )
    return replace(job, handoff=policy)


def slow_stores(host: Host, random: np.random.Generator) -> Host:
    """Return *host* whose SSD and remote store take as long as a request waits for decode, or longer."""
    first, second = (10.0 ** random.uniform(-4.0, -1.5, 2)).tolist()
    return replace(host, ssd=replace(host.ssd, latency=first), store=replace(host.store, latency=second))


def late_programs(host: Host, random: np.random.Generator) -> Host:
    """Return *host* whose programs act late upon what comes, and later when they have been idle."""
    wake, idle, after = (10.0 ** random.uniform((-7.0, -5.5, -5.5), (-4.0, -3.5, -2.5))).tolist()
    return replace(host, wake=wake, idle_wake=idle, idle_after=after)


def exchanging(job: Deployment, random: np.random.Generator) -> Deployment:
    """Return *job* whose tokens travel to experts of other ranks, often for longer than forwards compute.

    They share the links of transfers, and half of the time they come late: links are slower than forwards take them
    to be.  Stages and context-parallel ranks have no experts of their own.
    """
    times = []
    for grid, time in ((job.prefill, job.prefill_time), (job.decode, job.decode_time)):
        assert isinstance(time, ForwardTime)
        size, way, latency, overlap, late = random.random(5).tolist()
        rate, nbytes = 2e6 * 8.0 ** max(0.0, 2 * late - 1.0), 10.0 ** (1.5 + 1.5 * size)  # of a token
        exchange = Exchange(
            network=nbytes * (way < 0.6),
            port=nbytes * (way > 0.3),
            network_rate=rate,
            port_rate=rate,
            latency=1e-4 * latency,
            overlap=overlap < 0.5,
        )
        times.append(replace(time, exchange=exchange) if grid.pp * grid.cp == 1 else time)
    return replace(job, prefill_time=times[0], decode_time=times[1])


CHANGES = {"limits": limited, "grows": growing, "hosts": hosted, "pulls": pulled, "routes": routed}
CHANGES |= {"experts": exchanging, "scales": scaled}
"""What kinds change of a deployment, in this order."""
