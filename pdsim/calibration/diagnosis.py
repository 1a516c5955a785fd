# SPDX-License-Identifier: Apache-2.0
"""Why transfers are slower than an engine's model expects: each cause is the model with one number changed.

By how much it is changed is found from the samples, one factor for all that the cause acts on.  Causes are ranked by
what they leave unexplained; those that the samples cannot tell apart are marked, and ranked by how little they
change.  What is beside the slow transfers tells most: the same from host memory, of a program that measures the wire
alone, or what tools say about the machine (`pdsim.calibration.pasted`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pdsim.calibration.pasted import Fact
from pdsim.calibration.robust import Floats
from pdsim.calibration.samples import Sample
from pdsim.core.units import Rate, format_size
from pdsim.hardware.costs import EngineModel
from pdsim.hardware.machine import Machine

EXPECTED = "as expected"
TOLERANCE = 0.25
"""What the times may differ by in the mean and still be as expected: twice the median error of NIXL with its thread
on hosts that nothing was fitted to, 13 %."""
_LARGEST = 1024.0
_FACTORS = [2.0 ** (step / 40) for step in range(401)]  # from 1 in steps of 1.7 %
_ALIKE = 0.05  # the samples do not tell apart what leaves so little more unexplained, or less than they scatter
# times a factor, how surprising a cause is: a fallback as much as a wire four times slower (assumed); logs of vLLM
# have 72 descriptors in a transfer or more
_SURPRISE = {"over TCP": 4.0, "not over NVLink": 4.0, "late completions": 2.0, "more descriptors": 1 / 72}

_MAPPED = 5e-4
"""Seconds that every transfer over NVLink takes more, from which on it maps its memory anew: nobody polls so seldom
(assumed; ucx-py 370 has 6 to 15 ms without UCX's cache of handles, 2 with it)."""
_FALLS = 2 / 3  # assumed: more than the rates of one wire scatter

FALLBACKS = ("over TCP", "not over NVLink")
"""Causes that change the model also by a factor of 1."""

Acts = Callable[[Sample], bool]
"""Whether a cause slows a sample."""


class Setting(NamedTuple):
    """What predicts times: a model, the rate of its links, and the descriptors for each that a sample has."""

    model: EngineModel
    line: Rate
    split: float = 1.0


class Cause(NamedTuple):
    """A cause by its *name*: what predicts the samples that it slows, given a factor, and which those are."""

    name: str
    changed: Callable[[float], Setting]
    slows: Acts


@dataclass(frozen=True)
class Timing:
    """A sample beside the model: seconds of the whole transfer, of posting, of the wire, of waiting after both."""

    sample: Sample
    expected: float
    posting: float
    wire: float
    waiting: float


@dataclass(frozen=True)
class Explanation:
    """A *cause*, the *factor* by which it changes a number of the model, and what it leaves *unexplained*.

    *unexplained* is the mean relative distance of measured and predicted times, ``exp(mean(abs(log(measured /
    predicted)))) - 1``; of posting too where that was measured, by its share of the time.
    """

    cause: str
    factor: float
    unexplained: float
    remedy: str
    alike: bool = False  # as good as the first one, by these samples
    seen: tuple[str, ...] = ()  # what speaks for it, beside the samples


def timings(samples: Sequence[Sample], model: EngineModel, line: Rate) -> list[Timing]:
    """Return *samples* beside *model* over links of *line* bytes/s, with nothing else in their way."""
    rows = []
    for one in samples:
        at = one.blocks, one.blocks * one.size, line
        posting, _, wire, waiting = map(float, model.stages(*at, read=one.operation == "read"))
        rows.append(Timing(one, model.isolated_time(*at, read=one.operation == "read"), posting, wire, waiting))
    return rows


def explanations(
    samples: Sequence[Sample],
    model: EngineModel,
    hw: Machine,
    line: Rate,
    tcp: EngineModel | None = None,
    facts: Sequence[Fact] = (),
) -> list[Explanation]:
    """Return explanations of *samples*, best first: *model* as it is, or with one cause of slowness.

    *line* is the rate of the links that *model* takes, in bytes/s; *tcp* is the same engine's model over TCP, if it
    can fall back to it.  What is `EXPECTED` within `TOLERANCE` comes first; of causes that the samples do not tell
    apart, those that *facts* speak for.
    """
    usual, switch = Setting(model, line), _switch(samples)
    slowest = max(one.seconds for one in samples if not one.bare)
    quickest = min(one.expected for one in timings([one for one in samples if not one.bare], model, line))
    spoken = {fact.cause: tuple(one.what for one in facts if one.cause == fact.cause) for fact in facts}
    if switch:
        spoken["staged messages"] = (f"the rate falls at {format_size(switch)}",)
    as_expected = _unexplained(samples, usual, usual, _of_engine)
    found = [Explanation(EXPECTED, 1.0, as_expected, "nothing is slower than it should be")]
    for name, changed, slows in _causes(samples, usual, hw, tcp, spoken):
        left, factor = min((_unexplained(samples, usual, changed(factor), slows), factor) for factor in _FACTORS)
        if name == "late completions" and model.path == "nvlink" and _late(factor, slowest) > _MAPPED:
            name = "memory mapped anew"
        if factor > 1.0 or name in FALLBACKS:
            remedy = _of_wire(factor, hw, model.path) if name == "slow wire" else _REMEDIES[name]
            remedy = f"beyond {format_size(switch)} {remedy}" if name == "staged messages" else remedy
            found.append(Explanation(name, factor, left, remedy, seen=spoken.get(name, ())))
    # the mean of n deviations is known to its n-th root, if they scatter as much as they are large
    least = min(one.unexplained for one in found)
    scatter = float(np.expm1(np.log1p(least) * (1.0 + len(samples) ** -0.5)))
    found = [replace(one, alike=one.unexplained < max(least + _ALIKE, scatter)) for one in found]

    def rank(one: Explanation) -> tuple[bool, bool, bool, int, bool, float]:
        change = one.factor
        if one.cause in ("late completions", "memory mapped anew"):  # of the transfer that it changes most
            change = 1.0 + _late(one.factor, slowest) / quickest
        doublings = round(np.log2(change * _SURPRISE.get(one.cause, 1.0))) if one.alike else 0
        other = one.cause != EXPECTED
        first = not other and as_expected <= TOLERANCE
        return not first, not one.alike, not (one.alike and one.seen), doublings, other, one.unexplained

    return sorted(found, key=rank)


def _causes(
    samples: Sequence[Sample], usual: Setting, hw: Machine, tcp: EngineModel | None, spoken: Container[str]
) -> Iterator[Cause]:
    model, line, _ = usual
    slowest = max(one.seconds for one in samples if not one.bare)
    memories, switch = {one.memory for one in samples}, _switch(samples)

    def wire(factor: float) -> Setting:
        return Setting(_slower(model, factor), line / factor)

    def completions(factor: float) -> Setting:
        return Setting(replace(model, latency=model.latency + _late(factor, slowest)), line)

    yield Cause("slow wire", wire, lambda _: True)
    yield Cause("slow host", partial(_slow_host, model, line), _of_engine)
    yield Cause("late completions", completions, _of_engine)
    if "slow GPU memory" in spoken or ("gpu" in memories and ("host" in memories or model.path == "rdma")):
        yield Cause("slow GPU memory", wire, lambda one: one.memory != "host")
    if switch:
        yield Cause("staged messages", wire, lambda one: not one.bare and one.size >= switch)
    if len({one.bare for one in samples}) == 2:
        yield Cause("slow engine", wire, _of_engine)
    if not any(one.counted for one in samples):
        yield Cause("more descriptors", lambda factor: Setting(model, line, factor), _of_engine)
    if model.path == "nvlink" and hw.gpu is not None:
        pcie, aside = hw.gpu.pcie, _slower(model, max(1.0, model.rate / hw.gpu.pcie))
        yield Cause("not over NVLink", lambda factor: Setting(_slower(aside, factor), pcie / factor), _of_engine)
    if tcp is not None:  # on a host that may be slow, too
        yield Cause("over TCP", partial(_slow_host, tcp, hw.host.tcp_rate), _of_engine)


def _of_engine(one: Sample) -> bool:
    return not one.bare


def _unexplained(samples: Sequence[Sample], usual: Setting, changed: Setting, slows: Acts) -> float:
    parts = ([one for one in samples if slows(one)], changed), ([one for one in samples if not slows(one)], usual)
    logs, weights = np.hstack([_logs(rows, *setting) for rows, setting in parts if rows])
    return float(np.expm1(np.average(np.abs(logs), weights=weights)))


def _late(factor: float, slowest: float) -> float:
    # seconds more until a completion is seen, by the largest factor as many as the *slowest* transfer takes
    return slowest * (factor - 1.0) / (_LARGEST - 1.0)


def _slow_host(model: EngineModel, line: Rate, factor: float) -> Setting:
    if model.path in ("tcp", "shm"):  # it copies the bytes
        model, line = _slower(model, factor), line / factor
    ramp = tuple(replace(step, extra=step.extra * factor) for step in model.ramp)
    return Setting(replace(model, call=model.call * factor, descriptor=model.descriptor * factor, ramp=ramp), line)


def _switch(samples: Sequence[Sample]) -> int:
    # the size from which on transfers have less than `_FALLS` of the rate of smaller ones, which no wire does; or 0
    rates = dict[int, float]()
    for one in sorted(samples, key=lambda one: one.size):
        if not one.bare:
            rates[one.size] = max(rates.get(one.size, 0.0), one.blocks * one.size / one.seconds)
    return next((b for a, b in pairwise(rates) if rates[b] < _FALLS * rates[a]), 0)


def _slower(model: EngineModel, factor: float) -> EngineModel:
    return replace(model, **{name: getattr(model, name) / factor for name in ("rate", "read_rate", "queue_rate")})


def _logs(samples: Sequence[Sample], model: EngineModel, line: Rate, split: float) -> Floats:
    # Of measured over predicted times, and of posting, which counts by its share of the time; then the weights.  A
    # bare wire takes what its bytes do.
    blocks = np.array([one.blocks * split for one in samples])
    nbytes = np.array([float(one.blocks * one.size) for one in samples])
    reads, bare = np.array([(one.operation == "read", one.bare) for one in samples]).T
    either: list[Floats] = [model.isolated_time(blocks, nbytes, line, read=read) for read in (False, True)]
    expected = np.where(bare, nbytes / line, np.where(reads, either[1], either[0]))
    seconds, posting = np.array([(one.seconds, one.posting) for one in samples]).T
    known = posting > 0.0
    ratios = np.concatenate([seconds / expected, posting[known] / model.posting(blocks[known])])
    return np.array(
        [np.log(ratios), np.concatenate([np.ones(len(samples)), np.minimum(1.0, posting / seconds)[known]])]
    )


_REMEDIES = {
    "over TCP": "read which transport its log names: UCX_TLS, MC_FORCE_TCP, /dev/infiniband in the container",
    "not over NVLink": (
        "nvidia-smi topo -m shows NV#; cuda_ipc in UCX_TLS, all GPUs visible in both containers, one IPC namespace, "
        "memory that can be shared (no expandable segments)"
    ),
    "slow host": "its processor is slow or busy: pdsim doctor --host; post from a thread and a core of its own",
    "late completions": (
        "who polls is busy, or a transfer does more than move bytes (first contact, memory registered or mapped "
        "anew): poll from a thread of its own, register once, measure after a warm-up"
    ),
    "memory mapped anew": (
        "each transfer opens the peer's memory, or is the first to do so: register once, from a memory pool, and "
        "keep UCX_CUDA_IPC_CACHE=y; measure after a warm-up"
    ),
    "slow GPU memory": (
        "if host memory is quicker over the same wire: GPUDirect (nvidia_peermem, dmabuf), card and GPU on one "
        "PCIe switch (nvidia-smi topo -m), ACS or IOMMU off, relaxed ordering"
    ),
    "staged messages": (
        "it has a smaller rate than below: the library copies large messages, through host memory or in fragments "
        "(UCX_PROTO_INFO=y, UCX_RNDV_SCHEME, UCX_RNDV_THRESH, GPUDirect)"
    ),
    "slow engine": (
        "the bare wire is quicker: the engine's transport, queue pairs, rails, threads, and memory registered "
        "without relaxed ordering (UCX_TLS, MC_NUM_QP_PER_EP, MC_IB_PCI_RELAXED_ORDERING)"
    ),
    "more descriptors": "blocks are split: larger pages, like layouts on both sides, or staging (kv.staging=true)",
}


def _of_wire(factor: float, hw: Machine, path: str) -> str:
    if path != "rdma":
        look = "nvidia-smi topo -m" if path == "nvlink" else "iperf3"
        return f"about {factor:.1f} transfers share a link, or it is a slower one: {look}"
    known = {2.0: "the card of the other socket, one of two bonded ports, or two transfers on a card"}
    if hw.nic.count > 2:
        known[float(hw.nic.count)] = f"all ranks on one card of {hw.nic.count}"
    near = [what for times, what in known.items() if abs(factor / times - 1.0) < 0.15]
    return (
        f"{'; or '.join(near) or f'about {factor:.1f} transfers share a card'}: check device names, GID, GPUDirect, "
        "relaxed ordering"
    )
