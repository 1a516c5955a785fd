# SPDX-License-Identifier: Apache-2.0
"""A scenario: a deployment, its requests, and what goes wrong, drawn from a seed; and one try of it.

Each part is drawn from a stream of its own (`pdsim.serving.workload.stream`), named after what it
decides.  So a part can be left out, or the number of requests changed, and all others stay what
they were: that is what lets `experiments.faults.shrink` take away causes one by one until the
failure goes.

Deployments are tiny on purpose.  A machine with eight small GPUs, models with a handful of heads
and pools of a few requests put much more contention, preemption and wrap-around into a simulated
second than any real size would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from experiments import serve
from experiments.faults.causes import Causes
from experiments.faults.circumstances import (
    Scenario,
    another_engine,
    edge_lengths,
    full_queue,
    growing,
    hasty,
    hosted,
    limited,
    other_policy,
    pauses,
    pulled,
    routed,
    silences,
    slow_scatter,
    tiny,
    two_nodes,
    wider,
)
from experiments.faults.kinds import KINDS, RARE
from pdsim.compute.forward import Compute
from pdsim.config import Config
from pdsim.hardware.costs import Engine, EngineModel
from pdsim.hardware.machine import Gpu, Host, Interconnect, Machine, Nic
from pdsim.kv.policy import Policy, Staging
from pdsim.models.llm import Hybrid, Llm
from pdsim.models.parallel import Parallel, Side
from pdsim.serving.deployment import ROUTER, Deployment, instance_of
from pdsim.serving.settings import Kv, SchedulerLimits
from pdsim.serving.workload import Request, stream
from pdsim.sim.faults import Faults, Slow, Squeeze
from pdsim.sim.model import Model
from pdsim.transfer.job import RankSpec
from pdsim.verify.invariants import InvariantChecker, Violation

__all__ = ["KINDS", "Scenario", "Tried", "attempt", "draw"]

DEADLINE = 2.0
"""Seconds of silence after which a rank counts as gone."""

_LONGEST = 24, 8  # input and output tokens of a request

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
_SIDES = (  # prefill and decode
    (Side(tp=1), Side(tp=1)),
    (Side(tp=2), Side(tp=2)),
    (Side(tp=2), Side(tp=1)),
    (Side(tp=1), Side(tp=2)),
    (Side(tp=1), Side(tp=4)),
    (Side(tp=4), Side(tp=2)),
    (Side(tp=2), Side(tp=4)),
    (Side(tp=1, instances=2), Side(tp=2)),
    (Side(tp=2), Side(tp=1, instances=2)),
    (Side(tp=1, instances=2), Side(tp=1, instances=2)),
    (Side(tp=1, pp=2), Side(tp=1)),
    (Side(tp=1, cp=2), Side(tp=2)),
    (Side(tp=2, dp=2), Side(tp=1)),
)


class Tried(NamedTuple):
    """What became of one scenario.

    Attributes:
        seed: The scenario's, with which it can be tried again.
        violations: What the checkers found (`pdsim.verify`); none is what is hoped for.
        statuses: How many requests ended with each first word of a status: ok, PeerLost, Aborted
            and so on.
        events: Of the simulation: equal numbers are a good sign of equal runs.
        text: Layout, pools and kinds of faults, in a line.
    """

    seed: int
    violations: list[Violation]
    statuses: dict[str, int]  # the first word of each: how often
    events: int
    text: str


def draw(seed: int, count: int, intensity: float, without: frozenset[str] = frozenset()) -> Scenario:
    """Return the scenario of *seed* with *count* requests.

    *intensity* from 0 to 1 is the probability of each of `KINDS`, times its entry in `RARE`; it
    decides only which kinds happen, not what they are.  Kinds in *without* do not happen, and
    nothing else changes by that.

    The first requests of a scenario with more are those of one with fewer.  The time after which
    nothing goes wrong any more (``calm``) is known beforehand, so that the checkers can ask for
    everything to be over some time after it.
    """
    draws = stream(seed, "faults.kinds").random(len(KINDS)).tolist()
    happens = [draw < intensity * RARE.get(kind, 1.0) for kind, draw in zip(KINDS, draws, strict=True)]
    kinds = [kind for kind, yes in zip(KINDS, happens, strict=True) if yes and kind not in without]
    geometry = stream(seed, "faults.geometry")
    config = _config(seed, geometry)
    if "layouts" in kinds:
        config = wider(config, stream(seed, "faults.layouts"))
    if "nodes" in kinds:
        config = two_nodes(config)
    asks = config.parallel.prefill.dp > 1 and stream(seed, "faults.query").random() < 0.5
    job = serve.job(config, serve.ServeOptions(deadline=DEADLINE, dp_rank="query" if asks else "room"))
    if "policies" in kinds:
        job = replace(job, handoff=other_policy(stream(seed, "faults.policies")))
    job = _squeezed(job, geometry, fixed="policies" in kinds)
    requests = _requests(seed, count)
    if "edges" in kinds:
        requests = edge_lengths(requests, _LONGEST, job, stream(seed, "faults.edges"))
    if "silences" in kinds and "delays" not in kinds:
        job = replace(job, deadline=hasty(DEADLINE, stream(seed, "faults.haste")))
    if "limits" in kinds:
        job = limited(job, stream(seed, "faults.limits"))
    if "grows" in kinds:
        job = growing(job, job.page_count(sum(_LONGEST)), stream(seed, "faults.grows"))
    if "hosts" in kinds:
        job = hosted(job, stream(seed, "faults.hosts"))
    if "pulls" in kinds:
        job = pulled(job, stream(seed, "faults.pulls"))
    if "routes" in kinds:
        job = routed(job, stream(seed, "faults.routes"))
    machine, engine = config.hw, config.backend
    if "engines" in kinds:
        engine = another_engine(engine, stream(seed, "faults.engines"))
        job = replace(job, handoff=replace(job.handoff, slices="plane"))
    if "full" in kinds:
        engine = full_queue(engine, stream(seed, "faults.full"))
    if "scatter" in kinds:
        least = job.page_count(_LONGEST[0]), job.page_count(sum(_LONGEST))
        job, machine = tiny(job, least, stream(seed, "faults.scatter")), slow_scatter(machine)
    ranks = [name for instance in (*job.prefills, *job.decodes) for name in job.ranks(instance)]
    cancels = _cancels(seed, count) if "aborts" in kinds else {}
    span = 50 * _gap(seed) + 0.5  # whatever the number of requests, so that fewer suffer the same
    kill = _kills(seed, ranks, span) if "kills" in kinds else {}
    kill |= _losses(seed, job, span, kill) if "losses" in kinds else {}
    restart = _restarts(seed, job, kill) if "restarts" in kinds else {}
    if "together" in kinds:
        both = _together(seed, job, span)
        kill, restart = kill | both[0], restart | both[1]
    faults = _faults(seed, kinds, ranks, span)
    if "silences" in kinds:
        quiet = silences(ranks, span, job.deadline, stream(seed, "faults.silences"))
        faults = replace(faults, silences=quiet)
    if "pauses" in kinds:
        faults = replace(faults, pauses=pauses(ranks, span, job.deadline, stream(seed, "faults.pauses")))
    if "restarts" in kinds:
        for absence in faults.absences:
            restart = dict.fromkeys(job.ranks(instance_of(absence.rank)), absence.end + 2 * DEADLINE) | restart
    if "router" in kinds:
        kill = kill | {ROUTER: float(stream(seed, "faults.router").uniform(0.0, span))}
    calm = max([requests[-1].arrival, *kill.values(), *restart.values(), *_ends(faults)]) + DEADLINE
    specs = serve.specs(config, job, requests)
    if "held" in kinds and job.engine.handoff == "push":  # what a reader holds has no contents to compare
        specs = [_holding(spec) for spec in specs]
    if "nodes" in kinds:
        faults = replace(faults, squeezes=tuple(_beside(squeeze, specs) for squeeze in faults.squeezes))
    arguments = dict(specs[0].arguments) | {"leaves": [[number, at] for number, at in cancels.items()], "calm": calm}
    specs[0] = replace(specs[0], program="experiments.faults.programs:router", arguments=arguments)
    sides = f"{_side(config.parallel.prefill)} to {_side(config.parallel.decode)}"
    text = f"{sides}, page_size={job.page_size}, pages={job.prefill_pages}/{job.decode_pages}"
    text += f"{', staged' if job.staging else ''}{', asked' if asks else ''}, {', '.join(kinds)}"
    return Scenario(
        seed,
        job,
        specs,
        requests,
        cancels,
        replace(faults, until=calm),
        kill,
        restart,
        80.0 + calm,
        machine,
        engine,
        text,
    )


def attempt(scenario: Scenario) -> Tried:
    """Run *scenario* with every checker, and return what was found.

    Memory has contents, every transfer and message is watched, and what failed is judged by
    `Causes`: a request may fail only for a reason that the scenario gives.  The same scenario
    returns the same, bit for bit, on any machine.
    """
    causes = Causes(scenario)
    checks = InvariantChecker(causes.rank)
    model = Model(
        scenario.machine,
        scenario.engine,
        memory="tracked",
        seed=scenario.seed,
        faults=scenario.faults,
        limit=scenario.limit,
        observer=checks,
    )
    outcome = model.run(scenario.specs, scenario.kill, scenario.restart)
    statuses = causes.know(outcome, checks.held, checks.broken_rooms)
    counts: dict[str, int] = {}
    for status in statuses:
        word = status.partition(":")[0]
        counts[word] = counts.get(word, 0) + 1
    violations = checks.finish(statuses, causes.request, causes.unrecovered(outcome))
    return Tried(scenario.seed, violations, counts, outcome.events, scenario.text)


# --- drawing -------------------------------------------------------------------------------------------------------


def _config(seed: int, random: np.random.Generator) -> Config:
    prefill, decode = _SIDES[random.integers(len(_SIDES))]
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


def _squeezed(job: Deployment, random: np.random.Generator, fixed: bool = False) -> Deployment:
    # Its policy is drawn unless *fixed*.
    least = job.page_count(_LONGEST[0]), job.page_count(sum(_LONGEST))
    prefill, decode = (int(pages * factor) for pages, factor in zip(least, random.uniform(1.0, 6.0, 2), strict=True))
    job = replace(
        job, prefill_pages=prefill, decode_pages=decode, window_share=1.0, slots=int(random.integers(2, 12))
    )
    drawn = _POLICIES[random.integers(len(_POLICIES))]
    policy = job.handoff if fixed else drawn
    factor, wait, chance = random.random(3).tolist()
    chunk = (
        (job.chunk // job.page_size + 1) * job.page_size * job.shape.token_bytes(max(job.prefill.tp, job.decode.tp))
    )
    size = int(chunk * (0.7 + 2 * factor))  # some chunks exceed the ring, some rings hold only one
    scatter = "writer" if wait < 0.5 else "chunk"
    staging = Staging(ring=size, buffer=chunk, wait=10 ** (-3.0 + 2 * wait), scatter=scatter)
    staged = policy.staging and chance < 0.8
    return replace(job, handoff=policy, staging=staging if staged else None)


def _requests(seed: int, count: int) -> list[Request]:
    arrivals = np.cumsum(stream(seed, "faults.arrivals").random(count) * 2 * _gap(seed)).tolist()
    longest, random = _LONGEST, stream(seed, "faults.lengths")
    lengths = 1 + (random.random((count, 2)) * longest).astype(int)
    return [Request(at, *row) for at, row in zip(arrivals, lengths.tolist(), strict=True)]


def _gap(seed: int) -> float:
    return float(10.0 ** float(stream(seed, "faults.load").uniform(-3.5, -2.0)))


def _cancels(seed: int, count: int) -> dict[int, float]:
    # About a quarter of them.
    draws = stream(seed, "faults.aborts").random((count, 2)).tolist()
    return {number: 10.0 ** (-4.5 + 3.5 * after) for number, (chance, after) in enumerate(draws) if chance < 0.25}


def _kills(seed: int, ranks: list[str], span: float) -> dict[str, float]:
    random = stream(seed, "faults.kills")
    return {ranks[random.integers(len(ranks))]: float(random.uniform(0.0, span))}


def _losses(seed: int, job: Deployment, span: float, kill: Mapping[str, float]) -> dict[str, float]:
    random = stream(seed, "faults.losses")
    instances = (*job.prefills, *job.decodes)
    many = int(random.integers(2, len(instances) + 1))
    chosen = [instances[number] for number in sorted(random.permutation(len(instances))[:many].tolist())]
    times = random.uniform(0.0, span, many).tolist()
    if random.random() < 0.5:
        times = [times[0]] * many
    names = [list(job.ranks(instance)) for instance in chosen]
    losses = {each[random.integers(len(each))]: at for each, at in zip(names, times, strict=True)}
    lost = {instance_of(name) for name in kill}
    return {name: at for name, at in losses.items() if instance_of(name) not in lost}


def _together(seed: int, job: Deployment, span: float) -> tuple[dict[str, float], dict[str, float]]:
    # In one half of the scenarios at the same instant, in the other up to a few messages apart.
    random = stream(seed, "faults.together")
    instances = (job.prefills[random.integers(len(job.prefills))], job.decodes[random.integers(len(job.decodes))])
    names = [name for instance in instances for name in job.ranks(instance)]
    at = float(random.uniform(0.0, span))
    again = at + float(random.uniform(0.01, 1.5 * DEADLINE))
    apart = 10.0 ** float(random.uniform(-5.5, -2.0)) * (random.random() < 0.5)
    return dict.fromkeys(names, at), {name: again + apart * float(random.random()) for name in names}


def _ends(faults: Faults) -> list[float]:
    ends = [slow.end for slow in faults.slow] + [squeeze.end for squeeze in faults.squeezes]
    return ends + [absence.end for absence in faults.absences]


def _restarts(seed: int, job: Deployment, kill: Mapping[str, float]) -> dict[str, float]:
    # It comes back within a second of its end, and the others of its instance within a second after
    # that.
    random = stream(seed, "faults.restarts")
    restarts: dict[str, float] = {}
    for name, at in kill.items():
        again = at + float(random.uniform(0.01, 1.0))
        later = again + float(random.uniform(0.01, 1.0))
        restarts |= {other: again if other == name else later for other in job.ranks(name.partition(".")[0])}
    return restarts


def _faults(seed: int, kinds: list[str], ranks: list[str], span: float) -> Faults:
    # All numbers are drawn whatever *kinds* has, so that a kind which is left out changes none of the others.
    random = stream(seed, "faults.plan")
    share, delay, late, lateness = random.random(4).tolist()
    rank, gpu = ranks[random.integers(len(ranks))], int(random.integers(len(ranks)))
    (begin, long, factor), (start, length, way) = random.random((2, 3)).tolist()
    slow = Slow(rank, begin * span, (begin + long) * span, 1.0 + 50.0 * factor)
    link = f"node0/gpu{gpu}/nvlink.{'out' if way < 0.5 else 'in'}"
    squeeze = Squeeze(link, start * span, (start + length) * span, 0.0 if way % 0.5 < 0.25 else 0.01)
    return Faults(
        delayed=share if "delays" in kinds else 0.0,
        delay=10.0 ** (-4 + 2.5 * delay) if "delays" in kinds else 0.0,
        late=0.1 * late if "late" in kinds else 0.0,
        lateness=0.5 * lateness if "late" in kinds else 0.0,
        stray="stray" in kinds,
        torn="torn" in kinds,
        shuffle="shuffle" in kinds,
        slow=(slow,) if "slow" in kinds else (),
        squeezes=(squeeze,) if "squeezes" in kinds else (),
        broken=0.1 * float(stream(seed, "faults.broken").random()) if "broken" in kinds else 0.0,
    )


def _holding(spec: RankSpec) -> RankSpec:
    decode = instance_of(spec.name).startswith("decode")
    return replace(spec, program="experiments.faults.programs:decode") if decode else spec


def _beside(squeeze: Squeeze, specs: Sequence[RankSpec]) -> Squeeze:
    # KV goes over the network there, so that is the way from the GPU to a network card that the
    # squeeze must lie on.  The GPU is the one of the rank with the number that the link names.
    place = specs[1 + int(squeeze.link.partition("gpu")[2].partition("/")[0])].place
    return squeeze._replace(link=f"node{place.node}/gpu{place.gpu}/pcie.{squeeze.link.rpartition('.')[2]}")


def _side(side: Side) -> str:
    sizes = {"tp": side.tp, "pp": side.pp, "cp": side.cp, "dp": side.dp}
    text = "".join(f" {name}={size}" for name, size in sizes.items() if size > 1 or name == "tp")
    return f"{side.instances} x{text}"
