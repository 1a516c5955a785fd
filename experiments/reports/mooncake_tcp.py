# SPDX-License-Identifier: Apache-2.0
"""Seed: Mooncake over TCP where there is no RDMA, an alias of the backend without code of its own (SGLang #26346).

Before, Mooncake over RDMA, the backend of the machine; after, ``mooncake_tcp``.  Where that is the
machine's backend, because it has no RDMA, there is no before: what is left to see is that handoffs
succeed, and how long they take.

That TCP takes longer is no news; the claims are that nothing else differs: the same bytes, in the
same descriptors, and every handoff succeeds.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from experiments import handoff, serve
from experiments.reports.claims import Claim, ReportRun, as_rows, burst, value
from pdsim.config import Config, ExperimentOptions
from pdsim.core.progress import ShowProgress
from pdsim.core.units import PositiveInt, Seconds
from pdsim.hardware.costs import Engine
from pdsim.kv.policy import Policy
from pdsim.models.parallel import Parallel, Side
from pdsim.results.record import Result
from pdsim.transfer.job import Target

__all__ = ["CLAIMS", "MooncakeTcpOptions", "Tcp", "run"]

SERVES = Claim("serves", "without RDMA: handoffs asked for, and those that succeeded over TCP", "handoffs", "same")
BYTES = Claim("bytes", "no code of its own: the same bytes over either", "bytes", "same", 1.0001)
CALLS = Claim("descriptors", "and the same descriptors", "descriptors", "same", 1.0001)
HANDOFF = Claim("handoff", "a handoff takes longer than over RDMA, as is to be expected", "us", "more")
TTFT = Claim("ttft", "first tokens of prompts at once come later", "s", "more")
CLAIMS = (SERVES, BYTES, CALLS, HANDOFF, TTFT)


@dataclass(frozen=True, kw_only=True)
class Tcp(Engine):
    """The alias with its policy, as `conf/backend/mooncake_tcp.yaml` has both."""

    policy: Policy = field(default_factory=Policy)


@dataclass(frozen=True, kw_only=True)
class MooncakeTcpOptions(ExperimentOptions):
    """What is handed over."""

    name: str = "seed_mooncake_tcp"
    tcp: Tcp  # the backend mooncake_tcp
    tp: tuple[str, ...] = ("1to1", "8to8")  # ranks of prefill, as many of decode, where there are GPUs for both
    tokens: tuple[PositiveInt, ...] = (512, 2048, 4096)  # of a handoff
    repeat: PositiveInt = 5  # of each
    requests: PositiveInt = 16  # at once
    prompt: PositiveInt = 2048  # tokens of each of them; assumed: the report has no benchmark
    deadline: Seconds = 120.0  # assumed: of silence, after which a rank counts as gone

    def __post_init__(self) -> None:
        if any(text.partition("to")[0] != text.partition("to")[2] for text in self.tp):
            raise ValueError(f"experiment.tp must be of equal pairs such as 8to8, got {', '.join(self.tp)}")

    def fitting(self, gpus: int) -> tuple[str, ...]:
        """Return those of *tp* that *gpus* GPUs are enough for; without any, ranks of hosts, one of either side."""
        return tuple(text for text in self.tp if 2 * int(text.partition("to")[0]) <= (gpus or 2))


class Transport(NamedTuple):
    """One of the two things that are compared.

    *config* has its backend and policy, *target* runs that backend.
    """

    name: str
    config: Config
    target: Target


def run(config: Config, target: Target, progress: ShowProgress) -> Result:
    """Hand over and serve over RDMA, where the machine's backend uses it, and over TCP.

    Raise what `experiments.handoff` and `experiments.serve` raise.
    """
    options = MooncakeTcpOptions.of(config)
    tcp = replace(config, backend=options.tcp, policy=options.tcp.policy)
    before = None if config.backend.name == options.tcp.name else Transport(config.backend.name, config, target)
    after = Transport("mooncake_tcp", tcp, target.using(options.tcp)) if before else Transport("tcp", config, target)
    trial = ReportRun(config, target, progress, 4 if before else 2)
    _handoffs(trial, options, before, after)
    _prompts(trial, options, before, after)
    trial.notes += [f"mooncake_tcp: {parameter} {source}" for parameter, source in options.tcp.sources.items()]
    return trial.result(CLAIMS)


def _handoffs(trial: ReportRun, options: MooncakeTcpOptions, before: Transport | None, after: Transport) -> None:
    fitting = options.fitting(trial.config.hw.gpus * trial.config.hw.nodes)
    shapes = handoff.HandoffOptions(
        tp=fitting, tokens=options.tokens, repeat=options.repeat, deadline=options.deadline
    )

    def measured(transport: Transport) -> dict[tuple[str, int], dict[str, Any]]:
        label = f"handoffs over {transport.name}"
        rows = as_rows(trial.run(label, shapes, transport.config, transport.target), "Handoffs")
        return {(row["way"], row["tokens"]): row for row in rows}

    tcp, rdma = measured(after), measured(before) if before else {}
    for key, row in tcp.items():
        at = f"{key[0].removesuffix(' whole')} {key[1]} tokens"
        trial.add(SERVES, at, options.repeat, row["n"])
        for claim, heading in ((BYTES, "bytes"), (CALLS, "descriptors"), (HANDOFF, "p50")):
            trial.add(claim, at, rdma[key][heading] if rdma else None, row[heading])


def _prompts(trial: ReportRun, options: MooncakeTcpOptions, before: Transport | None, after: Transport) -> None:
    tp = max(int(text.partition("to")[0]) for text in options.fitting(trial.config.hw.gpus * trial.config.hw.nodes))
    parallel, given = Parallel(prefill=Side(tp=tp), decode=Side(tp=tp)), burst(options.requests, options.prompt)

    def ttft(transport: Transport | None) -> float | None:
        if transport is None:
            return None
        own = replace(transport.config, parallel=parallel, workload=given)
        label = f"prompts over {transport.name}"
        result = trial.run(label, serve.ServeOptions(deadline=options.deadline), own, transport.target)
        return value(result, "ttft_avg_s")

    at = f"{tp}to{tp} {options.requests} prompts of {options.prompt} tokens"
    trial.add(TTFT, at, ttft(before), ttft(after))
