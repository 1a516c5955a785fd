# SPDX-License-Identifier: Apache-2.0
"""A scenario: a deployment, its requests, and what goes wrong, drawn from a seed; and one try of it.

Each part is drawn from a stream of its own (`pdsim.serving.workload.stream`).  So a part can be left out, or the
number of requests changed, and all others stay what they were, which lets `shrunk` take away causes one by one.
Deployments are tiny: contention, preemption and wrap-around are more frequent than at any real size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from experiments import serve
from experiments.faults.accounts import misdrained, misreported, misrouted
from experiments.faults.causes import Causes, Scenario
from experiments.faults.late import DEADLINE, overtaken, stale, unanswered
from experiments.faults.losses import (
    at_moments,
    card_outages,
    cut_for_long,
    deserted,
    drains,
    faults_of,
    given_up,
    halved,
    losses,
    router_outages,
    slow_loads,
)
from experiments.faults.programs import beside, holding, other_rows, short
from experiments.faults.settings import (
    CHANGES,
    FULL,
    LARGE,
    LONGEST,
    another_engine,
    cached,
    crowded,
    drafting,
    edge_lengths,
    full_queue,
    gathering,
    in_blocks,
    late_programs,
    on_two_nodes,
    other_writes,
    slow_stores,
    small_ring,
    tiered,
    used,
    whole_ring,
    with_two_sizes,
)
from experiments.faults.shortcuts import compared, long_prompts, sleeping
from experiments.faults.sides import (
    DEEP_SIDES,
    FAR_SIDES,
    GATHER_PAIRS,
    GATHER_SIDES,
    GROUPS,
    LAYERED_SIDES,
    PAIRS,
    PIPELINES,
    REPLICAS,
    SEVERAL_WRITERS,
    SHARED_SIDES,
    SIDES,
    STAGED_PAIRS,
    STAGED_SIDES,
    TIER_SIDES,
    WIDE_SIDES,
)
from pdsim.compute.forward import Compute
from pdsim.config import Config
from pdsim.hardware.costs import Engine, EngineModel
from pdsim.hardware.machine import Gpu, Host, Interconnect, Machine, Nic
from pdsim.kv.policy import Policy, Staging
from pdsim.models.llm import Hybrid, Llm, Parallel, Side
from pdsim.serving.deployment import Deployment
from pdsim.serving.settings import Kv, SchedulerLimits
from pdsim.serving.workload import Request, stream
from pdsim.sim.faults import CardOutage, Faults
from pdsim.sim.model import Model
from pdsim.verify.invariants import InvariantChecker, Violation
from pdsim.verify.reached import counted

__all__ = ["KINDS", "RARE", "Scenario", "Tried", "attempt", "draw"]

KINDS = {
    "delays": "control messages arrive late, in order",
    "late": "completions arrive late",
    "stray": "bytes move between post and completion",
    "shuffle": "simultaneous events in any order",
    "slow": "a rank is slow",
    "squeezes": "a link is cut or slow",
    "aborts": "a quarter of the users leave",
    "kills": "a rank is killed",
    "restarts": "an instance that lost a rank starts again",
    "torn": "transfers move in parts",
    "losses": "several instances lose a rank each",
    "together": "a pair of instances starts again",
    "silences": "a rank's messages are held",
    "router": "the router is killed",
    "broken": "transfers fail after none, some or all bytes",
    "full": "a short send queue: posting waits, or is refused",
    "layouts": "PP with CP, data parallelism, decode stages, three instances a side",
    "policies": "metadata by message; notification by poll",
    "limits": "time limits for decode pages and for arrival",
    "held": "decode holds some first pages",
    "nodes": "two nodes, joined by RDMA",
    "edges": "whole pages or chunks, or a token more",
    "scatter": "pools hold little more than the longest request; slow scattering",
    "pauses": "a rank stands still",
    "grows": "pages grow; preempted KV is recomputed or retracted",
    "hosts": "host costs of SGLang's and vLLM's loops",
    "pulls": "decode reads from prefill; leases end early",
    "engines": "other orders, threads, queues and reads",
    "routes": "routing policies, unknown output lengths, retries",
    "gathers": "context-parallel ranks gather KV",
    "caches": "shared prompts; prefix caches, eviction, host memory",
    "siblings": "all instances of a side start again",
    "stale": "messages arrive after their rank's restart",
    "rings": "staged writes end late",
    "changes": "instances drain, leave, join again, and are lost",
    "sizes": "pages of two sizes",
    "drafts": "speculative decoding; descriptor lists",
    "lags": "some messages arrive late",
    "stages": "small staging rings",
    "crowds": "growing pages run out; users leave late",
    "shares": "context-parallel shares of small chunks",
    "tiers": "small tiers",
    "halves": "one rank killed, another standing still",
    "runs": "long prompts; shortcuts compared",
    "layerwise": "each layer leaves when it is computed",
    "moments": "after a message a rank is lost, or a user leaves",
    "users": "users ask again; routers are slow, several, refuse",
    "wakes": "programs act late",
    "blocks": "prompts of several blocks",
    "notices": "notifications arrive late",
    "overtakes": "one rank's messages arrive late",
    "hurries": "ranks stop with the last request",
    "experts": "tokens travel to experts",
    "scales": "autoscaling",
    "writes": "other calls, queues and metadata",
    "cards": "network cards fail",
}
"""The kinds of faults and unusual circumstances, and their effects: the table of `docs/faults.md`.

New kinds are appended: each is drawn in this order, so that the kinds of earlier seeds stay as they were."""

RARE = {"router": 0.15, "silences": 0.5, "pauses": 0.5, "shares": 0.3, "tiers": 0.5, "halves": 0.4}
RARE |= {"runs": 0.15, "layerwise": 0.4, "moments": 1.2, "users": 0.5, "wakes": 0.3, "blocks": 0.2, "scales": 0.3}
RARE |= {"notices": 0.5, "overtakes": 0.6, "hurries": 0.4, "experts": 0.3, "writes": 0.5, "cards": 0.3}
"""By how much less likely than the others these are: little can be checked after the loss of the router."""

_EXCLUDED = {
    "stages": {"pulls", "gathers", "sizes", "layouts", "caches", "tiers", "shares"},
    "crowds": {"sizes", "edges"},
    "layerwise": {"stages", "rings", "pulls", "gathers"},
    "blocks": {"full"},  # one of its pages may have more descriptors
    "scales": {"changes", "router", "layerwise"},
    "hurries": {"changes", "halves", "pauses", "router", "silences", "stale"},
}
_EXCLUDED["runs"] = KINDS.keys() - {"runs", "aborts", "hosts", "engines", "nodes"}
"""Kinds that would undo others, and do not happen beside them."""

_MACHINE = Machine(
    name="trial",
    vendor="nvidia",
    nodes=1,
    gpus=8,
    gpu=Gpu(name="trial", memory=1 << 26, memory_rate=1e9, compute=1e12, pcie=1e6),
    interconnect=Interconnect(kind="switch", rate=2e6),  # so slow that a handoff takes as long as a forward
    nic=Nic(count=0, rate=0.0),
    host=Host(memory=1 << 26, memory_rate=1e9, tcp_rate=1e9, tcp_latency=50e-6),
)
_ENGINE = Engine(
    name="trial",
    implementation="trial",
    vendors=("nvidia",),
    intra=EngineModel(path="nvlink", call=20e-6, descriptor=1e-6, overlap=False, latency=10e-6),
    inter=None,
    timeout=0.25,
)
_LLM = Llm(name="trial", parameters=1e4, active=1e4, layers=2, hidden=32, heads=8, kv_heads=4, head_dim=4)
_HYBRID = Hybrid(
    pattern="maw", window=6, conv_groups=(8, 8, 16), conv_width=3, ssm_heads=8, ssm_head_elements=4, index_bytes=8
)
_MODELS = (
    _LLM,
    replace(_LLM, kv_heads=2),
    replace(_LLM, attention="mla", latent_dim=12),
    replace(_LLM, layers=3, hybrid=_HYBRID),
)
_POLICIES = (
    Policy(metadata="batch"),
    Policy(queues=4, metadata="write", metadata_fallback="control", staging=True),
    Policy(queues=1, metadata="batch", staging=True),
    Policy(queues=2, shard="room", call="plane", metadata="batch", notify="message"),
    Policy(queues=1, grouping="pages", metadata="batch", notify="poll"),
    Policy(metadata="control", metadata_memory="host"),
)
_STAGING_POLICIES = tuple(policy for policy in _POLICIES if policy.staging)
_MESSAGE_POLICIES = (  # which tell of arrivals and metadata by messages
    Policy(metadata="control", notify="message"),
    Policy(queues=2, metadata="control", notify="poll"),
    Policy(queues=3, metadata="control", metadata_memory="host", notify="poll", call="plane"),
    Policy(queues=1, metadata="write", metadata_fallback="control", notify="message", grouping="pages"),
    Policy(queues=2, metadata="control", staging=True),
)


class Tried(NamedTuple):
    """The outcome of one scenario."""

    seed: int  # with which it can be tried again
    violations: list[Violation]  # that the checkers (`pdsim.verify`) report; none is what is hoped for
    statuses: dict[str, int]  # how many requests ended with each first word: ok, PeerLost, Aborted and so on
    events: int  # of the simulation: equal numbers are a good sign of equal runs
    text: str  # layout, pools and kinds of faults, in a line
    reached: dict[str, int] = {}  # noqa: RUF012  # transitions and messages, how often (`pdsim.verify.reached`)


def draw(
    seed: int,
    count: int,
    intensity: float,
    without: frozenset[str] = frozenset(),
    always: frozenset[str] = frozenset(),
) -> Scenario:
    """Return the scenario of *seed* with *count* requests, which are the first of one with more.

    *intensity* from 0 to 1 is the probability of each of `KINDS`, times its entry in `RARE`; it decides only which
    kinds happen, not what they are.  Kinds in *without* do not happen, others in *always* do, and nothing else
    changes by that but when the message of "moments" is sent.
    """

    def random(name: str) -> np.random.Generator:
        return stream(seed, f"faults.{name}")

    def chosen(name: str, choices: Sequence[Any]) -> Any:
        return choices[int(random(name).integers(len(choices)))]

    chances = dict(zip(KINDS, random("kinds").random(len(KINDS)).tolist(), strict=True))
    chances |= dict.fromkeys(always, -1.0)
    kinds = [kind for kind in KINDS if chances[kind] < intensity * RARE.get(kind, 1.0) and kind not in without]
    kinds = [kind for kind in kinds if kind in always or not _EXCLUDED.get(kind, set()) & always]
    if "pulls" in kinds and random("pulls.first").random() < 0.6:  # else most handoffs are pushed
        kinds = [kind for kind in kinds if kind in always or kind not in ("stages", "layerwise")]
    undone = {other for kind, others in _EXCLUDED.items() if kind in kinds for other in others}
    kinds = [kind for kind in kinds if kind not in undone]
    if {"tiers", "blocks"} & {*kinds} and "caches" not in without:
        kinds = [kind for kind in KINDS if kind in kinds or kind == "caches"]
    if "cards" in kinds and "nodes" not in without:
        kinds = [kind for kind in KINDS if kind in kinds or kind == "nodes"]
    geometry = random("geometry")
    config = _config(seed, geometry)
    if "crowds" in kinds:
        config = crowded(config, random("crowds"))
    if "runs" in kinds:
        prefill, decode = chosen(
            "runs.sides", [pair for pair in SIDES if max(pair[0].pp, pair[0].cp, pair[0].dp) == 1]
        )
        config = replace(config, parallel=Parallel(prefill=prefill, decode=decode))
        config = replace(config, scheduler=replace(config.scheduler, chunk=chosen("runs.chunk", (8, 16, 32))))
    if "layerwise" in kinds:
        prefill, decode = chosen("layerwise", LAYERED_SIDES)
        config = replace(config, parallel=Parallel(prefill=prefill, decode=decode))
    if "layouts" in kinds:
        prefill, decode = chosen("layouts", WIDE_SIDES)
        special = random("layouts.replicas").random()
        if special < 0.2:  # heads on several ranks of a side
            prefill, decode = chosen("layouts.heads", REPLICAS)
            config = replace(config, model=replace(_LLM, kv_heads=2))
        elif special < 0.4:  # decode asks which prefill group has a room
            prefill, decode = chosen("layouts.groups", GROUPS)
        elif special < 0.55:
            prefill, decode = chosen("layouts.deep", DEEP_SIDES)
            config = replace(config, model=replace(_LLM, layers=4))
        config = replace(config, parallel=Parallel(prefill=prefill, decode=decode))
    if {"rings", "stages"} & {*kinds}:
        prefill, decode = chosen("rings", SEVERAL_WRITERS if "stages" in kinds else STAGED_SIDES)
        if random("rings.pipeline").random() < 0.35:  # blocks of several stages
            prefill, decode = chosen("rings.stages", PIPELINES)
        config = replace(config, parallel=Parallel(prefill=prefill, decode=decode), model=_LLM)
    if "nodes" in kinds:
        config = on_two_nodes(config)
    gathers = "gathers" in kinds and "held" not in kinds  # whose first pages are not gathered
    if gathers and "caches" in kinds:
        gathers = bool(random("gathers.caches").random() < 0.5)
    if gathers:
        config = gathering(
            config, chosen("gathers", GATHER_SIDES), LARGE if "blocks" in kinds else 1, random("gathers.memory")
        )
    if "shares" in kinds and not gathers:
        prefill, decode = chosen("shares", SHARED_SIDES)
        config = replace(config, parallel=Parallel(prefill=prefill, decode=decode))
        config = replace(config, scheduler=replace(config.scheduler, chunk=6))
    if config.model.latent_dim and random("hybrid.latent").random() < 0.4:  # sparse attention over latent rows
        config = replace(config, model=replace(config.model, hybrid=Hybrid(index_bytes=8)))
    if config.model.hybrid.pattern != "a" and random("hybrid").random() < 0.4:  # of one kind of state
        kind = chosen("hybrid.kind", ("aw", "am"))
        state = replace(_HYBRID, pattern=kind, window=_HYBRID.window * ("w" in kind))
        if "m" not in kind:
            state = replace(state, conv_groups=(), conv_width=0, ssm_heads=0, ssm_head_elements=0)
        config = replace(config, model=replace(_LLM, layers=3, hybrid=state))
    if "caches" in kinds and config.model.hybrid.pattern != "a":  # a prefix cache keeps no state beside KV
        config = replace(config, model=_LLM)
    both = config.parallel.prefill, config.parallel.decode
    alone = max(side.instances * side.dp for side in both) == 1
    if {"changes", "scales"} & {*kinds} and alone:  # somebody serves meanwhile
        prefill, decode = chosen("changes.sides", GATHER_PAIRS if gathers else PAIRS)
        if "stages" in kinds:
            prefill, decode = chosen("changes.staged", STAGED_PAIRS)
        config = replace(config, parallel=Parallel(prefill=prefill, decode=decode))
    elif {"users", "moments"} & {*kinds} and alone:
        prefill, decode = chosen("users.sides", GATHER_PAIRS if gathers else PAIRS)
        if random("users.pair").random() < 0.5 and not {"stages", "rings", "layerwise", "runs", "shares"} & {*kinds}:
            config = replace(config, parallel=Parallel(prefill=prefill, decode=decode))
    kinds_of_users = {"moments", "users"} & {*kinds} and "stages" not in kinds
    own_sides = {"changes", "layerwise", "layouts", "rings", "scales", "shares"} & {*kinds} or gathers
    if "tiers" in kinds and not own_sides and random("tiers.sides").random() > 0.45:
        prefill, decode = chosen("tiers.pair", TIER_SIDES)
        config = replace(config, parallel=Parallel(prefill=prefill, decode=decode))
    elif "tiers" in kinds and not own_sides and "nodes" in kinds:
        prefill, decode = chosen("tiers.far", FAR_SIDES)
        config = replace(config, parallel=Parallel(prefill=prefill, decode=decode))
    elif not own_sides and kinds_of_users and random("query.sides").random() < 0.8:
        prefill, decode = chosen("query.pair", GROUPS)
        config = replace(config, parallel=Parallel(prefill=prefill, decode=decode))
    if "sizes" in kinds and not {"caches", "held"} & set(kinds):  # which need equal pages
        config = with_two_sizes(config, random("sizes"))
    if "drafts" in kinds:
        config = drafting(config, random("drafts"))
    both = config.parallel.prefill, config.parallel.decode
    asks = config.parallel.prefill.dp > 1 and (random("query").random() < 0.5 or both in GROUPS)
    job = serve.job(config, serve.ServeOptions(deadline=DEADLINE, dp_rank="query" if asks else "room"))
    job = _squeezed(job, geometry, chosen("policies", _MESSAGE_POLICIES) if "policies" in kinds else None)
    if {"rings", "stages"} & {*kinds} and job.staging is None:
        job = _squeezed(job, random("rings.job"), chosen("rings.policy", _STAGING_POLICIES))
    if "stages" in kinds and job.staging is not None:
        job = replace(job, staging=small_ring(job, random("stages")))
    if "layerwise" in kinds:
        job = replace(job, layerwise=True, staging=None)
    requests, gap = _requests(seed, count)
    if "edges" in kinds:
        requests = edge_lengths(requests, job, random("edges"))
    if "silences" in kinds and not {"delays", "lags", "overtakes"} & {
        *kinds
    }:  # half of the time ranks are lost in handoffs
        chance, share = random("haste").random(2).tolist()
        job = replace(job, deadline=DEADLINE * (10 ** (-1.7 + 0.7 * share) if chance < 0.5 else 1.0))
    for kind, change in CHANGES.items():
        if kind in kinds or (kind == "grows" and "crowds" in kinds):
            job = change(job, random(kind))
    if "crowds" in kinds:
        job = replace(job, engine=replace(job.engine, reserved_tokens=0))
        requests = [request._replace(output=LONGEST[1]) for request in requests]
    if "writes" in kinds:
        job = other_writes(job, random("writes"))
    machine, engine = config.hw, config.backend
    if "engines" in kinds:
        engine = another_engine(engine, random("engines"))
        job = replace(job, handoff=replace(job.handoff, slices="plane"))
    if "runs" in kinds:  # a nanosecond decides whether a stream has rested
        paths = {name: getattr(engine, name) for name in ("intra", "inter")}
        engine = replace(engine, **{name: path and replace(path, streams=False) for name, path in paths.items()})
    cards: list[CardOutage] = []
    if "cards" in kinds and "nodes" in kinds:
        cards = card_outages(random("cards"), machine, 50 * gap + 0.5)
        engine = replace(engine, failover=bool(random("cards.others").random() < 0.5))
    if "full" in kinds:
        engine = full_queue(engine, random("full"))
    if "caches" in kinds:
        job, requests = cached(job, requests, random("caches"))
        if gathers:  # what decode has is not gathered
            job = replace(job, cache=replace(job.cache, decode=False))
        if "tiers" in kinds:
            job, requests = tiered(job, requests, random("tiers"))
            machine = replace(machine, host=slow_stores(machine.host, random("tiers.stores")))
    if "scatter" in kinds:
        prefill_pages, decode_pages = _pools(job, random("scatter"), 1.5)
        job = replace(job, prefill_pages=prefill_pages, decode_pages=decode_pages)
    if {"scatter", "stages"} & {*kinds}:
        assert machine.gpu is not None  # it copies within its memory at the rate of a link between two of them
        machine = replace(machine, gpu=replace(machine.gpu, memory_rate=2 * machine.interconnect.rate))
    if "runs" in kinds:
        job, requests = long_prompts(job, requests, random("runs"))
        machine = replace(machine, host=sleeping(machine.host, random("runs.host")))
    if "users" in kinds:
        job, requests = used(job, requests, random("users"))
    if "wakes" in kinds:
        machine = replace(machine, host=late_programs(machine.host, random("wakes")))
    if "blocks" in kinds:
        job, requests, machine, engine = in_blocks(job, requests, machine, engine, random("blocks"))
    job = _longer_than_first_contact(_of_whole_blocks(job))
    cancels = _cancels(random("aborts"), count) if "aborts" in kinds else {}
    if "stages" in kinds:
        cancels |= _cancels(random("stages.aborts"), count, 0.7, -2.0)
    if {"runs", "aborts"} <= {*kinds}:  # in the middle of a prompt
        cancels |= _cancels(random("runs.aborts"), count, 0.6, -2.0)
    if {"layerwise", "aborts"} <= {*kinds}:  # one of those that a forward computes together
        cancels |= _cancels(random("layerwise.aborts"), count, 0.3, -3.0)
    if "crowds" in kinds:
        cancels |= _cancels(random("crowds.aborts"), count, 0.6, -2.0)
    if "overtakes" in kinds:  # late, when most has arrived
        cancels |= _cancels(random("overtakes.aborts"), count, 0.4, -2.3)
    if "hurries" in kinds and random("hurries").random() < 0.7:
        requests, cancels = given_up(random("hurries.users"), requests, cancels, 50 * gap)
    span = 50 * gap + 0.5  # independent of the number of requests: few requests meet as many faults
    ranks = [name for instance in (*job.prefills, *job.decodes) for name in job.ranks(instance)]
    faults = faults_of(random, kinds, ranks, span, job.deadline)
    kill, restart = losses(random, kinds, job, ranks, span, faults)
    if "halves" in kinds:
        faults = halved(random("halves"), job, span, faults, kill, restart)
    # ranks that gather need their links to start
    if "squeezes" in kinds and not gathers and random("squeezes.long").random() < 0.5:
        job = replace(job, bootstrap_timeout=0.0, waiting_timeout=0.0)
        faults, engine = cut_for_long(
            random("squeezes.cut"), job, faults, engine, 50 * gap, LARGE if "blocks" in kinds else 1
        )
    if "tiers" in kinds and random("tiers.slow").random() > 0.5:
        faults = replace(faults, squeezes=(*faults.squeezes, slow_loads(random("tiers.loads"), job, 50 * gap)))
    if "overtakes" in kinds:
        late = overtaken(random("overtakes"), job, ranks, {"Fence", "Fenced"} if "hurries" in kinds else ())
        faults = replace(faults, lagging=(*faults.lagging, *late))
        if any(b"RegisterPool" in each.tag for each in late):  # what is to move waits for lists, too
            prepare = 10.0 ** float(random("overtakes.lists").uniform(-4.7, -3.7))
            job = _longer_than_first_contact(replace(job, engine=replace(job.engine, prepare=prepare)))
    if "hurries" in kinds and random("hurries.late").random() < 0.6:
        faults = replace(faults, lagging=(*faults.lagging, *unanswered(random("hurries.lags"), job)))
    if "stale" in kinds:
        arrivals = [request.arrival for request in requests if request.after < 0]
        faults = replace(faults, stale=tuple(stale(random("stale"), job, ranks, kill, restart, arrivals)))
    leaving = drains(random, job, span, 50 * gap, {*kill, *(each.rank for each in faults.absences)})
    leaving = leaving if "changes" in kinds else {}
    if leaving and job.deadline == DEADLINE:
        deserted(random("changes.alone"), job, leaving, kill, restart)
    for instance, (at, _, fate, later) in leaving.items():
        again = at + 2 * DEADLINE + 1.0  # by then it has ended, or it stays
        if fate != "goes":
            restart |= dict.fromkeys(job.ranks(instance), again)
        if fate == "is lost":
            kill[list(job.ranks(instance))[-1]] = again + later
    outages = router_outages(random("users.outages"), span) if "users" in kinds else []
    specs = serve.specs(config, job, requests)
    if (
        "held" in kinds and job.engine.handoff == "push" and not job.cache.decode
    ):  # what a reader holds has no contents to compare
        specs = [holding(spec) for spec in specs]
    buffers = job.handoff.queues * job.staging.buffer if job.staging else 0  # which it has before a gather's pool
    full = FULL * (LARGE if "blocks" in kinds else 1)
    if gathers and config.collective is not None and config.collective.pool == full:
        last = list(job.ranks(job.prefills[0]))[-1]  # of its group
        specs = [short(spec, full * 7 // 8 + buffers) if spec.name == last else spec for spec in specs]
    if "policies" in kinds and job.handoff.metadata_fallback and random("rows").random() < 0.5:
        specs = [other_rows(spec) for spec in specs]
    if "nodes" in kinds:
        faults = replace(faults, squeezes=tuple(beside(squeeze, specs) for squeeze in faults.squeezes))
    if "runs" in kinds:
        faults, kill, restart, leaving, outages = Faults(), {}, {}, {}, []
        cancels = {number: at for number, at in cancels.items() if number < len(requests)}
    sides = f"{_side(config.parallel.prefill)} to {_side(config.parallel.decode)}"
    text = f"{sides}, page_size={job.page_size}, pages={job.prefill_pages}/{job.decode_pages}"
    text += f"{', staged' if job.staging else ''}{', asked' if asks else ''}, {', '.join(kinds)}"
    scenario = Scenario(
        seed=seed,
        job=job,
        specs=specs,
        requests=requests,
        cancels=cancels,
        faults=faults,
        kill=kill,
        restart=restart,
        limit=span,
        machine=machine,
        engine=engine,
        collective=config.collective if gathers else None,
        text=text,
        cards=cards,
        outages=outages,
        plain="runs" in kinds,
    )
    if "hurries" in kinds:  # who starts again would find no router
        scenario = replace(scenario, hurried=True, restart={})
    drained = [(instance, at, seconds) for instance, (at, seconds, *_) in leaving.items()]
    if "moments" in kinds:
        scenario = at_moments(_planned(scenario, drained), random("moments"), leaving)
        if scenario.hurried:
            scenario = replace(scenario, restart={}, faults=replace(scenario.faults, pauses=(), stale=()))
    return _planned(scenario, drained)


def _planned(scenario: Scenario, drained: Sequence[tuple[str, float, float]]) -> Scenario:
    # With a router that knows who leaves, which instances drain, and when all is calm.
    faults, arrivals = scenario.faults, [each.arrival for each in scenario.requests if each.after < 0]
    ends = [each.end for each in (*faults.slow, *faults.squeezes, *faults.absences)]
    ends += [*(each.end for each in scenario.cards), *(end for _, end in scenario.outages)]
    calm = max([*arrivals, *scenario.kill.values(), *scenario.restart.values(), *ends]) + DEADLINE
    leaves = [[number, at] for number, at in scenario.cancels.items()]
    router, *ranks = scenario.specs
    arguments = dict(router.arguments) | {"leaves": leaves, "calm": calm, "drains": drained}
    arguments["outages"] = [list(span) for span in scenario.outages]
    arguments |= {"hurried": scenario.hurried}
    router = replace(router, program="experiments.faults.programs:router", arguments=arguments)
    return replace(scenario, specs=[router, *ranks], faults=replace(faults, until=calm), limit=80.0 + calm)


def attempt(scenario: Scenario) -> Tried:
    """Run *scenario* with every checker, and return what they report; the same on any machine, bit for bit.

    Memory has contents, every transfer and message is watched, and a request may fail only for a reason that the
    scenario gives (`experiments.faults.causes`).
    """
    if scenario.plain:
        violations, statuses, events, reached = compared(scenario)
        ends = dict(Counter(status.partition(":")[0] for status in statuses))
        return Tried(scenario.seed, violations, ends, events, scenario.text, dict(reached))
    causes = Causes(scenario)
    checks = InvariantChecker(causes.rank, scenario.hurried)
    model = Model(
        scenario.machine,
        scenario.engine,
        memory="tracked",
        seed=scenario.seed,
        faults=scenario.faults,
        limit=scenario.limit,
        observer=checks,
        collective=scenario.collective,
        outages=scenario.cards,
    )
    with counted(checks.reached, checks.changes):
        outcome = model.run(scenario.specs, scenario.kill, scenario.restart)
    timeout = scenario.engine.timeout
    for rank in outcome.ranks.values():
        checks.bounds.transferred(rank.transfers, timeout)
        checks.order.transferred(rank.transfers)
    statuses = causes.know(outcome, checks.held, checks.broken_rooms, checks.endings.generated)
    bounds = checks.bounds
    record = causes.record
    unrecovered = chain(causes.unrecovered(outcome), misdrained(scenario, record))
    sent_wrongly = chain(causes.sent_wrongly(bounds.moved), misrouted(scenario, record, checks.submitted))
    for what in causes.unexplained():
        checks.report("I5", what)
    miscounted = chain(
        causes.miscounted(bounds.nbytes, checks.given_up),
        misreported(scenario, record, checks.finished, checks.nbytes),
    )
    stuck = causes.stuck(checks.written, checks.went_on)
    violations = checks.finish(statuses, causes.last, unrecovered, sent_wrongly, miscounted, stuck)
    counts = dict(Counter(status.partition(":")[0] for status in statuses))
    return Tried(scenario.seed, violations, counts, outcome.events, scenario.text, dict(checks.reached))


def _config(seed: int, random: np.random.Generator) -> Config:
    prefill, decode = SIDES[random.integers(len(SIDES))]
    model = _MODELS[random.integers(len(_MODELS))]
    return Config(
        target="model",
        experiment=serve.ServeOptions(),
        hw=_MACHINE,
        backend=_ENGINE,
        model=model,
        parallel=Parallel(prefill=prefill, decode=decode),
        kv=Kv(page_size=int(random.choice((1, 2, 4, 8))), pool=1 << 16, all_cp_ranks=bool(random.integers(2))),
        scheduler=SchedulerLimits(
            chunk=int(random.choice((6, 16, 64))), prefill_batch=4, decode_batch=int(random.integers(2, 9))
        ),
        compute=Compute(overhead=1e-3, allreduce_latency=1e-6),
        memory="tracked",
        seed=seed,
    )


def _of_whole_blocks(job: Deployment) -> Deployment:
    prefill, decode = job.prefill_block, job.decode_block
    return replace(
        job,
        prefill_pages=-(-job.prefill_pages // prefill) * prefill,
        decode_pages=-(-job.decode_pages // decode) * decode,
    )


def _longer_than_first_contact(job: Deployment) -> Deployment:
    # The limits of rooms, so that a probe may make all lists of descriptors.
    sides = (job.prefill_layout(), job.prefill.size), (job.decode_layout(), job.decode.size)
    most = max(layout.tables[0].rows * len(layout.tables[0].planes) * ranks for layout, ranks in sides)
    limits = {name: getattr(job, name) for name in ("bootstrap_timeout", "waiting_timeout")}
    return replace(job, **{name: limit and limit + job.engine.prepare * most for name, limit in limits.items()})


def _squeezed(job: Deployment, random: np.random.Generator, policy: Policy | None) -> Deployment:
    # Small pools, few slots and small rings; the policy is drawn unless it is given.
    prefill, decode = _pools(job, random, 6.0)
    slots, drawn = int(random.integers(2, 12)), _POLICIES[random.integers(len(_POLICIES))]
    policy = policy or drawn
    factor, wait, chance, whole = random.random(4).tolist()
    tokens = (job.chunk // job.page_size + 1) * job.page_size
    chunk = tokens * job.shape.token_bytes(max(job.prefill.tp, job.decode.tp))
    staging = Staging(
        # some chunks exceed it, some rings hold only one
        ring=whole_ring(job, int(chunk * (0.7 + 2 * factor)), whole),
        buffer=chunk,
        wait=10 ** (-3.0 + 2 * wait),
        scatter="writer" if wait < 0.5 else "chunk",
    )
    return replace(
        job,
        prefill_pages=prefill,
        decode_pages=decode,
        window_share=1.0,
        slots=slots,
        handoff=policy,
        staging=staging if policy.staging and chance < 0.8 else None,
    )


def _pools(job: Deployment, random: np.random.Generator, most: float) -> tuple[int, int]:
    # From one to *most* of the pages that the longest request needs, on either side.
    least = job.page_count(LONGEST[0]), job.page_count(sum(LONGEST))
    prefill, decode = (int(pages * more) for pages, more in zip(least, random.uniform(1.0, most, 2), strict=True))
    return prefill, decode


def _requests(seed: int, count: int) -> tuple[list[Request], float]:
    # And the mean time between two of them.
    gap = 10.0 ** float(stream(seed, "faults.load").uniform(-3.5, -2.0))
    arrivals = np.cumsum(stream(seed, "faults.arrivals").random(count) * 2 * gap).tolist()
    lengths = 1 + (stream(seed, "faults.lengths").random((count, 2)) * LONGEST).astype(int)
    return [Request(at, *row) for at, row in zip(arrivals, lengths.tolist(), strict=True)], gap


def _cancels(random: np.random.Generator, count: int, share: float = 0.25, least: float = -4.5) -> dict[int, float]:
    # About that *share* of them, after 10 to the power of *least* seconds or up to 0.1.
    draws = enumerate(random.random((count, 2)).tolist())
    return {number: 10.0 ** (least + (-1.0 - least) * after) for number, (chance, after) in draws if chance < share}


def _side(side: Side) -> str:
    sizes = {"tp": side.tp, "pp": side.pp, "cp": side.cp, "dp": side.dp}
    text = "".join(f" {name}={size}" for name, size in sizes.items() if size > 1 or name == "tp")
    return f"{side.instances} x{text}"
