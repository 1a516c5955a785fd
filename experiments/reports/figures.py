# SPDX-License-Identifier: Apache-2.0
"""What six reports of SGLang say in figures, simulated: reported, simulated, how far apart, and the verdict.

Reports leave most of their set-up out, so each figure states what was assumed, and factors are
compared, before over after, not times.  A factor is *reached* within `CLOSE`; *direction only* says
that the change helps in both, by another factor; else it is *not reached*.
`data/reports/figures.csv` keeps what a run found; ``python -m benchmarks.reference`` shows it in
docs/reports.md, which has the reasons (`REASONS`), too.

Machines, models and engines of the figures are in ``conf/experiment/report_figures.yaml``: those of
the reports, as far as they say, whatever the command line chooses.  A further figure is an entry of
`FIGURES` with a function that serves before and after.

What the reports say of their set-ups:

- 26406 and 22536 have a column of TP 4 to 4, which no slices and no staging concern.  Its times
  choose the prompts: with 128 tokens it takes 31, 213, 339 and 588 ms for 1, 64, 128 and 256
  prompts, reported 38, 206, 302 and 557 in 26406; no prompt is short enough for 22536 (31, 127, 231,
  327).  Mooncake is the slower engine there.  NIXL posts prepared descriptors here, so those are
  compared.
- 37766 is a node of B200 with DeepSeek-V4-Flash over NVLink.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from experiments.compare_engines import TransferEngine
from experiments.reports.claims import burst
from experiments.serve import ServeOptions
from experiments.serve import run as serve
from pdsim.config import Config, ExperimentOptions
from pdsim.fabric.model import Model
from pdsim.hardware import Machine
from pdsim.job import Target
from pdsim.progress import ShowProgress
from pdsim.repository import data
from pdsim.results.record import Metric, Result, Table
from pdsim.serving.settings import Kv, Llm, Parallel, SchedulerLimits, ServingEngine, Side, Workload

__all__ = [
    "CLOSE",
    "FIGURES",
    "REASONS",
    "TARGETS",
    "FigureRow",
    "Parts",
    "ReportFigure",
    "ReportFiguresOptions",
    "keep",
    "kept",
    "run",
    "simulated",
    "verdict",
]

TARGETS = ("model",)
"""Where the experiment can run."""

CLOSE = 1.25
"""Between a factor and the reported one, for it to count as reached: set-ups are known no better."""

HELPS = 1.05
"""From which factor on a change is told from nothing."""


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
        self, metric: str, hw: str, model: str, backend: str, policy: Mapping[str, Any], **parts: Any
    ) -> float:
        """Return *metric* of one run of ``serve`` on the model.

        Args:
            metric: Name in the run's summary, such as "ttft_avg_s".
            hw: Machine, by the name in the options; *model* and *backend* likewise.
            model: See *hw*.
            backend: See *hw*.
            policy: What to change of the backend's `pdsim.kv.policy.Policy`.
            **parts: Fields of `Config`: workload, parallelism, KV, scheduler limits.

        Raises:
            ValueError: The run has no such metric: nothing was served.
        """
        engine = self.options.backends[backend]
        config = replace(
            self.base,
            hw=self.options.machines[hw],
            model=self.options.models[model],
            backend=engine,
            policy=replace(engine.policy, **policy),
            **parts,
        )
        target = Model(config.hw, engine, seed=config.seed, collective=config.collective)
        found = {one.name: one.value for one in serve(config, target, lambda *_: None).summary}[metric]
        if not found:
            raise ValueError(f"a run on {hw} with {backend} has no {metric}: no request was served")
        return float(found)


@dataclass(frozen=True, kw_only=True)
class ReportFigure:
    """One figure of a report: its factor is before over after of what *run* returns.

    Attributes:
        report: Its number on GitHub, as "#7236".
        says: What the report says, in a line.
        reported: The factor that its two numbers make.
        assumed: Of the set-up, which the report leaves out.
        run: Simulates both; returns seconds or a rate before, and after.
    """

    report: str  # its number
    says: str
    reported: float  # factor
    assumed: str  # of the set-up, which the report leaves out
    run: Callable[[Parts], tuple[float, float]]


HEADS = ("report", "figure", "reported", "simulated", "error", "verdict", "assumed")
"""Names of the fields of `FigureRow`."""


class FigureRow(NamedTuple):
    """A figure and what was found; the row of `data/reports/figures.csv`.

    *reported* and *simulated* are factors with two digits, *error* is simulated over reported minus
    one, *verdict* that of `verdict`, and the others are texts of `ReportFigure`.
    """

    report: str
    figure: str
    reported: float
    simulated: float
    error: float
    verdict: str
    assumed: str


def verdict(reported: float, simulated: float) -> str:
    """Return whether the model reaches a factor.

    Both within `CLOSE` of each other: "reached".  Both at least `HELPS`: "direction only".  A
    change that helps in one and not in the other is "not reached", whatever the numbers.

    >>> verdict(2.0, 1.9), verdict(5.8, 2.3), verdict(2.25, 1.02)
    ('reached', 'direction only', 'not reached')
    """
    if max(reported, simulated) <= CLOSE * min(reported, simulated):
        return "reached"
    return "direction only" if min(reported, simulated) >= HELPS else "not reached"


def _sides(prefill: Side, decode: Side) -> Parallel:
    """Return the parallelism of both sides."""
    return Parallel(prefill=prefill, decode=decode)


def _deepseek(parts: Parts, hw: str, parallel: Parallel, policy: Mapping[str, Any]) -> float:
    """Return the mean seconds of the handoff of one prompt of 10,240 tokens of DeepSeek-V3.

    Nothing else is under way, so it is a time without contention.  KV has two bytes an element: the
    reported seconds and rates together are 70 kB a token.
    """
    return parts.serve(
        "transfer_avg_s",
        *(hw, "deepseek-v3", "mooncake", policy),
        parallel=parallel,
        workload=burst(1, 10240),
        kv=Kv(page_size=64, pool=4 << 30),
        scheduler=SchedulerLimits(chunk=16384),
    )


def _calls(parts: Parts) -> tuple[float, float]:
    """Return seconds of a handoff with a call for each descriptor, and with one for all (SGLang 7236)."""
    parallel = _sides(Side(tp=8), Side(tp=8))
    return (
        _deepseek(parts, "2x8xh800", parallel, {"grouping": "pages", "call": "descriptor", "queues": 1}),
        _deepseek(parts, "2x8xh800", parallel, {"grouping": "pages", "call": "chunk", "queues": 1}),
    )


def _layers(parts: Parts) -> tuple[float, float]:
    """Return seconds of a handoff with a call for each layer, and with all layers in one (SGLang 9149)."""
    parallel = _sides(Side(tp=8, pp=2), Side(tp=16))
    return (
        _deepseek(parts, "8x8xh200", parallel, {"grouping": "pages", "call": "plane", "queues": 4}),
        _deepseek(parts, "8x8xh200", parallel, {"grouping": "pages", "call": "chunk", "queues": 4}),
    )


def _prompts(parts: Parts, backend: str, count: int, tokens: int, staged: bool = False) -> float:
    """Return the mean TTFT of *count* prompts of *tokens* at once, from TP 2 to TP 4 of SGLang, between nodes."""
    return parts.serve(
        "ttft_avg_s",
        *("2x8xh100", "llama-8b", backend, {}),
        parallel=_sides(Side(tp=2), Side(tp=4)),
        workload=burst(count, tokens, 16),
        kv=Kv(staging=staged),
        engine=parts.options.sglang,
    )


def _staging(count: int) -> Callable[[Parts], tuple[float, float]]:
    """Return what simulates *count* prompts in slices, and staged (SGLang 22536)."""
    return lambda parts: (_prompts(parts, "nixl", count, 128), _prompts(parts, "nixl", count, 128, staged=True))


def _engines(count: int) -> Callable[[Parts], tuple[float, float]]:
    """Return what simulates *count* prompts over Mooncake and over NIXL (SGLang 26406)."""
    return lambda parts: (_prompts(parts, "mooncake", count, 128), _prompts(parts, "nixl", count, 128))


def _polling(parts: Parts) -> tuple[float, float]:
    """Return the mean transfer as seen between forwards, and as seen when it is complete (SGLang 37766)."""

    def transfer(notify: str) -> float:
        prompts: dict[str, Any] = {
            "input_mean": 4096,
            "input_cv": 0.0,
            "output_mean": 8,
            "output_cv": 0.0,
            "load": 0.9,
        }
        return parts.serve(
            "transfer_avg_s",
            *("8xh200", "qwen3-30b", "mooncake_nvlink", {"notify": notify, "staging": False}),
            parallel=_sides(Side(tp=2), Side(tp=2)),
            workload=Workload(arrivals="poisson", count=200, **prompts),
            engine=parts.options.sglang,
        )

    return transfer("poll"), transfer("write")


def _reserved(parts: Parts) -> tuple[float, float]:
    """Return output tokens a second with 512 and with 1,024 tokens reserved for each request (SGLang 6860)."""

    def throughput(tokens: int) -> float:
        return parts.serve(
            "output_tokens_per_s",
            *("8xh200", "llama-8b", "mooncake_nvlink", {}),
            parallel=_sides(Side(tp=1, instances=4), Side(tp=1)),
            workload=burst(256, 512, 512),
            kv=Kv(pool=12 << 30),
            engine=replace(parts.options.sglang, reserved_tokens=tokens),
        )

    return throughput(512), throughput(1024)


FIGURES = (
    ReportFigure(
        report="#7236",
        says="650 to 60 ms a handoff: a blocking call for each descriptor, one batch",
        reported=650 / 60,
        assumed="2 x 8 H800 instead of 12 nodes; a descriptor a page of 64 tokens and layer; one thread; KV of bf16",
        run=_calls,
    ),
    ReportFigure(
        report="#9149",
        says="180 to 80 ms a handoff: a call for each layer, all layers in one batch",
        reported=180 / 80,
        assumed="H200 over RDMA; a descriptor a page of 64 tokens and layer; four threads; KV of bf16",
        run=_layers,
    ),
    *(
        ReportFigure(
            report="#22536",
            says=f"TTFT of {count} prompts, TP 2 to 4: sliced, staged",
            reported=before / after,
            assumed="2 x 8 H100 over RDMA, SGLang, Llama-3.1-8B, prompts of 128 tokens",
            run=_staging(count),
        )
        for count, before, after in ((1, 34, 32), (64, 226, 154), (256, 749, 355))
    ),
    *(
        ReportFigure(
            report="#26406",
            says=f"TTFT of {count} prompts, TP 2 to 4: Mooncake, NIXL with prepared descriptors",
            reported=mooncake / nixl,
            assumed="2 x 8 H100 over RDMA, SGLang, Llama-3.1-8B, prompts of 128 tokens: by the report's TP 4 to 4",
            run=_engines(count),
        )
        for count, mooncake, nixl in ((1, 127, 48), (64, 2109, 331), (128, 3674, 509))
    ),
    ReportFigure(
        report="#37766",
        says="119 to 21 ms a transfer as reported: seen between forwards, seen when complete",
        reported=119 / 21,
        assumed="8 H200 over NVLink, SGLang, Qwen3-30B-A3B, prompts of 4,096 tokens at 0.9 of what prefill can do",
        run=_polling,
    ),
    ReportFigure(
        report="#6860",
        says="20,163 to 8,810 tokens/s: 512 and 1,024 tokens reserved for each request at decode",
        reported=20163 / 8810,
        assumed="8 H200, SGLang, Llama-3.1-8B, 256 requests of 512 + 512 tokens at once, 12 GiB of KV",
        run=_reserved,
    ),
)
"""What is compared.  A report has several figures where it has several points."""


REASONS = {
    "#7236, #9149": (
        "a blocking call of Mooncake over TCP takes 46 us on two shared cores, 21 (18 to 27) more than a "
        "descriptor, of which RDMA is given 15. Beside a thread that computes in Python it waits for the "
        "interpreter and takes 1.8 to 3.2 ms, on an idle machine 2.7 to 5.5 (`benchmarks.mooncake_calls`). The "
        "67 us and 3 ms a call of the reports lie between; how busy their schedulers were they leave out. Verbs in "
        "the emulated machine tell nothing: its processors are too few for the threads of Mooncake that poll."
    ),
    "#22536, #26406": (
        "the slices of a prompt take Mooncake 91 ms, reported 89 for one prompt and 57 for each of many, where "
        "SGLang has several threads for them. They take NIXL 2 ms, reported 10. In a burst the host costs of a "
        "request, measured with single ones, hide those of NIXL: from TP 4 to 4 256 prompts take 588 ms, reported "
        "327 (#22536) and 557 (#26406)."
    ),
    "#37766": "the wait is 57 ms, reported 98, but the transfer 2.6 ms, reported 21.",
    "#6860": (
        "of requests that hold L tokens, (L + 1,024) / (L + 512) as many run with 512 reserved: never twice as "
        "many. On 8 H20, where decode is bound by compute, the factor was 1.14."
    ),
}
"""Why figures are missed, as far as it is measured."""


def run(config: Config, _: Target, progress: ShowProgress) -> Result:
    """Simulate all figures, or those of `ReportFiguresOptions.only`, and return the table.

    Each figure is two runs of ``serve`` on the model with machines and models of its own; ``hw``, ``backend`` and
    ``model`` of *config* are not used. A figure that the model does not meet is no failure.
    """
    rows = list(simulated(config, progress))
    reached = sum(row.verdict == "reached" for row in rows)
    return Result(
        summary=[
            Metric("figures", len(rows), "that reports state, as factors"),
            Metric("figures_reached", reached, f"of them, those that the model meets within a factor of {CLOSE:g}"),
        ],
        tables=[Table("Reports", dict.fromkeys(HEADS, ""), [list(row) for row in rows])],
    )


def simulated(config: Config, progress: ShowProgress) -> Iterator[FigureRow]:
    """Yield what the model says of each figure, one at a time.

    Factors are rounded to two digits, as reports have them.
    """
    options = ReportFiguresOptions.of(config)
    chosen = [one for one in FIGURES if not options.only or one.report.lstrip("#") in options.only]
    parts = Parts(config, options)
    for number, figure in enumerate(chosen):
        progress(number / len(chosen), f"{figure.report}: {figure.says}")
        before, after = figure.run(parts)
        reported, factor = round(figure.reported, 2), round(before / after, 2)
        error, said = round(factor / reported - 1, 2), verdict(reported, factor)
        yield FigureRow(figure.report, figure.says, reported, factor, error, said, figure.assumed)


def keep(rows: Iterable[FigureRow], path: Path) -> None:
    """Write *rows* to *path* as CSV, with the heads `HEADS`; `kept` reads it again."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(HEADS)
        writer.writerows(rows)


def kept() -> Iterator[FigureRow]:
    """Yield the rows of ``data/reports/figures.csv``, what the run found that the page shows.

    Raise a `FileNotFoundError` outside a checkout: data is not in the wheel.
    """
    with data("reports", "figures.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            reported, factor, error = (float(row[name]) for name in ("reported", "simulated", "error"))
            yield FigureRow(row["report"], row["figure"], reported, factor, error, row["verdict"], row["assumed"])
