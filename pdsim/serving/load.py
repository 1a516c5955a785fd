# SPDX-License-Identifier: Apache-2.0
"""The load that a workload offers to a deployment, in closed form: known before anything is simulated.

A side's offered load is the time that its instances need for the requests of one second, over their number.  Work is
counted as a saturated engine does it: full prefill chunks, decode batches as large as memory allows.  So a load
above 1 cannot be served whatever the order of arrival, and what is below 1 may still miss a latency.

Left out, and therefore optimistic: prefill pages that wait for their transfer, links, the unequal share that a
router gives each instance, and users who leave.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import fsum, inf, isfinite

from pdsim.core.errors import ConfigError
from pdsim.serving.deployment import Deployment
from pdsim.serving.policies import handoff_of
from pdsim.serving.requests import Request, RequestTable, stream
from pdsim.serving.settings import Workload
from pdsim.serving.steps import iteration_seconds

WARNING = 0.9
"""The offered load from which on a reader is warned: queues of random arrivals are long from here."""


@dataclass(frozen=True, kw_only=True)
class OfferedLoad:
    """Work a second over what can be done in a second, of both sides: 1 is saturation."""

    prefill: float
    decode: float
    rate: float  # requests a second: the gaps between arrivals, over their sum
    decode_batch: int  # requests in a decode iteration at saturation
    together: bool = False  # the same engines prefill and decode

    @property
    def highest(self) -> float:
        """The load of the busier side; of both where the same engines do both."""
        return self.prefill + self.decode if self.together else max(self.prefill, self.decode)

    def at_most(self, workload: Workload) -> str:
        """Return the setting of *workload* at which the busier side has a load of 1: ``workload.speed=0.042``."""
        if not self.highest:
            return "any rate"
        if workload.tenants:
            return f"{self.rate / self.highest:.3g} requests/s of all tenants"
        if workload.trace is None and workload.arrivals != "embedded":
            return f"workload.rate={self.rate / self.highest:.3g}"
        if workload.load:
            return "workload.load=1"
        return f"workload.speed={workload.speed / self.highest:.3g}"

    def line(self, workload: Workload) -> str:
        """Return the load of both sides and the highest setting that can be served, in a sentence."""
        sides = (f"{name} {_percent(load)}" for name, load in (("prefill", self.prefill), ("decode", self.decode)))
        verdict = "; overloaded, latencies measure the queue" if self.highest > 1 else ""
        most = self.at_most(workload)
        return f"load: {', '.join(sides)} of capacity{verdict}; transfers aside, at most {most} can be served"

    def warning(self, workload: Workload) -> str:
        """Return what is wrong with so high a load; nothing below `WARNING`."""
        if self.highest < WARNING:
            return ""
        side = "the engine" if self.together else "prefill" if self.prefill >= self.decode else "decode"
        if self.highest < 1:
            return (
                f"warning: near capacity: {side} is offered {self.highest:.3g} of what it can serve, so latencies "
                f"vary much from run to run; set workload.load=0.7, or add instances"
            )
        return (
            f"warning: overloaded: {side} is offered {self.highest:.3g} times what it can serve, so latencies "
            f"measure how long the queue has grown; set workload.load=0.7, at most {self.at_most(workload)}, or "
            f"add instances"
        )

    def plain(self, workload: Workload) -> dict[str, float | int | str]:
        """Return what ``run.json`` keeps."""
        return {
            "prefill": self.prefill,
            "decode": self.decode,
            "rate": self.rate,
            "decode_batch": self.decode_batch,
            "at_most": self.at_most(workload),
        }


def _percent(load: float) -> str:
    return f"{100 * load:.0f} %" if load >= 0.1 else f"{100 * load:.2g} %"


def offered_load(job: Deployment, requests: Sequence[Request]) -> OfferedLoad | None:
    """Return the load that *requests* offer to *job*; None if they arrive all at once or wait for each other."""
    requests = RequestTable.of(requests)
    if requests.after is not None and (requests.after >= 0).any():
        return None
    span = requests[-1].arrival - requests[0].arrival if requests else 0.0
    if not (span > 0 and isfinite(span)):
        return None
    rate = (len(requests) - 1) / span
    share = rate / len(requests)  # of all work, a second
    decoding = _Decoding.of(job, requests)
    batch = decoding.batch(job) if decoding.steps else job.decode_batch
    seconds = decoding.steps / batch * decoding.step(job, batch) + decoding.held_up if decoding.steps else 0.0
    return OfferedLoad(
        prefill=share * fsum(prefill_iterations(job, requests.input.tolist())) / len(job.prefills),
        decode=share * seconds / len(job.decodes),
        rate=rate,
        decode_batch=batch,
        together=job.colocated,
    )


def prefill_iterations(job: Deployment, prompts: Iterable[int]) -> Iterator[float]:
    """Yield the seconds of each iteration of a prefill instance whose queue holds *prompts*, in tokens, in order.

    As `pdsim.serving.prefill` does with ``engine.scheduler=fcfs``; the host's time is included.
    """
    host, overlap = job.engine.prefill, job.engine.overlap
    pieces: list[tuple[int, int]] = []
    budget, held_up = job.chunk, 0.0
    for prompt in prompts:
        done = 0
        held_up += host.admit + host.admit_token * prompt
        while done < prompt:
            tokens = min(budget, prompt - done)
            pieces.append((done, tokens))
            done += tokens
            budget -= tokens
            if not budget or len(pieces) == job.prefill_batch:
                yield iteration_seconds(job.prefill_seconds(pieces), host.launch, host.step, overlap) + held_up
                pieces, budget, held_up = [], job.chunk, 0.0
    if pieces:
        yield iteration_seconds(job.prefill_seconds(pieces), host.launch, host.step, overlap) + held_up


@dataclass(frozen=True)
class _Decoding:
    """What requests ask of decode, summed over all steps of all of them."""

    steps: float
    tokens: float  # of context, read in all steps
    pages: float  # held, in all steps
    before: float  # pages times seconds of prefill, for which they are held already
    held_up: float  # seconds that admissions keep the batch waiting

    @classmethod
    def of(cls, job: Deployment, requests: RequestTable) -> _Decoding:
        engine, reserved = job.engine, not handoff_of(job.engine).serial
        steps = tokens = 0
        pages = before = held_up = 0.0
        alone: dict[int, float] = {}  # by the tokens of a prompt: seconds of its own prefill
        for prompt, output in zip(requests.input.tolist(), requests.output.tolist(), strict=True):
            own = output - 1 + engine.recompute
            last = prompt + (own // 2 if engine.memory == "grow" else output)
            size = job.page_count(last)
            steps += own
            tokens += own * (prompt + 1 - engine.recompute) + own * (own - 1) // 2
            pages += own * size
            held_up += engine.decode.admit + engine.decode.admit_token * prompt
            if reserved:
                if prompt not in alone:
                    alone[prompt] = fsum(prefill_iterations(job, [prompt]))
                before += size * alone[prompt]
        each = engine.tokens_a_step
        return cls(steps / each, tokens / each, pages / each, before, held_up)

    def step(self, job: Deployment, batch: int) -> float:
        host = job.engine.decode
        base = iteration_seconds(
            job.engine.decode_step(job.decode_time, batch), host.launch, host.step, job.engine.overlap
        )
        context = self.tokens / self.steps
        return base + max(job.decode_time.context_of(batch) * batch * context, job.decode_time.sequence * context)

    def batch(self, job: Deployment) -> int:
        # Pages are held while a request decodes and, where decode reserves them first, as long as its own prefill
        # takes.
        limit = min(job.decode_batch, job.state_slots) if job.shape.state.mamba else job.decode_batch
        low, high = 1, limit  # pages grow with the batch
        while low < high:
            middle = (low + high + 1) // 2
            held = middle * (self.pages + self.before / self.step(job, middle)) / self.steps
            low, high = (middle, high) if held <= job.decode_pages else (low, middle - 1)
        return low


def decode_rate(job: Deployment, requests: Sequence[Request], tpot: float) -> tuple[float, float]:
    """Return at how many *requests* a second decode's mean time per token reaches *tpot* seconds, and that of one.

    By Little's law a batch of *b* has *b* tokens in the time of a step. Colocated engines whose steps are not mixed
    prefill in between, and the batch waits.  The rate is 0.0 where one request alone takes longer.
    """
    requests = RequestTable.of(requests)
    decoding = _Decoding.of(job, requests)
    if not decoding.steps:
        return inf, 0.0
    steps = decoding.steps / len(requests)
    prefill = 0.0
    if job.colocated and not job.engine.mixed:
        prefill = fsum(prefill_iterations(job, requests.input.tolist())) / len(requests)
    alone = decoding.step(job, 1)
    if alone > tpot:
        return 0.0, alone
    low, high = 1, decoding.batch(job)
    while low < high:
        middle = (low + high + 1) // 2
        late = decoding.step(job, middle) + middle * prefill / steps > tpot
        low, high = (low, middle - 1) if late else (middle, high)
    return len(job.decodes) / (prefill + steps * decoding.step(job, low) / low), alone


def scaled(workload: Workload, job: Deployment, requests: Sequence[Request], seed: int) -> RequestTable:
    """Return *requests* as `Workload.load` asks for: the busier side of *job* is offered that.

    With ``scaling=time`` all gaps change by one factor, and the load is met exactly.  With ``scaling=thinning``
    requests are dropped at random, and it is met in the mean: one that is kept at a low load is kept at a higher
    one. Raise a `ConfigError` if requests arrive all at once, or if thinning would have to add some.
    """
    requests = RequestTable.of(requests)
    if not workload.load:
        return requests
    offered = offered_load(job, requests)
    if offered is None or not offered.highest:
        raise ConfigError(
            f"workload.load={workload.load:g} needs requests that arrive at different times; set more of them with "
            "workload.count, or leave workload.load out"
        )
    share = workload.load / offered.highest
    if workload.scaling == "time":
        return requests.but(arrival=requests.arrival / share)
    if share > 1:
        raise ConfigError(
            f"workload.load={workload.load:g} is above the {offered.highest:.3g} that all requests offer, and "
            "workload.scaling=thinning only drops some; set workload.scaling=time"
        )
    kept = requests.taken(stream(seed, "workload.thinning").random(len(requests)) < share)
    if len(kept) < 2:
        raise ConfigError(
            f"workload.load={workload.load:g} by thinning leaves {len(kept)} of {len(requests)} requests; set more "
            "of them, or workload.scaling=time"
        )
    return kept
