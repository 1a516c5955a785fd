# SPDX-License-Identifier: Apache-2.0
"""What six reports of SGLang say in figures, simulated: factors reported and simulated, and the verdict.

Reports leave much of their set-up out, so factors are compared, before over after.  A factor is *reached* within
`CLOSE` of the assumed set-up, else *within what is open* if the set-ups that the report leaves open span it, else
*not reached*.  Machines, models, engines, and what the reports say of them: ``conf/experiment/report_figures.yaml``;
`data/reports/figures.csv` keeps a run.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from experiments.compare_engines import TransferEngine
from experiments.reports.claims import burst
from experiments.serve import ServeOptions
from experiments.serve import run as serve
from pdsim.config import Config, ExperimentOptions
from pdsim.core.files import data, write_table
from pdsim.core.progress import ShowProgress, silent
from pdsim.hardware.machine import Machine
from pdsim.models.llm import Llm, Parallel, Side
from pdsim.results.record import Metric, Result, Table
from pdsim.serving.settings import Kv, SchedulerLimits, ServingEngine, Workload
from pdsim.sim.model import Model
from pdsim.transfer.job import Target

TARGETS = ("model",)

CLOSE = 1.25
"""Between a factor and the reported one, for it to count as reached: set-ups are known no better."""

BUSY = (1.8e-3, 5.5e-3)
"""Seconds of a blocking call of Mooncake beside a thread that computes in Python, as SGLang's scheduler does: as
`data/benchmarks/mooncake-calls.parquet` has it over TCP: two shared cores 1.8 to 3.2, an idle machine 2.7 to 5.5."""

PREPARING = (0.38e-6, 1.46e-6)
"""Seconds that preparing a descriptor of NIXL takes SGLang: 26406's 459 less 331 ms for 64 prompts, and its 63 less
48 for one, are so much for each of the 10,240 of a prompt.  NIXL itself prepares one in 0.05 us (1.5.1, host
memory)."""

POSTED = 0.15e-6
"""Seconds of a prepared one, as `conf/backend/nixl.yaml` has it, assumed."""

UNPREPARED = POSTED + 0.9e-6
"""Seconds of one that is not prepared: posted, and prepared in about the middle of `PREPARING`."""


@dataclass(frozen=True, kw_only=True)
class ReportFiguresOptions(ExperimentOptions):
    """The machines, models and engines of the figures: `conf/experiment/report_figures.yaml`."""

    name: str = "report_figures"
    machines: Mapping[str, Machine]  # by the names that figures use
    models: Mapping[str, Llm]
    backends: Mapping[str, TransferEngine]
    sglang: ServingEngine  # whose reserved tokens a figure varies
    only: tuple[str, ...] = ()  # figures by the numbers of their reports; empty: all


class FigureRow(NamedTuple):
    """A figure and its factors, to two digits; the row of `data/reports/figures.csv`."""

    report: str
    figure: str
    reported: float
    simulated: float
    error: float  # simulated / reported - 1
    lowest: float  # of all set-ups that the report leaves open
    highest: float
    verdict: str
    assumed: str
    open: str


def run(config: Config, _: Target, progress: ShowProgress) -> Result:
    """Simulate all figures, or those of `ReportFiguresOptions.only`, and return the table.

    ``hw``, ``backend`` and ``model`` of *config* are not used.  A figure that the model does not meet is no failure.
    """
    rows = list(simulated(config, progress))
    reached, within = (sum(row.verdict == said for row in rows) for said in ("reached", "within what is open"))
    return Result(
        summary=[
            Metric("figures", len(rows), "that reports state, as factors"),
            Metric("figures_reached", reached, f"of them, those that the model meets within a factor of {CLOSE:g}"),
            Metric("figures_within", within, "of the others, those that set-ups which the report leaves open reach"),
        ],
        tables=[Table("Reports", dict.fromkeys(FigureRow._fields, ""), [list(row) for row in rows])],
    )


def simulated(config: Config, progress: ShowProgress) -> Iterator[FigureRow]:
    """Yield the simulated factors of each figure, one at a time."""
    options = ReportFiguresOptions.of(config)
    chosen = [one for one in FIGURES if not options.only or one.report.lstrip("#") in options.only]
    parts = Parts(config, options)
    for number, figure in enumerate(chosen):
        progress(number / len(chosen), f"{figure.report}: {figure.says}")
        factors = [round(figure.factor(parts, **end), 2) for end in ({}, *figure.ends)]
        reported, factor, low, high = round(figure.reported, 2), factors[0], min(factors), max(factors)
        numbers = (reported, factor, round(factor / reported - 1, 2), low, high)
        said = verdict(reported, factor, low, high)
        yield FigureRow(figure.report, figure.says, *numbers, said, figure.assumed, figure.open)


def verdict(reported: float, simulated: float, lowest: float, highest: float) -> str:
    """Return whether the model reaches a factor.

    >>> verdict(2.0, 2.5, 2.5, 2.5), verdict(2.0, 1.5, 1.0, 2.0), verdict(9.0, 1.06, 1.0, 8.9)
    ('reached', 'within what is open', 'not reached')
    """
    if max(reported, simulated) <= CLOSE * min(reported, simulated):
        return "reached"
    return "within what is open" if lowest <= reported <= highest else "not reached"


def keep(rows: Iterable[FigureRow], path: Path) -> None:
    """Write *rows* to *path* as CSV; `kept` reads it again."""
    write_table(path, FigureRow._fields, rows)


def kept() -> list[FigureRow]:
    """Return the rows of ``data/reports/figures.csv``; raise a `FileNotFoundError` outside a checkout."""
    with data("reports", "figures.csv").open(encoding="utf-8", newline="") as file:
        return msgspec.convert(list(csv.reader(file))[1:], list[FigureRow], strict=False)


class Parts:
    """Runs the workload of a figure on the machines, models and engines of *options*."""

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
        terms: Mapping[str, float],
        **parts: Any,
    ) -> float:
        """Return *metric* of one run of ``serve`` on the model.

        *policy* and *terms* change the backend's policy and its costs on every path, where terms are not 0; *parts*
        are fields of `Config`.
        """
        engine, terms = self.options.backends[backend], {name: cost for name, cost in terms.items() if cost}
        paths = {name: getattr(engine, name) for name in ("intra", "inter")}
        engine = replace(engine, **{name: path and replace(path, **terms) for name, path in paths.items()})
        config = replace(
            self.base,
            hw=self.options.machines[hw],
            model=self.options.models[model],
            backend=engine,
            policy=replace(engine.policy, **policy),
            **parts,
        )
        target = Model(config.hw, engine, seed=config.seed, collective=config.collective)
        value = serve(config, target, silent).values[metric]
        if not value:
            raise ValueError(f"a run on {hw} with {backend} has no {metric}: no request was served")
        return float(value)


def _sides(prefill: Side, decode: Side) -> Parallel:
    return Parallel(prefill=prefill, decode=decode)


def _deepseek(
    parts: Parts, hw: str, parallel: Parallel, queues: int, call: str, grouping: str = "pages", busy: float = 0.0
) -> float:
    # One prompt, without contention.  KV has two bytes an element: the reported seconds and rates together are 70 kB
    # a token.  A call takes *busy* seconds; 0: as `conf/backend` has it.
    return parts.serve(
        "transfer_avg_s",
        *(hw, "deepseek-v3", "mooncake", {"grouping": grouping, "queues": queues, "call": call}, {"call": busy}),
        parallel=parallel,
        workload=burst(1, 10240),
        kv=Kv(page_size=64, pool=4 << 30),
        scheduler=SchedulerLimits(chunk=16384),
    )


def _prompts(
    parts: Parts,
    backend: str,
    count: int,
    tokens: int = 80,
    descriptor: float = 0.0,
    ahead: bool = False,
    prefill: int = 2,
    staging: bool = False,
) -> float:
    # A *descriptor* of NIXL takes so many seconds; 0: as `conf/backend` has it.  The host has no costs of load.
    sglang = parts.options.sglang
    quick = replace(sglang.prefill, send_next=0.0, posted_beside=0.0, posted_more=0.0)
    return parts.serve(
        "ttft_avg_s",
        *("2x8xh100", "llama-8b", backend, {}, {"descriptor": descriptor if backend == "nixl" else 0.0}),
        parallel=_sides(Side(tp=prefill), Side(tp=4)),
        workload=burst(count, tokens, 16),
        kv=Kv(page_size=1, staging=staging),
        engine=replace(sglang, busy=1.0, prefill=quick, ahead=ahead),
    )


def _polling(parts: Parts, notify: str, tokens: int = 4096, load: float = 0.9, call: float = 0.0) -> float:
    lengths: dict[str, Any] = {"input_mean": tokens, "input_cv": 0.0, "output_mean": 8, "output_cv": 0.0}
    policy = {"notify": notify, "staging": False, "call": "plane"}
    return parts.serve(
        "transfer_avg_s",
        *("8xh200", "qwen3-30b", "mooncake_nvlink", policy, {"call": call}),
        parallel=_sides(Side(tp=2), Side(tp=2)),
        workload=Workload(arrivals="poisson", count=200, load=load, **lengths),
        engine=parts.options.sglang,
    )


def _reserved(parts: Parts, tokens: int, count: int = 256, prompt: int = 512, pool: int = 12) -> float:
    return parts.serve(
        "output_tokens_per_s",
        *("8xh200", "llama-8b", "mooncake_nvlink", {}, {}),
        parallel=_sides(Side(tp=1, instances=4), Side(tp=1)),
        workload=burst(count, prompt, 512),
        kv=Kv(pool=pool << 30),
        engine=replace(parts.options.sglang, reserved_tokens=tokens),
    )


Setup = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ReportFigure:
    """One figure of a report; it has several where it has several points."""

    report: str  # its number
    says: str
    reported: float  # factor
    assumed: str  # of the set-up, which the report leaves out
    open: str  # what of it could as well be otherwise, from where to where
    serves: Callable[..., float]  # returns seconds or a rate
    setup: Setup  # arguments of it, beside those of before and after
    before: Setup
    after: Setup
    ends: Sequence[Setup]  # what is open, at each end

    def factor(self, parts: Parts, **end: Any) -> float:
        """Return before over after, as assumed but for *end*."""
        before, after = (
            self.serves(parts, **{**self.setup, **variant, **end}) for variant in (self.before, self.after)
        )
        return before / after


def _counted(count: int) -> str:
    return f"{count} prompts" if count > 1 else "1 prompt"


_BURSTS: Sequence[Setup] = [{"tokens": tokens, "ahead": ahead} for tokens, ahead in product((48, 96), (False, True))]
_PREPARED = [*_BURSTS, *({**one, "descriptor": UNPREPARED} for one in _BURSTS)]
_OTHERS = [{**one, "descriptor": POSTED + preparing} for one, preparing in product(_BURSTS, PREPARING)]
_H100 = "2 x 8 H100 over RDMA, SGLang without costs of load, Llama-3.1-8B, prompts of 80 tokens"
_UNPREPARED = f"{_H100}; a descriptor that is not prepared takes 1.05 us"
_OPEN = "prompts of 48 to 96 tokens; a step chosen ahead or not"
_NIXL = f"{_OPEN}; a prepared descriptor of NIXL takes 0.15 to 1.05 us"
_SLOW = f"{_OPEN}; a descriptor of NIXL takes 0.53 to 1.61 us, not prepared"


def _unequal(name: str, times: Sequence[tuple[int, float, float]]) -> Iterator[ReportFigure]:
    # (prompts, ms of TP 2 to 4, of TP 4 to 4)
    open_, ends = (_OPEN, _BURSTS) if name == "Mooncake" else (_NIXL, _PREPARED)
    for count, unequal, equal in times:
        yield ReportFigure(
            report="#26406",
            says=f"TTFT of {_counted(count)} over {name}: TP 2 to 4, TP 4 to 4",
            reported=unequal / equal,
            assumed=_H100,
            open=open_,
            serves=_prompts,
            setup={"backend": name.lower(), "count": count},
            before={},
            after={"prefill": 4},
            ends=ends,
        )


FIGURES = (
    ReportFigure(
        report="#7236",
        says="650 to 60 ms a handoff: a blocking call for each descriptor, one batch",
        reported=650 / 60,
        assumed="2 x 8 H800 instead of 12 nodes; a descriptor a page of 64 tokens and layer; one thread; KV of bf16",
        open="a layer in one piece to 160; a call takes 15 us to 1.8 ms, by how busy the scheduler is",
        serves=_deepseek,
        setup={"hw": "2x8xh800", "parallel": _sides(Side(tp=8), Side(tp=8)), "queues": 1},
        before={"call": "descriptor"},
        after={"call": "chunk"},
        ends=({"grouping": "runs"}, {"busy": BUSY[0]}),
    ),
    ReportFigure(
        report="#9149",
        says="180 to 80 ms a handoff: a call for each layer, all layers in one batch",
        reported=180 / 80,
        assumed="H200 over RDMA; a descriptor a page of 64 tokens and layer; four threads; KV of bf16",
        open="a call takes 15 us to 5.5 ms, by how busy the scheduler is",
        serves=_deepseek,
        setup={"hw": "8x8xh200", "parallel": _sides(Side(tp=8, pp=2), Side(tp=16)), "queues": 4},
        before={"call": "plane"},
        after={"call": "chunk"},
        ends=({"busy": BUSY[0]}, {"busy": BUSY[1]}),
    ),
    *(
        ReportFigure(
            report="#22536",
            says=f"TTFT of {_counted(count)}, TP 2 to 4: sliced, staged",
            reported=before / after,
            assumed=_UNPREPARED,
            open=_SLOW,
            serves=_prompts,
            setup={"backend": "nixl", "count": count, "descriptor": UNPREPARED},
            before={},
            after={"staging": True},
            ends=_OTHERS,
        )
        for count, before, after in ((1, 34, 32), (64, 226, 154), (256, 749, 355))
    ),
    *(
        ReportFigure(
            report="#26406",
            says=f"TTFT of {_counted(count)}, TP 2 to 4: Mooncake, NIXL{words}",
            reported=mooncake / nixl,
            assumed=assumed,
            open=open_,
            serves=_prompts,
            setup={"count": count, "descriptor": descriptor},
            before={"backend": "mooncake"},
            after={"backend": "nixl"},
            ends=ends,
        )
        for words, descriptor, assumed, open_, ends, times in (
            (" with prepared descriptors", 0.0, _H100, _NIXL, _PREPARED, (48, 331, 509)),
            ("", UNPREPARED, _UNPREPARED, _SLOW, _OTHERS, (63, 459, 634)),
        )
        for count, mooncake, nixl in zip((1, 64, 128), (127, 2109, 3674), times, strict=True)
    ),
    *_unequal("Mooncake", ((1, 127, 38), (64, 2109, 191), (128, 3674, 286))),
    *_unequal("NIXL", ((1, 48, 38), (64, 331, 195), (128, 509, 257))),
    ReportFigure(
        report="#37766",
        says="119 to 21 ms a transfer as reported: seen between forwards, seen when complete",
        reported=119 / 21,
        assumed="8 H200 over NVLink, SGLang, Qwen3-30B-A3B, prompts of 4,096 tokens at 0.9 of what prefill can do",
        open="prompts of 4,096 to 16,384 tokens; load 0.3 to 0.9; a call for a layer takes 11 to 200 us",
        serves=_polling,
        setup={},
        before={"notify": "poll"},
        after={"notify": "write"},
        ends=[
            {"tokens": tokens, "load": load, "call": call}
            for tokens, load, call in product((4096, 16384), (0.3, 0.9), (0.0, 2e-4))
        ],
    ),
    ReportFigure(
        report="#6860",
        says="20,163 to 8,810 tokens/s: 512 and 1,024 tokens reserved for each request at decode",
        reported=20163 / 8810,
        assumed="8 H200, SGLang, Llama-3.1-8B, 256 requests of 512 + 512 tokens at once, 12 GiB of KV",
        open="512 requests of 32 + 512 tokens in 3 GiB, to 2,048 + 512 in 12 GiB",
        serves=_reserved,
        setup={},
        before={"tokens": 512},
        after={"tokens": 1024},
        ends=({"count": 512, "prompt": 32, "pool": 3}, {"count": 512, "prompt": 2048}),
    ),
)


if __name__ == "__main__":
    from experiments.reports import figures  # a composed configuration has the options of this, not of __main__
    from pdsim.config.compose import compose

    figures.keep(figures.simulated(compose(["experiment=report_figures"]), silent), data("reports", "figures.csv"))
