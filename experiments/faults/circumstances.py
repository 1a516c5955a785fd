# SPDX-License-Identifier: Apache-2.0
"""What is served, and on what, in scenarios of `experiment=faults` that are not plain: layouts, lengths, pools.

Each function returns what it was given with one of `experiments.faults.kinds.KINDS` applied, drawn from a stream of
the seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pdsim.config import Config
from pdsim.costs import Engine
from pdsim.fabric.faults import Pause, Silence
from pdsim.hardware import Machine, Nic
from pdsim.kv.policy import Policy
from pdsim.serving.deployment import Deployment
from pdsim.serving.settings import Parallel, Side
from pdsim.serving.workload import Request

__all__ = [
    "edge_lengths",
    "full_queue",
    "growing",
    "hasty",
    "limited",
    "other_policy",
    "pauses",
    "silences",
    "slow_scatter",
    "tiny",
    "two_nodes",
    "wider",
]

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
    Policy(queues=1, metadata="write", notify="message", grouping="pages"),
    Policy(queues=2, metadata="control", staging=True),
)
_OUTPUTS = 1, 1, 2
"""Tokens, one of which is drawn: a request of one token is over when its KV is there."""


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
    found = []
    for request in requests:
        which, many, more, output = random.random(4).tolist()
        unit = (job.page_size, job.chunk, 1)[int(3 * which)]
        tokens = unit * (1 + int(many * max(1, longest[0] // unit))) + int(2 * more)
        found.append(request._replace(input=min(tokens, longest[0]), output=_OUTPUTS[int(3 * output)]))
    return found


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
