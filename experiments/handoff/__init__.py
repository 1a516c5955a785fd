# SPDX-License-Identifier: Apache-2.0
"""Hand KV over, one request at a time: token counts x tensor parallelism on both sides x path x metadata.

The system is that of `experiments.serve`, whose forwards take no time here.  Each way of handing over is a job, in
which the shapes follow one another.  What is measured is the protocol and the engine alone: no queue, no other
transfer, no batch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated, Any, NamedTuple

from experiments import serve
from experiments.jobs import Columns, attempt, combined, microseconds, refuse, tabulated, unverified
from pdsim.compute.roofline import kv_shape
from pdsim.config import Config, ExperimentOptions
from pdsim.core.errors import ConfigError
from pdsim.core.progress import ShowProgress
from pdsim.core.units import NotNegativeInt, PositiveInt, Seconds
from pdsim.kv.messages import ROUTER, index_of
from pdsim.models.llm import Parallel, Side
from pdsim.results.record import Metric, Result, percentile
from pdsim.serving.workload import Request
from pdsim.transfer import TransferRecord
from pdsim.transfer.job import Outcome, Place, RankSpec, Target

PATHS = ("sliced", "staged")
METADATA: dict[str, dict[str, str]] = {
    "policy": {},
    "data": {"metadata": "write", "metadata_memory": "device"},
    "control": {"metadata": "control", "metadata_memory": "host"},
}
"""Path and memory of first-token metadata: as the backend's policy says; in device memory, in a write of its own; in
host memory, as a message."""


def sides(text: object) -> str:
    """Return *text*, the ranks of prefill and of decode.  Raise a `ValueError` unless it is such as ``1to2``."""
    if not re.fullmatch(r"[1-9]\d*to[1-9]\d*", str(text)):
        raise ValueError(f"{text!r} is not a pair of numbers of ranks; write one such as 1to2")
    return str(text)


@dataclass(frozen=True, kw_only=True)
class HandoffOptions(ExperimentOptions):
    """Which KV is transferred, and how."""

    name: str = "handoff"
    tokens: Annotated[tuple[PositiveInt, ...], "non-empty"] = (512, 2048, 8192)  # of a handoff
    tp: tuple[Annotated[str, sides], ...] = ("1to2", "2to1", "2to2")  # ranks of prefill, ranks of decode
    # between ranks that keep other heads; equal ones have a single path
    paths: tuple[Annotated[str, "one of sliced, staged"], ...] = PATHS
    # of the backend; or data: a write of the engine; control: over TCP
    metadata: tuple[Annotated[str, "one of policy, data, control"], ...] = ("policy",)
    repeat: PositiveInt = 5  # measured handoffs of each shape
    warmup: NotNegativeInt = 1  # before them, of each shape
    verify: bool = True  # compare the contents of those before, where memory has any
    # a GPU for each rank; or "sides": prefill shares the first half of them, decode the rest
    placement: Annotated[str, "one of packed, sides"] = "packed"
    deadline: Annotated[Seconds, "> 0"] = 60.0  # assumed: of silence, after which a rank counts as gone

    @property
    def warm(self) -> int:
        """The number of `requests`, the first ones, that are not measured."""
        return len(self.tokens) * self.warmup

    def ways(self) -> list[Way]:
        """Return the ways of the handoff; ranks with equal heads have only one path."""
        ways: dict[Way, None] = {}
        for tp, path, metadata in product(self.tp, self.paths, self.metadata):
            prefill, decode = map(int, tp.split("to"))
            ways[Way(prefill, decode, "whole" if prefill == decode else path, metadata)] = None
        return list(ways)

    def requests(self) -> list[Request]:
        """Return one job's requests: first those that are compared, then those that are measured, by shape.

        Each comes when the one before is over, so one is under way at a time.
        """
        counts = [*self.tokens * self.warmup, *(tokens for tokens in self.tokens for _ in range(self.repeat))]
        return [Request(0.0, tokens, 1, after=number - 1) for number, tokens in enumerate(counts)]


class Way(NamedTuple):
    """The handoff of a job: its ranks, its path, and its metadata by a key of `METADATA`."""

    prefill: int  # tensor-parallel ranks
    decode: int
    path: str  # "sliced", "staged", or "whole" where both sides keep equal heads
    metadata: str

    @property
    def tp(self) -> str:
        """Such as ``"1to2"``."""
        return f"{self.prefill}to{self.decode}"

    @property
    def label(self) -> str:
        """Such as ``"1to2 staged"``."""
        return f"{self.tp} {self.path}{'' if self.metadata == 'policy' else f' metadata {self.metadata}'}"


def check(config: Config) -> Iterator[str]:
    """Yield each problem: a model that cannot be divided, too few GPUs, small pools, no staged path."""
    options = HandoffOptions.of(config)
    longest = max(options.tokens)
    if longest + 1 > config.model.context:
        yield (
            f"experiment.tokens={longest} and the first token exceed model.context={config.model.context}; lower "
            "experiment.tokens, or take another model"
        )
    total, packed = config.hw.nodes * config.hw.gpus, options.placement == "packed"
    ways = options.ways()
    if wide := dict.fromkeys(way.tp for way in ways if packed and total and way.prefill + way.decode > total):
        fits = [tp for tp in options.tp if tp not in wide] or ["1to1"]
        yield (
            f"experiment.tp={','.join(wide)} needs more than the {total} GPUs of hw={config.hw.name}; set "
            f"experiment.tp=[{','.join(fits)}], or choose a larger hw"
        )
    for way in (way for way in ways if way.tp not in wide):
        if way.path == "staged" and not config.policy.staging:
            yield f"{way.label}: backend={config.backend.name} has no staged path; set experiment.paths=[sliced]"
            continue
        try:
            specs(config, options, way)
        except (ConfigError, ValueError) as error:
            yield f"{way.label}: {error}"


def run(config: Config, target: Target, progress: ShowProgress) -> Result:
    """Run the handoff in every way and return the times.

    Raise a `ConfigError` if `check` finds something, a `BackendUnavailable` if the engine does not work here at all.
    """
    refuse(check(config))
    options = HandoffOptions.of(config)
    rows: list[HandoffRow] = []
    outcomes: dict[str, Outcome] = {}
    for number, way in enumerate(options.ways()):
        progress(number / len(options.ways()), way.label, (number + 1) / len(options.ways()))
        outcomes[way.label] = attempt(target, specs(config, options, way), ROUTER, first=not outcomes)
        rows += _rows(options, way, outcomes[way.label])
    progress(1.0, "")
    return combined(
        outcomes,
        summary=_metrics(rows),
        tables=[
            tabulated("Handoffs", {**_WHO, **_WHOLE}, rows),
            tabulated("Stages of a handoff", {**_WHO, **_STAGES}, rows),
        ],
        failures=(f"{row.way} {row.tokens} tokens: {row.status}" for row in rows if row.status != "ok"),
        notes=unverified(config) or [f"contents of the first {options.warm} requests of each job were compared"],
    )


def specs(config: Config, options: HandoffOptions, way: Way) -> list[RankSpec]:
    """Return the ranks of the handoff *way*.

    Raise a `ConfigError` or a `ValueError` if there can be none.
    """
    own = _as(config, options, way)
    what = serve.job(own, serve.ServeOptions(deadline=options.deadline))
    serve.check_fits(what, options.requests())
    if options.placement == "packed":
        return serve.specs(own, what, options.requests())
    # on hosts, which any number of ranks fits, and then moved
    hosts = replace(own, hw=replace(own.hw, gpus=0, gpu=None))
    ranks = serve.specs(hosts, what, options.requests())
    return [replace(rank, place=_side(rank.name, config.hw.gpus)) for rank in ranks]


def _side(rank: str, gpus: int) -> Place:
    if rank == ROUTER or not gpus:
        return Place()
    first, count = (0, gpus // 2 or 1) if rank.startswith("prefill") else (gpus // 2, gpus - gpus // 2)
    return Place(0, first + index_of(rank) % count)


def _as(config: Config, options: HandoffOptions, way: Way) -> Config:
    # The pool holds the longest request twice, unless the configuration says otherwise; forwards take no time.
    metadata: dict[str, Any] = {**METADATA[way.metadata]}
    tokens = max(options.tokens) + 2 * config.kv.page_size
    largest = tokens * kv_shape(config.model).token_bytes(min(way.prefill, way.decode))
    kv = replace(
        config.kv,
        pool=config.kv.pool or 2 * largest,
        staging=way.path == "staged",
        staging_ring=min(config.kv.staging_ring, 4 * largest),  # with one request under way, more is never used
        checked=options.warm if options.verify else 0,
    )
    return replace(
        config,
        kv=kv,
        parallel=Parallel(prefill=Side(tp=way.prefill), decode=Side(tp=way.decode)),
        policy=replace(config.policy, **metadata),
        compute=replace(config.compute, scale=0.0),
    )


STAGES = {
    "handoff": "from the end of the prefill forward to success at decode: KV and metadata on all ranks",
    "reserve": "before the handoff: from decode pages reserved until prefill has their numbers",
    "plan": "until the first write is posted: descriptors built or, if staged, the first chunk gathered",
    "wire": "from the first post to the last completion that a prefill rank sees",
    "finish": "from then to success: notification, scatter if staged, count of the decode scheduler",
}


@dataclass(frozen=True)
class HandoffRow:
    """The measured handoffs of one shape, in one way."""

    way: str
    tokens: int
    nbytes: int  # of all writes of one handoff, KV and metadata
    descriptors: int  # likewise
    times: dict[str, list[float]]  # seconds of each of `STAGES`, one for each handoff
    path: str  # that the bytes took
    status: str  # "ok", or why the first of them failed

    @property
    def rate(self) -> float | None:
        """GB/s of the median handoff."""
        median = percentile(self.times["handoff"], 50.0)
        return self.nbytes / median / 1e9 if median else None


def _rows(options: HandoffOptions, way: Way, outcome: Outcome) -> Iterator[HandoffRow]:
    # Requests are told apart by their number of tokens.  A job without a router's result has rows with its error.
    router, requests = outcome.ranks[ROUTER], options.requests()
    value = router.value or {"rows": [["", "", 0, router.error or "lost", *[None] * 8]] * len(requests)}
    records: dict[int, list[TransferRecord]] = {}
    for rank in outcome.ranks.values():
        for record in rank.transfers:
            number = (int(record.label.partition("/")[0]) - 1) % len(requests)
            records.setdefault(number, []).append(record)
    for tokens in dict.fromkeys(options.tokens):
        mine = [number for number, request in enumerate(requests) if request.input == tokens]
        ends = {number: value["rows"][number] for number in mine}
        errors = [str(end[3]) for end in ends.values() if end[3] != "ok"]
        times: dict[str, list[float]] = {stage: [] for stage in STAGES}
        for number in (number for number in mine if number >= options.warm and ends[number][3] == "ok"):
            for stage, seconds in _stages(ends[number][4:], records[number]).items():
                times[stage].append(seconds)
        last = records.get(mine[-1], [])
        paths = {record.label.rpartition("/")[2] for record in last}
        nbytes, descriptors = (sum(getattr(record, part) for record in last) for part in ("nbytes", "descriptors"))
        path = "+".join(sorted(paths - {"metadata"} or paths))
        yield HandoffRow(way.label, tokens, nbytes, descriptors, times, path, errors[0] if errors else "ok")


def _stages(stamps: Sequence[Any], records: Sequence[TransferRecord]) -> dict[str, float]:
    reserved, noticed, started, _, arrived = map(float, stamps[:5])
    first = min(record.submitted for record in records)
    last = min(arrived, max(record.seen for record in records))  # the target may be told before the source
    return {
        "handoff": arrived - started,
        "reserve": noticed - reserved,
        "plan": first - started,
        "wire": last - first,
        "finish": arrived - last,
    }


def _at(q: float, stage: str = "handoff") -> Callable[[HandoffRow], float | None]:
    return lambda row: microseconds(row.times[stage], q)


_WHO: Columns[HandoffRow] = {
    "way": ("ranks of prefill to ranks of decode, and the path between other heads", lambda row: row.way),
    "tokens": ("of the request", lambda row: row.tokens),
}
_WHOLE: Columns[HandoffRow] = {
    "path": ("path of the KV", lambda row: row.path),
    "bytes": ("KV and metadata", lambda row: row.nbytes),
    "descriptors": ("of all writes", lambda row: row.descriptors),
    "n": ("handoffs measured", lambda row: len(row.times["handoff"])),
    "p25 us": (f"first quartile of the time {STAGES['handoff']}", _at(25.0)),
    "p50": ("median of that", _at(50.0)),
    "p75": ("third quartile of that", _at(75.0)),
    "GB/s": ("bytes / median, 1 GB = 1e9 bytes", lambda row: row.rate),
    "status": ("ok, or why a handoff failed", lambda row: row.status),
}
_STAGES: Columns[HandoffRow] = {
    f"{stage} us": (f"median of: {definition}", _at(50.0, stage)) for stage, definition in STAGES.items()
}


def _metrics(rows: Sequence[HandoffRow]) -> list[Metric]:
    rates = [row.rate for row in rows if row.rate is not None]
    return [
        Metric("shapes", len(rows), "token counts x ways of transfer"),
        Metric("shapes_failed", sum(row.status != "ok" for row in rows), "shapes with a failed handoff"),
        Metric("handoffs", sum(len(row.times["handoff"]) for row in rows), "measured handoffs that succeeded"),
        Metric("rate_max_gbs", max(rates, default=None), "highest rate of a median handoff, 1 GB = 1e9 bytes"),
    ]
