# SPDX-License-Identifier: Apache-2.0
"""MORI-IO with state, inline posting instead of a worker queue, and metadata over TCP or RDMA: SGLang PR 22665.

Before, one worker takes writes from a queue and blocks until each is done; after, the scheduler posts all of them
and looks at their statuses between two forwards.  The engine is the same in both; only the policy differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from experiments import handoff
from experiments.reports.claims import Claim, ReportRun, burst
from experiments.serve.tables import values
from pdsim.config import Config, ExperimentOptions
from pdsim.core.progress import ShowProgress
from pdsim.core.units import PositiveInt, Seconds
from pdsim.kv.policy import Policy
from pdsim.models.llm import Hybrid, Llm, Parallel, Side
from pdsim.results.record import Result, Table
from pdsim.transfer.job import Target

THROUGHPUT = Claim("throughput", "inline posting serves about 10 % more at high concurrency", "tokens/s", "more")
DRAIN = Claim("drain", "likewise where only handoffs take time", "tokens/s", "more")
STARTS = Claim("starts", "the thread that posts begins forwards later", "s from arrival", "more")
TTFT = Claim("ttft", "so first tokens come later", "s", "more")
SEEN = Claim("seen", "what is polled between two forwards is seen later (a risk of it)", "s from prefill", "more")
TCP = Claim("metadata", "metadata over TCP costs a handoff no more than over the engine", "us a handoff", "same")
STATE = Claim("state", "state goes along: handoffs asked for, and those that succeeded", "handoffs", "same")
SLICES = Claim("slices", "prefill TP > decode TP likewise", "handoffs", "same")
CLAIMS = (THROUGHPUT, STARTS, TTFT, SEEN, DRAIN, TCP, STATE, SLICES)
POOL = 3 << 29  # bytes of a rank's pool, where memory is configured to be little: many requests at once, and state
Rows = dict[tuple[str, int], dict[str, Any]]
Cost = tuple[Claim, str, dict[str, Any], dict[str, Any]]  # point, row of a plain handoff, row with what is claimed


@dataclass(frozen=True, kw_only=True)
class MoriStateOptions(ExperimentOptions):
    """What is compared."""

    name: str = "seed_mori_state"
    served: Llm  # under concurrency
    states: Mapping[str, Llm] = field(default_factory=dict)  # models that have state, by its kind
    concurrency: tuple[PositiveInt, ...] = (1, 32, 1024)  # requests that arrive at once
    tokens: PositiveInt = 1024  # of each; assumed: the input length at which MORI's send queues are known to fill
    lengths: tuple[PositiveInt, ...] = (512, 4096)  # tokens of single handoffs
    workers: PositiveInt = 1  # that block, before the change; assumed: the default of MORI's first version in SGLang
    handover: Seconds = 0.0  # until a worker begins a write: it waits for the lock that the scheduler holds
    tp: tuple[str, ...] = ("8to4", "8to2", "4to1")  # ranks of prefill, fewer ranks of decode
    repeat: PositiveInt = 5  # of each handoff
    deadline: Seconds = 120.0  # assumed: of silence, after which a rank counts as gone


def run(config: Config, target: Target, progress: ShowProgress) -> Result:
    """Compare what posts, which way metadata goes, and handoffs with state and between unlike ranks."""
    options = MoriStateOptions.of(config)
    trial = ReportRun(config, target, progress, 4 * len(options.concurrency) + 2 * len(options.states) + 2)
    for requests in options.concurrency:
        _concurrency(trial, options, requests)
    served = replace(config, model=options.served)
    ways = _handoffs(trial, options, "metadata", served, ("1to1",), metadata=("data", "control"))
    for tokens in options.lengths:
        times = (ways[f"1to1 whole metadata {way}", tokens]["p50"] for way in ("data", "control"))
        trial.add(TCP, f"{tokens} tokens", *times)
    costs = []
    for claim, at, plain, row in (*_state(trial, options), *_slices(trial, options, served)):
        trial.add(claim, at, options.repeat, row["n"])
        before, after = plain["p50"], row["p50"]
        costs.append([at, before, after, after / before if before and after else None])
    columns = {
        "handoff": "",
        "plain us": "median with keys and values alone, or equal TP",
        "us": "with it",
        "times": "",
    }
    result = trial.result(CLAIMS)
    return replace(result, tables=[*result.tables, Table("What it costs", columns, costs)])


def _policies(config: Config, options: MoriStateOptions) -> dict[str, Policy]:
    policy = replace(config.policy, call="plane", grouping="runs", metadata="control", staging=False)
    queued: dict[str, Any] = {
        "queues": options.workers,
        "handover": options.handover,
        "shard": "session",
        "notify": "message",
    }
    return {"queued": replace(policy, **queued), "inline": replace(policy, queues=0, notify="poll")}


def _concurrency(trial: ReportRun, options: MoriStateOptions, requests: int) -> None:
    own = replace(
        trial.config,
        model=options.served,
        parallel=Parallel(prefill=Side(tp=1), decode=Side(tp=1)),
        workload=burst(requests, options.tokens),
        kv=replace(trial.config.kv, checked=1, pool=trial.config.kv.pool and POOL),
    )
    at = f"{requests} requests of {options.tokens} tokens"
    variants = [
        (f"{requests} requests {name}", replace(own, policy=policy))
        for name, policy in _policies(own, options).items()
    ]
    metrics = ("input_tokens_per_s", "ttft_avg_s", "transfer_p50_s")
    results = trial.serve((THROUGHPUT, TTFT, SEEN), metrics, at, variants)
    begins = [values(each.requests, "started_at") - values(each.requests, "arrival") for each in results]
    trial.add(STARTS, at, *(float(each.mean()) if len(each) else None for each in begins))
    free = replace(own.compute, scale=0.0)
    idle = [(f"{label}, no forwards", replace(each, compute=free)) for label, each in variants]
    trial.serve((DRAIN,), metrics[:1], at, idle)


def _handoffs(
    trial: ReportRun,
    options: MoriStateOptions,
    label: str,
    config: Config,
    tp: tuple[str, ...],
    pool: int = 0,
    metadata: tuple[str, ...] = ("policy",),
) -> Rows:
    # *tp* are the ranks of prefill and decode as ``NtoM``, *pool* the bytes of each rank's KV pool, 0 for the rest
    policy = _policies(config, options)["inline"]
    own = replace(config, policy=policy, kv=replace(config.kv, pool=pool, state_slots=4))
    given = handoff.HandoffOptions(
        tokens=options.lengths,
        repeat=options.repeat,
        paths=("sliced",),
        deadline=options.deadline,
        tp=tp,
        metadata=metadata,
    )
    return trial.handoffs(label, given, own)


def _state(trial: ReportRun, options: MoriStateOptions) -> Iterator[Cost]:
    for kind, model in options.states.items():
        pattern = model.hybrid.pattern
        attention = sum(pattern[layer % len(pattern)] == "a" for layer in range(model.layers))
        alone = replace(model, layers=attention, hybrid=Hybrid())
        plain, state = (
            _handoffs(trial, options, f"{kind} {name}", replace(trial.config, model=llm), ("1to1",), POOL)
            for name, llm in (("without", alone), ("state", model))
        )
        for key, row in plain.items():
            yield STATE, f"{kind} {key[1]} tokens", row, state[key]


def _slices(trial: ReportRun, options: MoriStateOptions, config: Config) -> Iterator[Cost]:
    equal = {tp: "{0}to{0}".format(tp.partition("to")[0]) for tp in options.tp}
    points = _handoffs(trial, options, "slices", config, (*dict.fromkeys(equal.values()), *options.tp))
    for tp, own in equal.items():
        for tokens in options.lengths:
            yield SLICES, f"{tp} {tokens} tokens", points[f"{own} whole", tokens], points[f"{tp} sliced", tokens]
