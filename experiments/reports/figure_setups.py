# SPDX-License-Identifier: Apache-2.0
"""The figures of `experiments.reports.figures`: what reports say, what is assumed, and what serves before and after.

What the reports say of their set-ups:

- 7236: asked how many pieces a layer has, its author says that one big piece is as fast either way.
- 26406 and 22536 are of one author and have a column of TP 4 to 4, which no slices and no staging concern.  The
  eight times of 26406's for 1, 64, 128 and 256 prompts over both engines choose the length of prompts and the host,
  with pages of one token as is SGLang's default.  Nearest (11 % in the root mean square of logarithms) are 80 tokens
  and SGLang without what 2 x H200 took longer under load, and without choosing a step ahead; with that 48 tokens (12
  %); with all of it no length is nearer than 84 %.  No length is short enough for 22536.  NIXL has a column without
  and one with prepared descriptors in 26406: 63 and 48 ms for one prompt, 459 and 331 for 64.  22536 is older, so
  without.
- 37766 is a node of B200 with DeepSeek-V4-Flash over NVLink, whose layers are calls of their own.
- 6860 is a comment of two lines: "about 50 %".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from experiments.compare_engines import TransferEngine
from experiments.reports.claims import burst
from experiments.serve import ServeOptions
from experiments.serve import run as serve
from pdsim.config import Config, ExperimentOptions
from pdsim.hardware.machine import Machine
from pdsim.models.llm import Llm
from pdsim.models.parallel import Parallel, Side
from pdsim.serving.settings import Kv, SchedulerLimits, ServingEngine, Workload
from pdsim.sim.model import Model

__all__ = [
    "BUSY",
    "FIGURES",
    "POSTED",
    "PREPARING",
    "REASONS",
    "TOKENS",
    "UNPREPARED",
    "Parts",
    "ReportFigure",
    "ReportFiguresOptions",
]

BUSY = (1.8e-3, 5.5e-3)
"""Seconds of a blocking call of Mooncake beside a thread that computes in Python, as SGLang's scheduler does: as
`tools.mooncake_calls` measured over TCP: on two shared cores (1.8 to 3.2), on an idle machine (2.7 to 5.5)."""

PREPARING = (0.38e-6, 1.46e-6)
"""Seconds that preparing a descriptor of NIXL takes SGLang: 26406's 459 less 331 ms for 64 prompts, and its 63 less
48 for one, are so much for each of the 10,240 of a prompt.  NIXL itself prepares one in 0.05 us (1.5.1, host
memory)."""

POSTED = 0.15e-6
"""Seconds of a prepared one, as `conf/backend/nixl.yaml` has it, assumed."""

UNPREPARED = POSTED + 0.9e-6
"""Seconds of one that is not prepared: posted, and prepared in about the middle of `PREPARING`."""

TOKENS = 80
"""Of a prompt of 26406 and 22536."""


@dataclass(frozen=True, kw_only=True)
class ReportFiguresOptions(ExperimentOptions):
    """What figures are made of: `conf/experiment/report_figures.yaml`.

    Attributes:
        machines: By the names that figures use.
        models: Likewise.
        backends: Likewise, each with its policy.
        sglang: The serving engine whose reserved tokens a figure varies.
        only: Figures by the numbers of their reports, without the #; empty: all.
    """

    name: str = "report_figures"
    machines: Mapping[str, Machine]  # by the names that figures use
    models: Mapping[str, Llm]
    backends: Mapping[str, TransferEngine]
    sglang: ServingEngine  # whose reserved tokens a figure varies
    only: tuple[str, ...] = ()  # figures by the numbers of their reports; empty: all


class Parts:
    """Serves what a figure asks for.

    Machines, models and engines are those of *options*, everything else is that of *base*.
    """

    def __init__(self, base: Config, options: ReportFiguresOptions) -> None:
        self.base = replace(base, experiment=ServeOptions(), calibration=None)
        self.options = options

    def serve(
        self,
        metric: str,
        hw: str,
        model: str,
        backend: str,
        policy: Mapping[str, Any],
        terms: Mapping[str, float] | None = None,
        **parts: Any,
    ) -> float:
        """Return *metric* of one run of ``serve`` on the model.

        Args:
            metric: Name in the run's summary, such as "ttft_avg_s".
            hw: Machine, by the name in the options; *model* and *backend* likewise.
            model: See *hw*.
            backend: See *hw*.
            policy: What to change of the backend's `pdsim.kv.policy.Policy`.
            terms: What to change of its `pdsim.hardware.costs.EngineModel` on every path.
            **parts: Fields of `Config`: workload, parallelism, KV, scheduler limits.

        Raises:
            ValueError: The run has no such metric: nothing was served.
        """
        engine = self.options.backends[backend]
        if terms:
            paths = ((name, getattr(engine, name)) for name in ("intra", "inter"))
            engine = replace(engine, **{name: replace(path, **terms) for name, path in paths if path is not None})
        config = replace(
            self.base,
            hw=self.options.machines[hw],
            model=self.options.models[model],
            backend=engine,
            policy=replace(engine.policy, **policy),
            **parts,
        )
        target = Model(config.hw, engine, seed=config.seed, collective=config.collective)
        metrics = {one.name: one.value for one in serve(config, target, lambda *_: None).summary}[metric]
        if not metrics:
            raise ValueError(f"a run on {hw} with {backend} has no {metric}: no request was served")
        return float(metrics)


@dataclass(frozen=True, kw_only=True)
class ReportFigure:
    """One figure of a report: its factor is before over after of what *run* returns.

    Attributes:
        report: Its number on GitHub, as "#7236".
        says: What the report says, in a line.
        reported: The factor that its two numbers make.
        assumed: Of the set-up, which the report leaves out.
        run: Simulates both; returns seconds or a rate before, and after.
        open: What of it could as well be otherwise, from where to where.
        ends: Arguments of *run* by keyword, for each end of that.
    """

    report: str  # its number
    says: str
    reported: float  # factor
    assumed: str  # of the set-up, which the report leaves out
    run: Callable[..., tuple[float, float]]
    open: str
    ends: tuple[Mapping[str, Any], ...] = field(default=())


def _sides(prefill: Side, decode: Side) -> Parallel:
    return Parallel(prefill=prefill, decode=decode)


def _deepseek(parts: Parts, hw: str, parallel: Parallel, policy: Mapping[str, Any], busy: float) -> float:
    # Nothing else is under way, so it is a time without contention.  KV has two bytes an element: the reported
    # seconds and rates together are 70 kB a token.  A call takes *busy* seconds; 0: as `conf/backend` has it.
    return parts.serve(
        "transfer_avg_s",
        *(hw, "deepseek-v3", "mooncake", policy),
        terms={"call": busy} if busy else None,
        parallel=parallel,
        workload=burst(1, 10240),
        kv=Kv(page_size=64, pool=4 << 30),
        scheduler=SchedulerLimits(chunk=16384),
    )


def _calls(parts: Parts, grouping: str = "pages", busy: float = 0.0) -> tuple[float, float]:
    parallel, policy = _sides(Side(tp=8), Side(tp=8)), {"grouping": grouping, "queues": 1}
    return (
        _deepseek(parts, "2x8xh800", parallel, {**policy, "call": "descriptor"}, busy),
        _deepseek(parts, "2x8xh800", parallel, {**policy, "call": "chunk"}, busy),
    )


def _layers(parts: Parts, busy: float = 0.0) -> tuple[float, float]:
    parallel, policy = _sides(Side(tp=8, pp=2), Side(tp=16)), {"grouping": "pages", "queues": 4}
    return (
        _deepseek(parts, "8x8xh200", parallel, {**policy, "call": "plane"}, busy),
        _deepseek(parts, "8x8xh200", parallel, {**policy, "call": "chunk"}, busy),
    )


def _unloaded(sglang: ServingEngine, ahead: bool) -> ServingEngine:
    quick = replace(sglang.prefill, send_next=0.0, posted_beside=0.0, posted_more=0.0)
    return replace(sglang, busy=1.0, prefill=quick, ahead=ahead)


def _prompts(
    parts: Parts,
    backend: str,
    count: int,
    tokens: int = TOKENS,
    descriptor: float = 0.0,
    ahead: bool = False,
    prefill: int = 2,
    **kv: Any,
) -> float:
    # A *descriptor* of NIXL takes so many seconds; 0: as `conf/backend` has it.
    return parts.serve(
        "ttft_avg_s",
        *("2x8xh100", "llama-8b", backend, {}),
        terms={"descriptor": descriptor} if descriptor and backend == "nixl" else None,
        parallel=_sides(Side(tp=prefill), Side(tp=4)),
        workload=burst(count, tokens, 16),
        kv=Kv(page_size=1, **kv),
        engine=_unloaded(parts.options.sglang, ahead),
    )


def _staging(parts: Parts, count: int, **setup: Any) -> tuple[float, float]:
    setup = {"descriptor": UNPREPARED, **setup}
    return _prompts(parts, "nixl", count, **setup), _prompts(parts, "nixl", count, staging=True, **setup)


def _engines(parts: Parts, count: int, **setup: Any) -> tuple[float, float]:
    return _prompts(parts, "mooncake", count, **setup), _prompts(parts, "nixl", count, **setup)


def _unequal(parts: Parts, backend: str, count: int, **setup: Any) -> tuple[float, float]:
    return _prompts(parts, backend, count, **setup), _prompts(parts, backend, count, prefill=4, **setup)


def _polling(parts: Parts, tokens: int = 4096, load: float = 0.9, call: float = 0.0) -> tuple[float, float]:
    def transfer(notify: str) -> float:
        lengths: dict[str, Any] = {"input_mean": tokens, "input_cv": 0.0, "output_mean": 8, "output_cv": 0.0}
        return parts.serve(
            "transfer_avg_s",
            *("8xh200", "qwen3-30b", "mooncake_nvlink", {"notify": notify, "staging": False, "call": "plane"}),
            terms={"call": call} if call else None,
            parallel=_sides(Side(tp=2), Side(tp=2)),
            workload=Workload(arrivals="poisson", count=200, load=load, **lengths),
            engine=parts.options.sglang,
        )

    return transfer("poll"), transfer("write")


def _reserved(
    parts: Parts, count: int = 256, prompt: int = 512, output: int = 512, pool: int = 12
) -> tuple[float, float]:
    def throughput(tokens: int) -> float:
        return parts.serve(
            "output_tokens_per_s",
            *("8xh200", "llama-8b", "mooncake_nvlink", {}),
            parallel=_sides(Side(tp=1, instances=4), Side(tp=1)),
            workload=burst(count, prompt, output),
            kv=Kv(pool=pool << 30),
            engine=replace(parts.options.sglang, reserved_tokens=tokens),
        )

    return throughput(512), throughput(1024)


def _counted(count: int) -> str:
    return f"{count} prompts" if count > 1 else "1 prompt"


_BURSTS: tuple[Mapping[str, Any], ...] = tuple(
    {"tokens": tokens, "ahead": ahead} for tokens in (48, 96) for ahead in (False, True)
)
_PREPARED = _BURSTS + tuple({**one, "descriptor": UNPREPARED} for one in _BURSTS)
_OTHERS = tuple({**one, "descriptor": POSTED + preparing} for one in _BURSTS for preparing in PREPARING)
_H100 = "2 x 8 H100 over RDMA, SGLang without costs of load, Llama-3.1-8B, prompts of 80 tokens"
_OPEN = "prompts of 48 to 96 tokens; a step chosen ahead or not"
_NIXL = f"{_OPEN}; a prepared descriptor of NIXL takes 0.15 to 1.05 us"
_SLOW = f"{_OPEN}; a descriptor of NIXL takes 0.53 to 1.61 us, not prepared"

FIGURES = (
    ReportFigure(
        report="#7236",
        says="650 to 60 ms a handoff: a blocking call for each descriptor, one batch",
        reported=650 / 60,
        assumed="2 x 8 H800 instead of 12 nodes; a descriptor a page of 64 tokens and layer; one thread; KV of bf16",
        run=_calls,
        open="a layer in one piece to 160; a call takes 15 us to 1.8 ms, by how busy the scheduler is",
        ends=({"grouping": "runs"}, {"busy": BUSY[0]}),
    ),
    ReportFigure(
        report="#9149",
        says="180 to 80 ms a handoff: a call for each layer, all layers in one batch",
        reported=180 / 80,
        assumed="H200 over RDMA; a descriptor a page of 64 tokens and layer; four threads; KV of bf16",
        run=_layers,
        open="a call takes 15 us to 5.5 ms, by how busy the scheduler is",
        ends=({"busy": BUSY[0]}, {"busy": BUSY[1]}),
    ),
    *(
        ReportFigure(
            report="#22536",
            says=f"TTFT of {_counted(count)}, TP 2 to 4: sliced, staged",
            reported=before / after,
            assumed=f"{_H100}; a descriptor that is not prepared takes 1.05 us",
            run=partial(_staging, count=count),
            open=_SLOW,
            ends=_OTHERS,
        )
        for count, before, after in ((1, 34, 32), (64, 226, 154), (256, 749, 355))
    ),
    *(
        ReportFigure(
            report="#26406",
            says=f"TTFT of {_counted(count)}, TP 2 to 4: Mooncake, NIXL with prepared descriptors",
            reported=mooncake / nixl,
            assumed=_H100,
            run=partial(_engines, count=count),
            open=_NIXL,
            ends=_PREPARED,
        )
        for count, mooncake, nixl in ((1, 127, 48), (64, 2109, 331), (128, 3674, 509))
    ),
    *(
        ReportFigure(
            report="#26406",
            says=f"TTFT of {_counted(count)}, TP 2 to 4: Mooncake, NIXL",
            reported=mooncake / nixl,
            assumed=f"{_H100}; a descriptor that is not prepared takes 1.05 us",
            run=partial(_engines, count=count, descriptor=UNPREPARED),
            open=_SLOW,
            ends=_OTHERS,
        )
        for count, mooncake, nixl in ((1, 127, 63), (64, 2109, 459), (128, 3674, 634))
    ),
    *(
        ReportFigure(
            report="#26406",
            says=f"TTFT of {_counted(count)} over {name}: TP 2 to 4, TP 4 to 4",
            reported=unequal / equal,
            assumed=_H100,
            run=partial(_unequal, backend=backend, count=count),
            open=_OPEN if backend == "mooncake" else _NIXL,
            ends=_BURSTS if backend == "mooncake" else _PREPARED,
        )
        for name, backend, count, unequal, equal in (
            ("Mooncake", "mooncake", 1, 127, 38),
            ("Mooncake", "mooncake", 64, 2109, 191),
            ("Mooncake", "mooncake", 128, 3674, 286),
            ("NIXL", "nixl", 1, 48, 38),
            ("NIXL", "nixl", 64, 331, 195),
            ("NIXL", "nixl", 128, 509, 257),
        )
    ),
    ReportFigure(
        report="#37766",
        says="119 to 21 ms a transfer as reported: seen between forwards, seen when complete",
        reported=119 / 21,
        assumed="8 H200 over NVLink, SGLang, Qwen3-30B-A3B, prompts of 4,096 tokens at 0.9 of what prefill can do",
        run=_polling,
        open="prompts of 4,096 to 16,384 tokens; load 0.3 to 0.9; a call for a layer takes 11 to 200 us",
        ends=tuple(
            {"tokens": tokens, "load": load, "call": call}
            for tokens in (4096, 16384)
            for load in (0.3, 0.9)
            for call in (0.0, 2e-4)
        ),
    ),
    ReportFigure(
        report="#6860",
        says="20,163 to 8,810 tokens/s: 512 and 1,024 tokens reserved for each request at decode",
        reported=20163 / 8810,
        assumed="8 H200, SGLang, Llama-3.1-8B, 256 requests of 512 + 512 tokens at once, 12 GiB of KV",
        run=_reserved,
        open="512 requests of 32 + 512 tokens in 3 GiB, to 2,048 + 512 in 12 GiB",
        ends=({"count": 512, "prompt": 32, "pool": 3}, {"count": 512, "prompt": 2048}),
    ),
)
"""What is compared.  A report has several figures where it has several points."""


REASONS = {
    "#7236, #9149": (
        "what a blocking call of Mooncake costs decides both, and the reports leave out how busy the scheduler is: "
        "idle, 15 us are assumed (21 measured over TCP); beside a thread that computes in Python, 1.8 to 5.5 ms "
        "(`tools.mooncake_calls`)."
    ),
    "#22536, #26406": (
        "lengths and the host come from the TP 4 to 4 column of #26406; with costs of load as on 2 x H200 "
        "bursts take 2 to 3 times as long as reported. A prepared descriptor of NIXL is assumed to take "
        "0.15 us, one that is not 1.05; preparing takes SGLang 0.4 to 1.5 us by the two columns of NIXL."
    ),
    "#37766": "model, GPUs, prompts and load are others; a layer is a call of its own there and here.",
    "#6860": (
        "of requests that hold L tokens, (L + 1,024) / (L + 512) as many run with 512 reserved: never twice as many."
    ),
}
"""Why figures are missed, as far as it is measured."""
