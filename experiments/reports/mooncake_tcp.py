# SPDX-License-Identifier: Apache-2.0
"""Mooncake over TCP where there is no RDMA, an alias of the backend without code of its own: SGLang PR 26346.

Before, Mooncake over RDMA, the backend of the machine; after, ``mooncake_tcp``.  A machine without RDMA has no
before: handoffs must still succeed.  The claims are that nothing but the time differs: the same bytes, in the same
descriptors, and every handoff succeeds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from experiments import handoff, serve
from experiments.compare_engines import TransferEngine
from experiments.reports.claims import Claim, ReportRun, burst
from pdsim.config import Config, ExperimentOptions
from pdsim.core.progress import ShowProgress
from pdsim.core.units import PositiveInt, Seconds
from pdsim.models.llm import Parallel, Side
from pdsim.results.record import Result
from pdsim.transfer.job import Target

SERVES = Claim("serves", "without RDMA: handoffs asked for, and those that succeeded over TCP", "handoffs", "same")
BYTES = Claim("bytes", "no code of its own: the same bytes over either", "bytes", "same", 1.0001)
CALLS = Claim("descriptors", "and the same descriptors", "descriptors", "same", 1.0001)
HANDOFF = Claim("handoff", "a handoff takes longer than over RDMA, as is to be expected", "us", "more")
TTFT = Claim("ttft", "first tokens of prompts at once come later", "s", "more")
CLAIMS = (SERVES, BYTES, CALLS, HANDOFF, TTFT)


def equal(text: object) -> str:
    """Return *text*, as `handoff.sides`, if these are equal; raise a `ValueError` otherwise."""
    if len(set(handoff.sides(text).split("to"))) > 1:
        raise ValueError(f"{text!r} has sides of different TP; write equal ones, such as 8to8")
    return str(text)


@dataclass(frozen=True, kw_only=True)
class MooncakeTcpOptions(ExperimentOptions):
    """Which KV is transferred."""

    name: str = "seed_mooncake_tcp"
    tcp: TransferEngine  # the backend mooncake_tcp
    # ranks of prefill, as many of decode, where there are GPUs for both
    tp: tuple[Annotated[str, equal], ...] = ("1to1", "8to8")
    tokens: tuple[PositiveInt, ...] = (512, 2048, 4096)  # of a handoff
    repeat: PositiveInt = 5  # of each
    requests: PositiveInt = 16  # at once
    prompt: PositiveInt = 2048  # tokens of each of them; assumed: the report has no benchmark
    deadline: Seconds = 120.0  # assumed: of silence, after which a rank counts as gone


def run(config: Config, target: Target, progress: ShowProgress) -> Result:
    """Run handoffs and serving over RDMA, if the machine's backend uses it, and over TCP."""
    options = MooncakeTcpOptions.of(config)
    transports = {config.backend.name: (config, target)}
    if config.backend.name != options.tcp.name:
        tcp = replace(config, backend=options.tcp, policy=options.tcp.policy)
        transports[options.tcp.name] = (tcp, target.using(options.tcp))
    trial = ReportRun(config, target, progress, 2 * len(transports))
    gpus = config.hw.gpus * config.hw.nodes or 2  # of hosts, one rank of either side
    ranks = [int(text.partition("to")[0]) for text in options.tp]
    ranks = [count for count in ranks if 2 * count <= gpus]
    shapes = handoff.HandoffOptions(
        tp=tuple(f"{count}to{count}" for count in ranks),
        tokens=options.tokens,
        repeat=options.repeat,
        deadline=options.deadline,
    )
    over = [trial.handoffs(f"handoffs over {name}", shapes, *how) for name, how in reversed(transports.items())]
    for (way, tokens), row in over[0].items():
        at = f"{way.removesuffix(' whole')} {tokens} tokens"
        trial.add(SERVES, at, options.repeat, row["n"])
        for claim, heading in ((BYTES, "bytes"), (CALLS, "descriptors"), (HANDOFF, "p50")):
            before = over[1][way, tokens][heading] if len(over) > 1 else None
            trial.add(claim, at, before, row[heading])
    side = Side(tp=max(ranks))
    times = []
    for name, (own, engine) in transports.items():
        given = replace(
            own, parallel=Parallel(prefill=side, decode=side), workload=burst(options.requests, options.prompt)
        )
        served = trial.run(f"prompts over {name}", serve.ServeOptions(deadline=options.deadline), given, engine)
        times.append(served.values["ttft_avg_s"])
    at = f"{side.tp}to{side.tp} {options.requests} prompts of {options.prompt} tokens"
    trial.add(TTFT, at, *[None, *times][-2:])
    trial.notes += [f"mooncake_tcp: {parameter} {source}" for parameter, source in options.tcp.sources.items()]
    return trial.result(CLAIMS)
