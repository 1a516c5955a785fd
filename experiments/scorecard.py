# SPDX-License-Identifier: Apache-2.0
"""Predict whole servers that others measured, and how far off that is: ``pdsim validate --against inferencex FILE``.

FILE has rows as InferenceX (https://github.com/SemiAnalysisAI/InferenceX, ``utils/process_result.py``) writes them:
DeepSeek-R1 in a closed loop of ``conc`` users, lengths 0.8 to 1 times ISL and OSL, ten requests a user.  Everything
but what its launch scripts say (`LAUNCH`) is pdsim's default.  No number of pdsim is fitted to such rows, but the
model was changed after a look at some: a GPU of `SEEN` counts as in-sample.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np

from experiments.serve import ServeOptions, job, on_model
from pdsim.config import Config, ExperimentOptions
from pdsim.config.compose import compose
from pdsim.core.errors import ConfigError
from pdsim.core.files import table
from pdsim.core.progress import ShowProgress
from pdsim.results.record import Metric, Result, Table
from pdsim.serving.requests import RequestTable

TARGETS = ("model",)
SEEN = ("h200", "b200", "mi300x", "mi355x")
"""GPUs whose rows were looked at while the model was made."""
ENGINES = {"sglang": "sglang", "dynamo-sglang": "sglang", "mori-sglang": "sglang"}
"""Choices of ``engine`` by the rows' ``framework``; others are left out."""
MODELS = {"fp8": "deepseek-v3", "fp4": "deepseek-r1-fp4"}
"""Choices of ``model`` by the rows' ``precision``."""
FP8_GEMM = "compute.fp8_gemm=flashinfer_trtllm"  # SGLANG_ENABLE_FLASHINFER_GEMM
LAUNCH: dict[tuple[str | int, ...], tuple[str, ...]] = {
    ("h200", "fp8"): ("scheduler.chunk=32768", "scheduler.memory_fraction=0.82", "model.kv_dtype=bf16"),
    ("b200", "fp8"): ("scheduler.chunk=32768", "scheduler.memory_fraction=0.82", FP8_GEMM),
    ("b200", "fp8", 8): (
        "scheduler.chunk=32768", "scheduler.memory_fraction=0.82", "scheduler.decode_batch=128", FP8_GEMM,
    ),
    ("b200", "fp8", 4): (
        "scheduler.chunk=8192", "scheduler.memory_fraction=0.95", "scheduler.decode_batch=32", FP8_GEMM,
    ),
    ("b200", "fp4"): ("scheduler.chunk=16384", "scheduler.memory_fraction=0.85"),
    ("mi355x", "fp4"): ("model.mlp_dtype=mxfp4", "scheduler.memory_fraction=0.8"),
}  # fmt: skip
"""What the scripts of InferenceX start servers with (``benchmarks/dsr1_*.sh``), colocated ones also by their TP."""
ROUTER = "experiment.router=random"
"""Of Dynamo as srt-slurm starts it: nginx and up to ten frontends send requests in turn, each by itself (Dynamo,
``--router-mode``; srt-slurm, ``nginx.conf.j2`` and ``num_additional_frontends``), and none knows a server's load."""
WARMED = "2026-01-21"
"""Date since which the client sends each server two requests a user first (its commit d053ae24)."""
COMPILING = 75.0
"""Seconds for which a B200 that was not warmed compiles the attention of its first step that goes on with a prompt.

SGLang's trtllm_mla compiles kernels at first use (its pull request 37525, where one takes 6 s).  In-sample: in the
rows eight servers stood still for 67 to 82 s.
"""
STANDSTILL = 10.0
"""Seconds that a measured p99 of TTFT is above the predicted one where a server stood still: a first kernel of its
kind is compiled or tuned, for more than a minute on B200, and the output of a run of some minutes is halved."""
METRICS = {"output": "output_tput_per_gpu", "tpot": "median_tpot", "ttft": "median_ttft"}
COLUMNS = (
    *("hardware", "framework", "precision", "spec_method", "disagg", "isl", "osl", "conc", *METRICS.values()),
    *(f"{side}_{name}" for side in ("prefill", "decode") for name in ("tp", "ep", "dp_attention", "num_workers")),
)
"""What a file has to have."""
TAILS = {f"{name} p{tail}": f"p{tail}_{name}" for tail in (90, 99) for name in ("tpot", "ttft")}
"""Columns that not all rows have."""
STRICT = {"strict SLO": (1.0, 0.02)}
"""A second SLO, beside `slo`: seconds of TTFT and of TPOT."""


@dataclass(frozen=True, kw_only=True)
class ScorecardOptions(ExperimentOptions):
    """Which rows are predicted."""

    name: str = "scorecard"
    files: tuple[str, ...] = ()  # of rows, CSV
    gpus: tuple[str, ...] = ()  # of them only those of these GPUs, such as h200; none: all
    rounds: int = 10  # requests of each user; InferenceX has 10


class Server(NamedTuple):
    """A measured server: the columns that describe how it was started."""

    hardware: str
    framework: str
    precision: str
    disagg: str
    prefill: tuple[int, int, str, int]  # tp, ep, whether attention is data-parallel, workers
    decode: tuple[int, int, str, int]
    isl: int
    osl: int

    @classmethod
    def of(cls, row: Mapping[str, str]) -> Server:
        """Return the server of *row*."""
        prefill, decode = (
            (
                int(row[f"{side}_tp"]),
                int(row[f"{side}_ep"]),
                row[f"{side}_dp_attention"],
                int(row[f"{side}_num_workers"]),
            )
            for side in ("prefill", "decode")
        )
        head = row["hardware"], row["framework"], row["precision"], row["disagg"]
        return cls(*head, prefill, decode, int(row["isl"]), int(row["osl"]))

    @property
    def layout(self) -> str:
        """Its parallelism, as in the table."""
        if self.disagg != "True":
            return f"tp{self.prefill[0]}"
        return "+".join(f"{workers}x{tp}" for tp, _, _, workers in (self.prefill, self.decode))

    @property
    def decode_gpus(self) -> int:
        """The GPUs by which the output is divided."""
        return self.decode[0] * max(1, self.decode[3])

    def words(self) -> list[str]:
        """Return the overrides that choose it."""
        own = [f"engine={ENGINES[self.framework]}", f"model={MODELS[self.precision]}", "experiment=serve"]
        by_tp = (self.hardware, self.precision, self.prefill[0])
        own += LAUNCH.get(by_tp if self.disagg != "True" and by_tp in LAUNCH else by_tp[:2], ())
        for side, (tp, ep, attention, _) in (("prefill", self.prefill), ("decode", self.decode)):
            dp = tp if attention == "True" else 1
            ep = tp if (self.hardware, self.precision, self.disagg) == ("b200", "fp4", "False") else ep
            own += [f"parallel.{side}.tp={tp}", f"parallel.{side}.dp={dp}", f"parallel.{side}.ep={ep}"]
        if self.disagg != "True":
            own += ["experiment.deployment=colocated", "experiment.engines=1"]
            return [f"hw=8x{self.hardware}", *own, "parallel.decode.instances=1"]
        gpus = sum(tp * workers for tp, _, _, workers in (self.prefill, self.decode))
        own += [f"parallel.prefill.instances={self.prefill[3]}", f"parallel.decode.instances={self.decode[3]}"]
        if self.framework == "dynamo-sglang":
            own.append(ROUTER)
        return [f"hw=2x8x{self.hardware}", f"hw.nodes={-(-gpus // 8)}", *own]


def run(config: Config, target: Any, progress: ShowProgress) -> Result:  # noqa: ARG001
    """Predict the rows of the files and compare."""
    options = ScorecardOptions.of(config)
    measured_servers, left_out = servers(options.files, options.gpus)
    rows: list[list[Any]] = []
    errors: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    output: dict[tuple[Any, ...], list[tuple[float, float]]] = defaultdict(list)
    for number, ((server, users), measured) in enumerate(measured_servers.items()):
        progress(number / len(measured_servers), f"{server.hardware} {server.layout} {users}")
        try:
            made = predicted(server, users, options.rounds, config.seed, was_cold(measured))
        except ConfigError as error:
            left_out[str(error).splitlines()[0].partition(";")[0]] += 1
            continue
        kind = "disaggregated" if server.disagg == "True" else "colocated"
        line: list[Any] = [server.hardware, server.precision, kind, server.layout, server.isl, server.osl, users]
        real = medians(measured)
        steady = real.get("ttft p99", 0.0) < made["ttft p99"] + STANDSTILL
        for which in (kind, f"{kind}, steady") if steady else (kind,):
            output[which, server.hardware, server.isl, server.osl, users].append((made["output"], real["output"]))
            own = errors[which, server.hardware]
            for name in real:
                own[name].append(made[name] / real[name] - 1.0)
            if set(TAILS) <= set(real):
                for name, (ttft, tpot) in {"SLO": (config.slo.ttft, config.slo.tpot), **STRICT}.items():
                    meets = [times["ttft p90"] <= ttft and times["tpot p90"] <= tpot for times in (made, real)]
                    own[name].append(float(meets[0] == meets[1]))
        for name in METRICS:
            line += [1e3 * real[name] if name != "output" else real[name], 100 * (made[name] / real[name] - 1.0)]
        line += [100 * (made[name] / real[name] - 1.0) if name in real else None for name in TAILS]
        spread = [float(row["output_tput_per_gpu"]) for row in measured]
        rows.append([*line, 100 * (max(spread) / min(spread) - 1.0)])
    heads = ("gpu", "precision", "servers", "layout", "isl", "osl", "users")
    columns = dict.fromkeys(heads, "") | {
        "output/s": "tokens a second and decode GPU, measured", "output %": "predicted over measured, less 1",
        "tpot ms": "measured median", "tpot %": "", "ttft ms": "", "ttft %": "",
    } | dict.fromkeys((f"{name} %" for name in TAILS), "") | {"dates %": "between dates, of output"}  # fmt: skip
    return Result(
        served=True,
        summary=(Metric("servers", len(rows), "configurations and concurrencies"),),
        tables=[_summary(errors, output), Table("Servers", columns, rows)],
        notes=[f"left out: {count} of {why}" for why, count in left_out.items()],
    )


def _summary(errors: Mapping[Any, Mapping[str, Sequence[float]]], output: Mapping[Any, Sequence[Any]]) -> Table:
    rows = []
    for (kind, gpu), own in sorted(errors.items()):
        every = errors[kind.removesuffix(", steady"), gpu]
        if own is not every and len(own["output"]) == len(every["output"]):
            continue  # none stood still
        regret = [
            max(real for _, real in each) / max(each)[1] - 1.0
            for (of, where, *_), each in output.items()
            if (of, where) == (kind, gpu) and len(each) > 1
        ]
        cells = [100 * mean(map(abs, own[name])) if own[name] else None for name in (*METRICS, *TAILS)]
        rows.append([kind, gpu, "in-sample" if gpu in SEEN else "blind", len(own["output"]), *cells,
                     *(100 * mean(own[name]) if own[name] else None for name in ("SLO", *STRICT)),
                     100 * mean(regret) if regret else None])  # fmt: skip
    heads = {
        "servers": f"steady: without those that stood still {STANDSTILL:g} s or more",
        "gpu": "", "rows are": "", "count": "",
        "output %": "mean absolute error", "tpot %": "", "ttft %": "", **{f"{name} %": "" for name in TAILS},
        "SLO %": "of servers, pdsim says rightly whether the p90 of both meet `slo`",
        **{f"{name} %": f"the same of {ttft:g} s and {1e3 * tpot:g} ms" for name, (ttft, tpot) in STRICT.items()},
        "regret %": "output lost by taking pdsim's best of the measured layouts",
    }  # fmt: skip
    return Table("Errors", heads, rows)


def servers(
    files: Sequence[str], gpus: Sequence[str] = ()
) -> tuple[dict[tuple[Server, int], list[dict[str, str]]], dict[str, int]]:
    """Return the rows of *files* by server and number of users, and how many were left out, by why.

    Only those of *gpus*, if any are named.
    """
    rows: dict[tuple[Server, int], list[dict[str, str]]] = defaultdict(list)
    left_out: dict[str, int] = defaultdict(int)
    for row in (row for name in files for row in _read(name)):
        if gpus and row["hardware"] not in gpus:
            continue
        if row["framework"] not in ENGINES:
            left_out[row["framework"]] += 1
        elif row["spec_method"] != "none":
            left_out["rows with speculative decoding"] += 1
        elif not all(row[column] for column in METRICS.values()):
            left_out["rows without a median"] += 1
        else:
            rows[Server.of(row), int(row["conc"])].append(row)
    return rows, left_out


def _read(name: str) -> list[dict[str, str]]:
    way_out = "name a CSV file of InferenceX"
    _, rows = table(Path(name), way_out)
    if absent := [column for column in COLUMNS if column not in rows[0]]:
        raise ConfigError(f"{name} has no column {' or '.join(absent)}; {way_out}")
    return rows


def medians(rows: Sequence[Mapping[str, str]]) -> dict[str, float]:
    """Return the median over dates of each of `METRICS` and `TAILS` that *rows* have: seconds, tokens a second."""
    return {
        name: median(known)
        for name, column in (METRICS | TAILS).items()
        if (known := [float(row[column]) for row in rows if row.get(column)])
    }


_TAILS = {"": 0.5, " p90": 0.9, " p99": 0.99}


def _launched(server: Server, users: int, cold: bool) -> list[str]:
    # --scheduler-recv-interval of dsr1_*_b200.sh, and what that server's attention does
    if server.hardware != "b200" or server.disagg == "True":
        return []
    tp, _, attention, _ = server.prefill
    look = 30 if users >= 16 and (tp, server.precision) != (4, "fp8") else 10
    own = [f"engine.look={look}"] if attention != "True" else ["engine.look=1", "scheduler.chunk=32768"]
    return [*own, f"engine.compiling={COMPILING if cold else 0.0}s"]


def was_cold(rows: Sequence[Mapping[str, str]]) -> bool:
    """Return whether most servers of *rows* were not warmed."""
    return sum(row.get("date", WARMED) < WARMED for row in rows) > len(rows) / 2


def closed_loop(server: Server, users: int, rounds: int, seed: int) -> RequestTable:
    """Return the requests of *users* who send *rounds* each, the next when one ends."""
    drawn = np.random.default_rng(seed)
    count = users * rounds
    lengths = [np.rint(size * drawn.uniform(0.8, 1.0, count)).astype(np.int64) for size in (server.isl, server.osl)]
    after = np.arange(count) - users
    return RequestTable(np.zeros(count), *lengths, after=np.where(after < 0, -1, after))


def predicted(server: Server, users: int, rounds: int, seed: int, cold: bool = False) -> dict[str, float]:
    """Return output a second and decode GPU, and quantiles of TPOT and TTFT, of *server* with so many *users*.

    A *cold* one has served nobody before.
    """
    config = compose([*server.words(), *_launched(server, users, cold)])
    requests = closed_loop(server, users, rounds, seed)
    rows = on_model(config, job(config, ServeOptions.of(config)), requests).requests
    seconds = float(np.nanmax(np.asarray(rows["arrival"]) + np.asarray(rows["e2e"])))
    made = {"output": float(requests.output.sum()) / seconds / server.decode_gpus}
    for name in ("tpot", "ttft"):
        known = np.asarray(rows[name], float)
        made |= {f"{name}{each}": float(np.nanquantile(known, at)) for each, at in _TAILS.items()}
    return made
