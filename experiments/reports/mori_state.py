# SPDX-License-Identifier: Apache-2.0
"""Seed: MORI-IO with state, posting inline instead of a worker queue, and metadata over TCP or RDMA (SGLang #22665).

Before, one worker takes writes from a queue and blocks until each is done; after, the scheduler
posts all of them and looks at their statuses between two forwards.  The engine is the configured
one in both, so only the policy differs.

Claims (`CLAIMS`) are what the report says in words or numbers; each is judged at several points, by
whether the model moves the same way (`experiments.reports.claims`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from experiments import handoff, serve
from experiments.reports.claims import Claim, ReportRun, as_rows, burst, value
from experiments.serve.tables import values
from pdsim.config import Config, ExperimentOptions
from pdsim.core.progress import ShowProgress
from pdsim.core.units import PositiveInt, Seconds
from pdsim.kv.policy import Policy
from pdsim.models.llm import Hybrid, Llm
from pdsim.models.parallel import Parallel, Side
from pdsim.results.record import Result, Table
from pdsim.transfer.job import Target

__all__ = ["CLAIMS", "MoriStateOptions", "run"]
THROUGHPUT = Claim("throughput", "inline posting serves about 10 % more at high concurrency", "tokens/s", "more")
DRAIN = Claim("drain", "likewise where only handoffs take time", "tokens/s", "more")
STARTS = Claim("starts", "the thread that posts begins forwards later", "s from arrival", "more")
TTFT = Claim("ttft", "so first tokens come later", "s", "more")
SEEN = Claim("seen", "what is polled between two forwards is seen later (a risk of it)", "s from prefill", "more")
TCP = Claim("metadata", "metadata over TCP costs a handoff no more than over the engine", "us a handoff", "same")
STATE = Claim("state", "state goes along: handoffs asked for, and those that succeeded", "handoffs", "same")
SLICES = Claim("slices", "prefill TP > decode TP likewise", "handoffs", "same")
POOL = 3 << 29  # bytes of a rank's pool, where memory is configured to be little: many requests at once, and state
Rows = dict[tuple[str, int], dict[str, Any]]
CLAIMS = (THROUGHPUT, STARTS, TTFT, SEEN, DRAIN, TCP, STATE, SLICES)


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
    """Compare what posts, which way metadata goes, and handoffs with state and between unlike ranks.

    Raise what `experiments.serve` and `experiments.handoff` raise.
    """
    options = MoriStateOptions.of(config)
    trial = ReportRun(config, target, progress, 4 * len(options.concurrency) + 2 * len(options.states) + 2)
    for requests in options.concurrency:
        _concurrency(trial, options, requests)
    _metadata(trial, options)
    costs = [row for kind, model in options.states.items() for row in _state(trial, options, kind, model)]
    costs += _slices(trial, options)
    columns = {
        "handoff": "",
        "plain us": "median with keys and values alone, or equal TP",
        "us": "with it",
        "times": "",
    }
    result = trial.result(CLAIMS)
    return replace(result, tables=[*result.tables, Table("What it costs", columns, costs)])


def _policies(config: Config, options: MoriStateOptions) -> Iterator[tuple[str, Policy]]:
    policy = replace(config.policy, call="plane", grouping="runs", metadata="control", staging=False)
    own = replace(policy, queues=options.workers, handover=options.handover, shard="session", notify="message")
    yield "queued", own
    yield "inline", replace(policy, queues=0, notify="poll")


def _concurrency(trial: ReportRun, options: MoriStateOptions, requests: int) -> None:
    own = replace(
        trial.config,
        model=options.served,
        parallel=Parallel(prefill=Side(tp=1), decode=Side(tp=1)),
        workload=burst(requests, options.tokens),
        kv=replace(trial.config.kv, checked=1, pool=trial.config.kv.pool and POOL),
    )
    at = f"{requests} requests of {options.tokens} tokens"
    for claim, scale in ((THROUGHPUT, own.compute.scale), (DRAIN, 0.0)):
        points = []
        for name, policy in _policies(own, options):
            label = f"{requests} requests {name}{'' if scale else ', no forwards'}"
            config = replace(own, policy=policy, compute=replace(own.compute, scale=scale))
            points.append(trial.run(label, serve.ServeOptions(deadline=options.deadline), config))
        rates: list[Any] = [value(result, "input_tokens_per_s") for result in points]
        trial.add(claim, at, *rates)
        if scale:
            for claimed, name in ((TTFT, "ttft_avg_s"), (SEEN, "transfer_p50_s")):
                times: list[Any] = [value(result, name) for result in points]
                trial.add(claimed, at, *times)
            begun: list[Any] = [_begun(result) for result in points]
            trial.add(STARTS, at, *begun)


def _begun(result: Result) -> float | None:
    # Seconds from the arrival of a request to its forward, the mean of all.
    began = values(result.requests, "started_at") - values(result.requests, "arrival")
    return float(began.mean()) if len(began) else None


def _handoffs(
    trial: ReportRun,
    options: MoriStateOptions,
    label: str,
    config: Config,
    tp: tuple[str, ...],
    pool: int = 0,
    metadata: tuple[str, ...] = ("policy",),
) -> Rows:
    # *tp* are the ranks of prefill and decode as ``NtoM``, *pool* the bytes of each rank's KV pool, 0
    # for what is left, *metadata* the ways that it goes.
    (_, (_, inline)) = _policies(config, options)
    own = replace(config, policy=inline, kv=replace(config.kv, pool=pool, state_slots=4))
    given = handoff.HandoffOptions(
        tokens=options.lengths,
        repeat=options.repeat,
        paths=("sliced",),
        deadline=options.deadline,
        tp=tp,
        metadata=metadata,
    )
    rows = as_rows(trial.run(label, given, own), "Handoffs")
    return {(row["way"], row["tokens"]): row for row in rows}


def _metadata(trial: ReportRun, options: MoriStateOptions) -> None:
    own = replace(trial.config, model=options.served)
    points = _handoffs(trial, options, "metadata", own, ("1to1",), metadata=("data", "control"))
    for tokens in options.lengths:
        ways = (f"1to1 whole metadata {way}" for way in ("data", "control"))
        trial.add(TCP, f"{tokens} tokens", *(points[way, tokens]["p50"] for way in ways))


def _state(trial: ReportRun, options: MoriStateOptions, kind: str, model: Llm) -> Iterator[list[Any]]:
    attention = [model.hybrid.pattern[layer % len(model.hybrid.pattern)] for layer in range(model.layers)].count("a")
    alone = replace(model, layers=attention, hybrid=Hybrid())
    plain, state = (
        _handoffs(trial, options, f"{kind} {name}", replace(trial.config, model=llm), ("1to1",), POOL)
        for name, llm in (("without", alone), ("state", model))
    )
    for way, tokens in plain:
        yield _cost(trial, options, STATE, f"{kind} {tokens} tokens", plain[way, tokens], state[way, tokens])


def _slices(trial: ReportRun, options: MoriStateOptions) -> Iterator[list[Any]]:
    ranks = {tp: tp.partition("to")[0] for tp in options.tp}
    equal = tuple(dict.fromkeys(f"{prefill}to{prefill}" for prefill in ranks.values()))
    points = _handoffs(trial, options, "slices", replace(trial.config, model=options.served), (*equal, *options.tp))
    for tp, prefill in ranks.items():
        for tokens in options.lengths:
            plain, row = points[f"{prefill}to{prefill} whole", tokens], points[f"{tp} sliced", tokens]
            yield _cost(trial, options, SLICES, f"{tp} {tokens} tokens", plain, row)


def _cost(
    trial: ReportRun,
    options: MoriStateOptions,
    claim: Claim,
    at: str,
    plain: Mapping[str, Any],
    row: Mapping[str, Any],
) -> list[Any]:
    trial.add(claim, at, options.repeat, row["n"])
    before, after = plain["p50"], row["p50"]
    return [at, before, after, after / before if before and after else None]
