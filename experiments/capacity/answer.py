# SPDX-License-Identifier: Apache-2.0
"""What a search of deployments found out, as metrics and as tables for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from experiments.capacity.search import Capacity, Plan, Probe, Shape, configured, paired
from experiments.jobs import Columns, tabulated
from pdsim.config import Config
from pdsim.core.units import format_time
from pdsim.results import evidence
from pdsim.results.record import Metric, Table, pareto


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Copies of a deployment, the capacity of one of them, and the probe by which they are judged."""

    plan: Plan
    copies: int
    capacity: Capacity
    probe: Probe

    @property
    def gpus(self) -> int:
        """GPUs of all copies."""
        return self.plan.gpus * self.copies

    @property
    def rate(self) -> float:
        """Requests a second of all copies."""
        return self.probe.rate * self.copies

    @property
    def tokens(self) -> float:
        """Output tokens a second and GPU."""
        return self.probe.tokens / self.plan.gpus

    def rate_at(self, load: float) -> float:
        """Return `rate` at another *load*."""
        return self.plan.full * load * self.copies

    def cost(self, prices: Mapping[str, float]) -> float | None:
        """Return what a million output tokens cost at *prices* of a GPU for an hour, by `Shape.prefill_hw`.

        None without the prices of both kinds; ``""`` is the machine's own.
        """
        prefill, own = prices.get(self.plan.shape.prefill_hw), prices.get("")
        if prefill is None or own is None:
            return None
        share = self.plan.prefill_gpus / self.plan.gpus
        return (share * prefill + (1 - share) * own) / self.tokens / 3600 * 1e6

    def __str__(self) -> str:
        return f"{self.plan.shape}{f', {self.copies} copies' if self.copies > 1 else ''}"


@dataclass(frozen=True, kw_only=True)
class Found:
    """The result of a search: deployments that meet the SLO, the best first, and those that do not."""

    ranked: Sequence[Entry]
    failed: Sequence[Entry]  # judged by a probe that fails, the nearest first
    alike: Sequence[Entry] = ()  # the best ones at one rate, with the same requests
    asked: float = 0.0  # requests a second; 0: the highest rate was sought
    attainment: float = 0.0  # share of requests that must meet the SLO
    warmup: float = 0.0  # share of them, the first, that do not count
    fitting: Sequence[Plan] = ()
    refused: Mapping[Shape, str] = field(default_factory=dict)
    simulations: int = 0
    span: tuple[float, float] | None = None  # requests a second of the best, 95 %, by what measured servers were off

    @property
    def best(self) -> Entry | None:
        """The best deployment or, if none meets the SLO, the nearest."""
        return next(iter((*self.ranked, *self.failed)), None)


def front(entries: Sequence[Entry], attainment: float) -> list[Entry]:
    """Return the Pareto front of the probes that hold, by throughput, TTFT and TPOT.

    Better means more output tokens for each GPU, a shorter TTFT and a shorter TPOT, both at the 90th percentile.
    """
    held = [
        Entry(plan=one.plan, copies=one.copies, capacity=one.capacity, probe=probe)
        for one in sorted(entries, key=lambda one: (one.plan.shape, one.copies))
        for probe in one.capacity.probes
        if probe.holds(attainment) and probe.ttft is not None and probe.tpot is not None
    ]
    return pareto(held, lambda one: (-one.tokens, one.probe.ttft or 0.0, one.probe.tpot or 0.0))


def metrics(found: Found, config: Config) -> list[Metric]:
    """Return the numbers of the answer; those of the best deployment are None where none meets the SLO."""
    best, near = found.ranked[0] if found.ranked else None, found.best
    values: dict[str, float | int | None] = {}
    if best is not None:
        values |= {"rate": best.rate, "gpus": best.gpus, "load": best.probe.load, "tokens": best.tokens}
        values["cost"] = best.cost(_prices(config))
    if near is not None:
        shape = near.plan.shape
        values |= {"attainment": near.probe.attainment, "near": near.probe.load, "copies": near.copies}
        values |= {"prefill_tp": shape.prefill_tp, "decode_tp": shape.decode_tp}
        values |= {"prefill": shape.prefill, "decode": shape.decode}
        values["prefill_hw"] = ("", *getattr(config.experiment, "prefill_hw", ())).index(shape.prefill_hw)
    kinds: Sequence[str] = getattr(config.experiment, "prefill_hw", ())
    of_prefill = "GPUs of prefill: 0 are those of hw, n is the n-th of experiment.prefill_hw"
    return [
        Metric("deployments", len(found.fitting), "deployments that fit the machine"),
        Metric("deployments_skipped", len(found.refused), "of the lists, those that do not fit"),
        Metric("deployments_simulated", _simulated(found), "of those that fit; closed form ruled out the others"),
        Metric("deployments_within_slo", len(found.ranked), "of them, those that meet the SLO"),
        Metric("probes", found.simulations, "simulations of this run"),
        Metric("capacity_rate", values.get("rate"), "requests a second of the best deployment"),
        Metric("capacity_gpus", values.get("gpus"), "GPUs of its copies"),
        Metric("capacity_load", values.get("load"), "offered load of its busier side there"),
        Metric("capacity_tokens_per_gpu", values.get("tokens"), "output tokens a second and GPU there"),
        Metric("capacity_attainment", values.get("attainment"), "share within the SLO, of the best or nearest"),
        Metric("capacity_cost", values.get("cost"), "of a million output tokens there, by hw.price"),
        Metric("best_copies", values.get("copies"), "copies of the best or nearest deployment"),
        Metric("best_load", values.get("near"), "offered load of its busier side"),
        Metric("best_prefill_tp", values.get("prefill_tp"), "tensor parallelism of its prefill instances"),
        Metric("best_decode_tp", values.get("decode_tp"), "and of its decode instances"),
        Metric("best_prefill_instances", values.get("prefill"), "prefill instances of a copy, or engines"),
        Metric("best_decode_instances", values.get("decode"), "decode instances of a copy; 0: colocated"),
        *([Metric("best_prefill_hw", values.get("prefill_hw"), of_prefill)] if kinds else []),
    ]


def _prices(config: Config) -> dict[str, float]:
    own = {"": config.hw.price} if config.hw.price else {}
    kinds, prices = (getattr(config.experiment, f"prefill_{name}", ()) for name in ("hw", "prices"))
    return own | dict(zip(kinds, prices, strict=False))


def _simulated(found: Found) -> int:
    return len({one.plan.shape for one in (*found.ranked, *found.failed)})


_COLUMNS: Columns[Entry] = {
    "deployment": ("prefill and decode instances and their tensor parallelism", lambda one: str(one.plan.shape)),
    "copies": ("of it", lambda one: one.copies),
    "GPUs": ("of all copies", lambda one: one.gpus),
    "requests/s": ("of all copies", lambda one: one.rate),
    "load": ("of the busier side, at that rate", lambda one: one.probe.load),
    "attainment": ("share of requests that meet the SLO", lambda one: one.probe.attainment),
    "+-": ("half the 95 % interval of that", lambda one: one.probe.half),
    "TTFT met": ("share that meets it", lambda one: one.probe.within_ttft),
    "TPOT met": ("share that meets it", lambda one: one.probe.within_tpot),
    "TTFT p90 s": ("", lambda one: one.probe.ttft),
    "TPOT p90 s": ("", lambda one: one.probe.tpot),
    "tokens/s/GPU": ("output tokens", lambda one: one.tokens),
}


def tables(found: Found, config: Config) -> list[Table]:
    """Return the answer, the best at one rate, all that were simulated, the Pareto front, and what does not fit."""
    columns = dict(_COLUMNS)
    if prices := _prices(config):
        columns["cost"] = ("of a million output tokens, by hw.price", lambda one: one.cost(prices))
    entries = [*found.ranked, *found.failed]
    reasons = Counter(text.rpartition("; ")[0].split(": ", 1)[-1] or text for text in found.refused.values())
    rows = [
        ["searched", _searched(found, config)],
        ["SLO", f"{_slo(config)} for {found.attainment:.0%} of requests"],
        *(_answer(found, config) if found.ranked else _nothing(found, config)),
    ]
    return [
        Table("Answer", {"": "", " ": ""}, rows),
        tabulated("At one rate", columns, found.alike),
        tabulated("Deployments", columns, entries),
        tabulated("Pareto front", columns, front(entries, found.attainment)),
        Table("Skipped", {"deployments": "", "because": ""}, [[count, why] for why, count in reasons.items()]),
    ]


def _slo(config: Config) -> str:
    if tenants := config.workload.tenants:
        limits = "; ".join(f"{each.name} {format_time(each.ttft)}, {format_time(each.tpot)}" for each in tenants)
        return f"TTFT and TPOT of each tenant ({limits})"
    return f"TTFT <= {format_time(config.slo.ttft)} and TPOT <= {format_time(config.slo.tpot)}"


def _searched(found: Found, config: Config) -> str:
    fit = f"{len(found.fitting)} deployments fit" if len(found.fitting) > 1 else "1 deployment fits"
    return (
        f"{fit}, {_simulated(found)} simulated, the others ruled out in closed form; "
        f"{config.model.name} on {config.hw.name}"
    )


def _answer(found: Found, config: Config) -> Iterator[list[str]]:
    best, total = found.ranked[0], config.hw.nodes * config.hw.gpus
    copies = "1 copy" if best.copies == 1 else f"{best.copies} copies"
    if found.asked:
        yield ["fewest GPUs", f"{best.gpus} of {total}: {best.plan.shape}, {copies}"]
        yield ["serves", f"{best.rate:.3g} requests/s, {best.tokens:.4g} tokens/s/GPU out"]
    else:
        low, high = (best.rate_at(load) for load in (best.capacity.low, best.capacity.high))
        yield ["best", f"{best.plan.shape}, {copies} on {best.gpus} of {total} GPUs"]
        yield ["serves", f"{best.rate:.3g} requests/s, {best.tokens:.4g} tokens/s/GPU out"]
        yield ["by the draw alone", f"{low:.3g} to {high:.3g} requests/s, 95 %"]
    yield ["attainment", f"{_attained(best)} at load {best.probe.load:.2f}"]
    yield ["latency", f"TTFT p90 {_time(best.probe.ttft)}, TPOT p90 {_time(best.probe.tpot)}"]
    yield from _worth(found, config, best)
    if (cost := best.cost(_prices(config))) is not None:
        own = best.plan.shape.prefill_hw
        beside = f" and {_prices(config)[own]:g} of {own}" if own else ""
        yield ["cost", f"{cost:.3g} per million output tokens at hw.price={config.hw.price:g}{beside} a GPU-hour"]
    others = [one for one in found.alike if (one.plan.shape, one.copies) != (best.plan.shape, best.copies)]
    same = next((one for one in found.alike if one not in others), best)
    if others and not found.asked:
        yield ["at that rate", "of others, with the same requests:"]
    shown = others[:3] + [one for one in others[3:] if one.plan.shape.kind != best.plan.shape.kind]
    for one in shown:
        yield [f"on {one.gpus} GPUs", f"{one}: {_compared(same, one, found)}"]
    if len({plan.shape.colocated for plan in found.fitting}) == 1:
        return
    other = "disaggregated" if best.plan.shape.colocated else "colocated"
    if not any(one.plan.shape.colocated != best.plan.shape.colocated for one in shown):
        yield [other, _ruled_out(found, best, other)]


def _worth(found: Found, config: Config, best: Entry) -> Iterator[list[str]]:
    # The interval with the errors of servers that were measured, what may exceed the SLO by them, and the evidence.
    own = configured(config, best.plan.shape, "least_tokens")
    servers = evidence.of_servers(own)
    if servers is not None and found.span is not None:
        apart = f"TTFT {servers.factors['ttft_p90']:g} and TPOT {servers.factors['tpot_p99']:g} times off"
        ends = f"{found.span[0]:.3g} to {found.span[1]:.3g} requests/s"
        yield ["95 % interval", f"{ends}, {apart}, as {servers.loads} loads of {servers.servers}"]
    else:
        yield ["95 % interval", "not known"]
    for name, value, metric in (("ttft", best.probe.ttft, "ttft_p90"), ("tpot", best.probe.tpot, "tpot_p99")):
        limit, off = getattr(config.slo, name), servers.factors[metric] if servers else 1.0
        if value and value <= limit < value * off:
            safe = format_time(limit / off).replace(" ", "")
            text = f"{name.upper()} p90 may be {format_time(value * off)}; slo.{name}={safe} leaves room for that"
            yield ["at risk", text]
    sources = evidence.gather(own, serving=True)
    yield from ([owner, evidence.owned(sources, owner)] for owner in ("compute", "engine", "model"))


def _compared(best: Entry, one: Entry, found: Found) -> str:
    difference = paired(best.probe, one.probe, found.warmup)
    text = f"{one.probe.attainment:.1%} meet the SLO"
    if difference is not None:
        text += f", {100 * difference[0]:.1f} points less (+- {100 * difference[1]:.1f})"
    own = next((each for each in found.ranked if each.plan.shape == one.plan.shape), None)
    return text if own is None or found.asked else f"{text}; at most {own.rate:.3g} requests/s"


def _ruled_out(found: Found, best: Entry, other: str) -> str:
    # what closed form says of the deployments of the *other* kind on as many GPUs
    most = max(
        (
            (plan.bound * min(plan.copies, best.gpus // plan.gpus), str(plan.shape))
            for plan in found.fitting
            if plan.shape.colocated == (other == "colocated") and plan.gpus <= best.gpus
        ),
        default=None,
    )
    if most is None:
        return f"none fits {best.gpus} GPUs"
    return f"ruled out in closed form: at most {most[0]:.3g} requests/s on {best.gpus} GPUs ({most[1]})"


def _nothing(found: Found, config: Config) -> Iterator[list[str]]:
    # how near the nearest came, which limit failed, and whether a prompt alone exceeds it
    name = "fewest GPUs" if found.asked else "best"
    near = found.best
    if near is None:
        yield [name, "none"]
        return
    slo, probe = config.slo, near.probe
    plan = min(found.fitting, key=lambda plan: max(plan.ttft / slo.ttft, plan.tpot / slo.tpot))
    yield [name, f"none of {config.hw.nodes * config.hw.gpus} GPUs meets the SLO at {near.rate:.3g} requests/s"]
    yield ["nearest", f"{near} on {near.gpus} GPUs: {_attained(near)}"]
    parts = {"TTFT": probe.within_ttft, "TPOT": probe.within_tpot}
    missed = [limit for limit, met in parts.items() if met < found.attainment] or ["both at once"]
    shares = " and ".join(f"{limit} by {met:.1%}" for limit, met in parts.items())
    yield ["fails", f"{' and '.join(missed)}: {shares} of requests is met"]
    over = [
        f"{limit} of {format_time(own)} > {format_time(most)}"
        for limit, own, most in (("TTFT", plan.ttft, slo.ttft), ("TPOT", plan.tpot, slo.tpot))
        if own > most
    ]
    if over:
        yield [
            "one prompt alone",
            f"{' and '.join(over)} on the fastest: no number of GPUs helps; raise slo or take faster GPUs",
        ]
        return
    yield [
        "one prompt alone",
        f"meets both (TTFT {format_time(plan.ttft)}, TPOT {format_time(plan.tpot)}), so the load is too high; "
        "take more nodes (hw.nodes) or a lower rate",
    ]


def _attained(one: Entry) -> str:
    whose = f" ({', '.join(f'{name} {share:.1%}' for name, share in one.probe.tenants.items())})"
    text = f"{one.probe.attainment:.1%} +- {one.probe.half:.1%} of {one.probe.requests} requests meet the SLO"
    return text.replace(" requests", " requests, of the worst tenant,") + whose if one.probe.tenants else text


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else format_time(seconds)
