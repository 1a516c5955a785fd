# SPDX-License-Identifier: Apache-2.0
"""The intervals that measured servers and transfers give to what a run says.

Predictions of `data/live` were sealed before the servers were measured, those of the public rows of
`data/benchmarks/scorecard_rows.csv` were not: the model was changed after a look at some.  A factor is what 95 of
100 values are within, predicted over measured or measured over predicted.  ``python -m tools.served`` derives them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdsim.config import Config
from pdsim.config.presets import family
from pdsim.core.units import format_time
from pdsim.transfer import TransferRecord

BLIND = {
    "pair": 0.179,
    "pair, read": 0.19,
    "bidirectional": 0.513,
    "handoff": 0.593,
    "metadata": 0.393,
    "serve": 0.089,
}
"""What 95 of 100 measurements of sealed validations deviate from their predictions, relative, by cause."""

WHOLE = ("handoff", "metadata", "serve")
"""Causes of many transfers: their blind error alone holds 95 %, and the parameters' ends would double the width."""


def cause(group: str) -> str:
    """Return which of `BLIND` the deviations of class *group* have; where several transfers share, those of two."""
    name = group if group in BLIND else group.partition(",")[0]
    return name if name in BLIND else "bidirectional"


VALIDATED = ("nvlink", "mooncake_nvlink", "nixl")
"""Choices of ``backend`` whose transfers within a node of H100 or H200 were predicted, sealed and then measured."""

_TRANSFERS = {
    "writes of a pair": "pair",
    "reads": "pair, read",
    "several at once": "bidirectional",
    "handoffs": "handoff",
}
TITLES = {"ttft_p50": "TTFT p50", "tpot_p50": "TPOT p50", "e2e_p50": "end to end p50"}
"""Metrics whose intervals a run prints; a capacity is as far off as the end-to-end time."""

MOST_TRANSFER = 0.1
"""The share of requests' time that transfers between nodes may take: none that take more were ever measured."""


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """How far predictions of *loads* of *servers* were off: by metric the factor that 95 of 100 are within."""

    servers: str
    loads: int
    factors: Mapping[str, float]

    def spans(self, metrics: Mapping[str, float | None]) -> dict[str, tuple[float, float]]:
        """Return the ends of the 95 % interval of each of *metrics*, such as ``ttft_p50_s``, that has a factor."""
        known = ((name, metrics.get(f"{name}_s"), factor) for name, factor in self.factors.items())
        return {name: (value / factor, value * factor) for name, value, factor in known if value}


SERVERS = {
    "measured": Accuracy(
        servers="vLLM and SGLang, predicted blind where such servers had been measured",
        loads=158,
        factors={
            "ttft_p50": 1.65,
            "ttft_p90": 1.81,
            "ttft_p99": 4.91,
            "tpot_p50": 1.25,
            "tpot_p99": 1.54,
            "e2e_p50": 1.29,
        },
    ),
    "table": Accuracy(
        servers="servers that were the first of their kind, half of them public and not blind",
        loads=56,
        factors={
            "ttft_p50": 2.48,
            "ttft_p90": 6.06,
            "ttft_p99": 13.89,
            "tpot_p50": 2.4,
            "tpot_p99": 1.65,
            "e2e_p50": 2.39,
        },
    ),
    "roofline": Accuracy(
        servers="public servers of MI300X and MI355X by a roofline, not blind and nearly all predicted too fast",
        loads=19,
        factors={
            "ttft_p50": 25.26,
            "ttft_p90": 55.72,
            "ttft_p99": 50.03,
            "tpot_p50": 2.12,
            "tpot_p99": 2.21,
            "e2e_p50": 2.16,
        },
    ),
}
"""By how much was measured of servers like those of a run: their kind, a table of their GPU, nothing."""


def of_servers(config: Config) -> Accuracy | None:
    """Return how far predictions like those of *config* were off; None where it models no deployment or no GPU.

    Servers of a kind were measured on H100 and H200, on at most two GPUs an engine: pairs of models of 16 bits
    without experts, and colocated ones, of vLLM also with FP8 and experts.
    """
    model, compute, gpu = config.model, config.compute, config.hw.gpu
    colocated: bool | None = getattr(config.experiment, "colocated", None)
    if config.target != "model" or gpu is None or colocated is None:
        return None
    if not compute.source or compute.measured_gpu not in ("", gpu.name):
        return SERVERS["roofline"]
    sides = (config.parallel.prefill, config.parallel.decode)[colocated:]
    kind = family(config.engine.name)
    plain = model.dtype_bytes == 2 and not model.experts and not model.mlp_dtype
    small = all(side.tp * side.pp * side.cp <= 2 for side in sides)
    known = gpu.name in ("H100", "H200") and kind in ("vllm", "sglang") and small and config.hw.nodes == 1
    return SERVERS["measured" if known and (plain or (colocated and kind == "vllm")) else "table"]


def of_transfers(config: Config, transfers: Sequence[TransferRecord]) -> list[str]:
    """Return the line about how far modelled *transfers* may be off, none where there are none or gathers alone."""
    if config.target != "model" or not any(each.operation in ("write", "read") for each in transfers):
        return []
    gpu, name = config.hw.gpu.name if config.hw.gpu else "a host", config.backend.name
    if config.hw.nodes > 1 or gpu not in ("H100", "H200") or name not in VALIDATED:
        where = "between nodes" if config.hw.nodes > 1 else f"on {gpu}"
        return [f"95 % interval: not known, no transfers of {name} {where} were predicted and then measured"]
    off = ", ".join(f"{kind} {100 * BLIND[key]:.0f} %" for kind, key in _TRANSFERS.items())
    return [f"95 % interval: {off}, as sealed predictions of {', '.join(VALIDATED)} on H100 and H200 were off"]


def line(accuracy: Mapping[str, Any], metrics: Mapping[str, Any], *, between: bool) -> str:
    """Return the line about *accuracy*, of `Accuracy` as kept in run.json, for the latencies in *metrics*.

    There is no interval for transfers *between* nodes that take more than `MOST_TRANSFER` of the time.
    """
    if between and (metrics.get("share_transfer") or 0.0) > MOST_TRANSFER:
        return "95 % interval: not known, for no server was measured whose transfers between nodes take so long"
    spans = Accuracy(**accuracy).spans(metrics)
    texts = [f"{TITLES[name]} {span(spans[name])}" for name in TITLES if name in spans]
    return f"95 % interval: {', '.join(texts)}, by {accuracy['loads']} loads of {accuracy['servers']}"


def span(ends: tuple[float, float]) -> str:
    """Return *ends*, of seconds, for people.

    >>> span((0.0124, 0.019))
    '12.4 to 19 ms'
    """
    low, high = (format_time(end) for end in ends)
    unit = high.partition(" ")[2]
    return f"{low.removesuffix(f' {unit}')} to {high}"
