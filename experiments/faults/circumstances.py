# SPDX-License-Identifier: Apache-2.0
"""What is served, and on what, in scenarios of `experiment=faults` that are not plain: layouts, lengths, pools.

`Scenario` is a job, its requests, and everything that happens to it.  Each function returns what it was given with
one of `experiments.faults.kinds.KINDS` applied, drawn from a stream of the seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import inf

import numpy as np

from pdsim.config import Config
from pdsim.hardware.costs import Engine, EngineModel
from pdsim.hardware.machine import Machine, Nic
from pdsim.kv.pages import ORDERS
from pdsim.kv.policy import Policy
from pdsim.models.parallel import Parallel, Side
from pdsim.serving.deployment import Deployment
from pdsim.serving.settings import HostCosts
from pdsim.serving.workload import Request
from pdsim.sim.faults import Faults, Pause, Silence
from pdsim.transfer.job import RankSpec

_SIDES = (  # prefill and decode
    (Side(tp=1, pp=2, cp=2), Side(tp=1)),
    (Side(tp=1, pp=2, cp=2), Side(tp=2, pp=2)),
    (Side(tp=2, pp=2), Side(tp=1, pp=2)),
    (Side(tp=1, pp=2), Side(tp=2, dp=2, pp=2)),
    (Side(tp=1), Side(tp=2, dp=2)),
    (Side(tp=2, dp=2), Side(tp=2, dp=2)),
    (Side(tp=4, dp=2), Side(tp=4, dp=2)),
    (Side(tp=1, instances=3), Side(tp=1, instances=3)),
    (Side(tp=1, cp=2, instances=2), Side(tp=2, instances=2)),
)
_POLICIES = (
    Policy(metadata="control", notify="message"),
    Policy(queues=2, metadata="control", notify="poll"),
    Policy(queues=3, metadata="control", metadata_memory="host", notify="poll", call="plane"),
    Policy(queues=1, metadata="write", metadata_fallback="control", notify="message", grouping="pages"),
    Policy(queues=2, metadata="control", staging=True),
)
_ROUTES = "least_tokens", "power_of_two", "round_robin", "transfer_aware"
_OUTPUTS = 1, 1, 2
"""Tokens, one of which is drawn: a request of one token is over when its KV is there."""


@dataclass(frozen=True)
class Scenario:
    """What is served, and what goes wrong meanwhile."""

    seed: int
    job: Deployment
    specs: list[RankSpec]
    requests: list[Request]
    cancels: Mapping[int, float]
    faults: Faults
    kill: Mapping[str, float]
    restart: Mapping[str, float]
    limit: float
    machine: Machine
    engine: Engine
    text: str  # what it is, in one line


def wider(config: Config, random: np.random.Generator) -> Config:
    """Return *config* with ranks in more than one dimension on a side, or more instances.

    Layouts are those of `_SIDES`: pipeline stages with context-parallel ranks, data parallelism, several stages on
    decode, and three instances on each side.
    """
    prefill, decode = _SIDES[random.integers(len(_SIDES))]
    return replace(config, parallel=Parallel(prefill=prefill, decode=decode))


def two_nodes(config: Config) -> Config:
    """Return *config* on two nodes of half the GPUs each.

    Their network cards are as slow as the links within one.
    """
    machine, intra = config.hw, config.backend.intra
    assert intra is not None
    cards = Nic(count=machine.gpus // 2, rate=machine.interconnect.rate, latency=5e-6)
    machine = replace(machine, nodes=2, gpus=machine.gpus // 2, nic=cards)
    return replace(
        config, hw=machine, backend=replace(config.backend, inter=replace(intra, path="rdma", overlap=True))
    )


def other_policy(random: np.random.Generator) -> Policy:
    """Return a policy that tells of arrivals and metadata by messages."""
    return _POLICIES[random.integers(len(_POLICIES))]


def edge_lengths(
    requests: Sequence[Request], longest: tuple[int, int], job: Deployment, random: np.random.Generator
) -> list[Request]:
    """Return *requests* with inputs of whole pages or chunks, or one token more, and outputs of one or two tokens.

    A number of draws of its own for each keeps the first of more requests what they are among fewer.
    """
    lengths = []
    for request in requests:
        which, many, more, output = random.random(4).tolist()
        unit = (job.page_size, job.chunk, 1)[int(3 * which)]
        tokens = unit * (1 + int(many * max(1, longest[0] // unit))) + int(2 * more)
        lengths.append(request._replace(input=min(tokens, longest[0]), output=_OUTPUTS[int(3 * output)]))
    return lengths


def limited(job: Deployment, random: np.random.Generator) -> Deployment:
    """Return *job* with a limit for a room's pages at decode, for all of it to arrive, or for both."""
    which, bootstrap, waiting = random.random(3).tolist()
    return replace(
        job,
        bootstrap_timeout=10 ** (-1.0 + bootstrap) if which < 0.7 else 0.0,
        waiting_timeout=10 ** (-1.0 + waiting) if which > 0.3 else 0.0,
    )


def hasty(deadline: float, random: np.random.Generator) -> float:
    """Return *deadline* or, half of the time, a tenth or less: ranks are given up during handoffs."""
    chance, share = random.random(2).tolist()
    return deadline * (10 ** (-1.7 + 0.7 * share) if chance < 0.5 else 1.0)


def full_queue(engine: Engine, random: np.random.Generator) -> Engine:
    """Return *engine* with room for few descriptors to one peer; half of the time it refuses more.

    One that refuses has room for a probe's, whose writes must not fail when nothing else is posted.
    """
    size, full = int(random.integers(3)), "refuse" if random.random() < 0.5 else "wait"
    depth = ((4, 16, 64) if full == "wait" else (96, 128, 256))[size]
    intra, inter = (
        None if model is None else replace(model, depth=depth, full=full) for model in (engine.intra, engine.inter)
    )
    return replace(engine, intra=intra, inter=inter)


def another_engine(engine: Engine, random: np.random.Generator) -> Engine:
    """Return *engine* with other stages, order, queues and threads: completions come in other orders."""
    chance = random.random(9).tolist()
    threads = 1 + int(3 * chance[0])

    def other(model: EngineModel | None) -> EngineModel | None:
        if model is None:
            return None
        return replace(
            model,
            overlap=chance[1] < 0.7,
            pipelined=chance[1] < 0.35,
            in_order=chance[2] < 0.5,
            streams=chance[6] < 0.5,
            queues=1 + int(3 * chance[3]),
            queue_rate=1e6 if chance[4] < 0.5 else inf,
            wire_descriptor=1e-5 * (chance[5] < 0.5),
            read=1e-4 * chance[6],
            read_descriptor=1e-6 * chance[6],
            read_rate=1e6 if chance[7] < 0.5 else inf,
        )

    return replace(
        engine,
        intra=other(engine.intra),
        inter=other(engine.inter),
        threads=threads,
        serial=chance[8] if threads > 1 else 1.0,
    )


def growing(job: Deployment, least: int, random: np.random.Generator) -> Deployment:
    """Return *job* whose decode admits requests with pages for their input, and preempts when others run short.

    Its pools hold from one to one and a half of the longest requests, which need *least* pages; KV takes as long as
    some steps to host memory and back.
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
    return replace(job, engine=engine, decode_pages=int(least * (1.0 + share / 2)))


def hosted(job: Deployment, random: np.random.Generator) -> Deployment:
    """Return *job* whose engine has the loops of SGLang or vLLM, each of their rules with an even chance.

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
    return replace(job, engine=engine)


def _costs(random: np.random.Generator) -> HostCosts:
    costs = {}
    for name in (each.name for each in fields(HostCosts)):
        chance, size = random.random(2).tolist()
        each = 10 ** (-5.0 + 2.5 * size) * (chance < 0.5)
        costs[name] = each / 10 if name.endswith("_token") else each
    return HostCosts(**costs)


def pulled(job: Deployment, random: np.random.Generator) -> Deployment:
    """Return *job* whose decode reads what prefill keeps for it, under leases from a few reads to all of the run."""
    lease = 10.0 ** float(random.uniform(-1.5, 1.5))
    engine = replace(job.engine, handoff="pull", recompute=1, memory="grow", lease=lease, heartbeat=lease / 3)
    engine = replace(engine, noticed="decode" if random.random() < 0.5 else "prefill")
    return replace(job, engine=engine, staging=None)


def routed(job: Deployment, random: np.random.Generator) -> Deployment:
    """Return *job* with a routing policy that needs no cache, and retries from none to three."""
    policy, unknown, retries = random.random(3).tolist()
    return replace(
        job,
        policy=_ROUTES[int(len(_ROUTES) * policy)],
        output_known=unknown < 0.5,
        retries=int(4 * retries),
    )


def tiny(job: Deployment, least: tuple[int, int], random: np.random.Generator) -> Deployment:
    """Return *job* with pools of *least* pages, which the longest request needs, and up to half as many more."""
    more = random.uniform(1.0, 1.5, 2).tolist()
    prefill, decode = (int(pages * factor) for pages, factor in zip(least, more, strict=True))
    return replace(job, prefill_pages=prefill, decode_pages=decode)


def slow_scatter(machine: Machine) -> Machine:
    """Return *machine* whose GPUs copy within their memory at the rate of a link between two of them."""
    assert machine.gpu is not None
    return replace(machine, gpu=replace(machine.gpu, memory_rate=2 * machine.interconnect.rate))


def silences(ranks: Sequence[str], span: float, deadline: float, random: np.random.Generator) -> tuple[Silence, ...]:
    """Return one silence of a rank: between half a *deadline*, in which nothing is lost, and two.

    It begins in the first half of *span*, in which most requests come.
    """
    return (Silence(*_absence(ranks, span, deadline, random)),)


def pauses(ranks: Sequence[str], span: float, deadline: float, random: np.random.Generator) -> tuple[Pause, ...]:
    """Return one pause of a rank, as long as a silence may be, and as early."""
    return (Pause(*_absence(ranks, span, deadline, random)),)


def _absence(
    ranks: Sequence[str], span: float, deadline: float, random: np.random.Generator
) -> tuple[str, float, float]:
    rank, start = ranks[int(random.integers(len(ranks)))], float(random.uniform(0.0, span / 2))
    return rank, start, start + deadline * float(random.uniform(0.5, 2.0))
