# SPDX-License-Identifier: Apache-2.0
"""What the numbers of a run rest on: the source of every parameter, and the weakest kind among them.

A source is a text that begins with its kind, one of `pdsim.hardware.machine.EVIDENCE` from the strongest to the
weakest, and a colon; every YAML file of ``conf/`` has one for each of its numbers.  What was measured on other
hardware, or of another model, counts as assumed.

And the intervals that measured servers and transfers give to what a run says.  Predictions of `data/live` were
sealed before the servers were measured, those of the public rows of `data/benchmarks/scorecard_rows.csv` were not:
the model was changed after a look at some.  A factor is what 95 of 100 values are within, predicted over measured or
measured over predicted.  ``python -m tools.served`` derives them.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from pdsim.calibration.definition import drawn, on_host, widening
from pdsim.config import Config
from pdsim.config.presets import family
from pdsim.core.units import format_rate, format_size, format_time
from pdsim.hardware.machine import EVIDENCE
from pdsim.transfer import TransferRecord
from pdsim.transfer.log import TransferShape, endpoints, shapes

DRAWS = 1000
"""Hosts that `host_spread` draws."""


_HELD_OUT = re.compile(r" (?:\d+,|held out) ([\d.]+)(?: and |[;.,] |$)")
"""Medians in the source of a table of operators or of a profile, as `pdsim profile` writes them."""


def kinds(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the parameters of each kind in *sources*, from the strongest kind to the weakest.

    Raise a `ValueError` that names the parameter if a source begins with no kind.
    """
    by_kind: dict[str, list[str]] = {kind: [] for kind in EVIDENCE}
    for parameter, source in sources.items():
        kind = source.partition(":")[0].strip()
        if kind not in by_kind:
            raise ValueError(
                f"{parameter}: source {source!r} must begin with one of {', '.join(EVIDENCE)} and a colon"
            )
        by_kind[kind].append(parameter)
    return {kind: parameters for kind, parameters in by_kind.items() if parameters}


def weakest(sources: Mapping[str, str]) -> str:
    """Return the weakest kind of `EVIDENCE` in *sources*, or ``"none"`` if there are no sources."""
    return [*kinds(sources)][-1] if sources else "none"


def texts(sources: Mapping[str, str], kind: str) -> dict[str, list[str]]:
    """Return the parameters of *kind* by the text of their source, in order."""
    by_text: dict[str, list[str]] = {}
    for parameter in kinds(sources).get(kind, ()):
        by_text.setdefault(sources[parameter].partition(":")[2].strip(), []).append(parameter)
    return by_text


def owned(sources: Mapping[str, str], owner: str) -> str:
    """Return the kinds of *sources* of *owner*, such as engine, with their numbers, and where the weakest are from.

    A table of operators adds by how much those held out of it are off, in the median.
    """
    own = {key: text for key, text in sources.items() if key.partition(".")[0] == owner}
    if not own:
        return "assumed: nothing says where its numbers are from"
    by_kind = kinds(own)
    names = list(by_kind.values())[-1]
    texts_of = [own[name].partition(": ")[2].split(": ")[0].split(";")[0] for name in names]
    borrowed = [text for text in texts_of if text.startswith("measured on ")]
    where = Counter(borrowed or texts_of).most_common(1)[0][0]
    counted = [f"{kind}{f' {len(keys)}' if len(own) > 1 else ''}" for kind, keys in reversed(by_kind.items())]
    text = f"{', '.join(counted)} ({where})"
    off = [float(each) for source in own.values() for each in _HELD_OUT.findall(source)]
    return f"{text}; operators held out {min(off):g} to {max(off):g} % off" if off else text


def gather(config: Config, *, serving: bool, gathering: bool = False) -> dict[str, str]:
    """Return the sources behind a run of *config* by parameter, such as ``hw.gpu.memory_rate``.

    There are none if the machine or the engine names no source.
    """
    modelled = config.target == "model"
    sources: dict[str, str] = {}
    if modelled:
        if not config.hw.sources or not config.backend.sources:
            return {}
        sources |= _named("hw", config.hw.sources) | _named("backend", config.backend.sources)
    elif config.target == "live":
        return {"latencies": "measured: by this run's client, on the servers that run.json names"}
    elif config.hw.guest:
        sources["transfers"] = (
            "assumed: timed on emulated processors, which says that bytes arrive and nothing of speed"
        )
    else:
        where = (
            "between ranks that share a GPU, within its memory, and"
            if config.launch.share_gpus
            else "on the host and"
        )
        sources["transfers"] = f"measured: by this run, {where} with the engine that run.json names"
    if gathering and modelled and config.collective is not None:
        sources |= _named("collective", config.collective.sources)
    if serving:
        sources |= _named("model", config.model.sources)
        if config.engine.name != "generic":  # which has no numbers of its own
            sources |= _named("engine", config.engine.sources)
        sources["compute"] = _of_compute(config)
    return sources


def _of_compute(config: Config) -> str:
    compute = config.compute
    if not compute.source:
        return "assumed: a roofline with the shares and constants of the compute settings"
    here = config.hw.gpu.name if config.hw.gpu else config.hw.name
    text = compute.source.partition(":")[2].strip()
    if compute.measured_gpu not in ("", here):
        return f"assumed: measured on {compute.measured_gpu}, scaled by the peaks to {here}: {text}"
    if not compute.measured_of or config.model.name in compute.measured_of:
        return compute.source
    return f"assumed: measured of {compute.measured_of[0]}, not of {config.model.name}: {text}"


def _named(owner: str, sources: Mapping[str, str]) -> dict[str, str]:
    # a source without a name is that of all others of *owner*
    return {
        f"{owner}.{name.strip()}".rstrip("."): text for names, text in sources.items() for name in names.split(",")
    }


def _moves(transfers: Sequence[TransferRecord]) -> dict[TransferShape, int]:
    # Of an engine, and not of a collective.
    return {shape: count for shape, count in shapes(transfers).items() if shape.operation in ("write", "read")}


def extrapolations(config: Config, transfers: Sequence[TransferRecord]) -> list[str]:
    """Return a warning for each reason why the times of modelled *transfers* are extrapolated."""
    if config.target != "model" or not transfers:
        return []
    return [*_borrowed_rates(config, transfers), *_beyond_samples(config, transfers)]


def _borrowed_rates(config: Config, transfers: Sequence[TransferRecord]) -> Iterator[str]:
    # A borrowed rate is a share of the line rate that was measured on other hardware.
    largest = max((shape.nbytes for shape in _moves(transfers)), default=0)
    named = [(key.strip(), text) for keys, text in config.backend.sources.items() for key in keys.split(",")]
    for name, rate in config.backend.limits(largest, config.hw.interconnect.rate, config.hw.nic.rate):
        source = next((text for key, text in named if f"{name}.rate.".startswith(f"{key}.")), "")
        if source.startswith("assumed: measured on "):
            where = source.removeprefix("assumed: measured on ").partition(",")[0]
            yield (
                f"warning: backend.{name}.rate={format_rate(rate)} limits large transfers on "
                f"hw={config.hw.name}, and its share of the line rate was measured on {where}; "
                "pdsim calibrate measures it on your hardware"
            )


def _beyond_samples(config: Config, transfers: Sequence[TransferRecord]) -> Iterator[str]:
    calibration, moves = config.calibration, _moves(transfers)
    if calibration is None or not moves:
        return

    def error(factor: float) -> str:
        if calibration.held_out is None:
            return ""
        percent, wide = 100.0 * calibration.held_out.p95, widening(factor)
        return f"; expect {wide:.3g} times its error, {percent:.2g} % at 95 of 100 held-out points"

    units: tuple[tuple[str, Callable[[float], str], Sequence[float]], ...] = (
        (" descriptors", str, calibration.descriptors),
        ("", format_size, calibration.bytes),
    )
    for what, unit, span in units:
        counts = Counter[int]()
        for shape, count in moves.items():
            counts[shape.descriptors if what else shape.nbytes] += count
        low, high = span or (0, max(counts))
        if not (outside := sum(count for value, count in counts.items() if not low <= value <= high)):
            continue
        most, least = max(counts), min(counts)
        at, factor = (most, most / high) if most > high else (least, low / max(least, 1))
        yield (
            f"warning: {outside} of {counts.total()} transfers lie outside calibration={calibration.name}, whose "
            f"samples have {unit(low)} to {unit(high)}{what}: extrapolated to {unit(at)}, by a factor of "
            f"{factor:.3g}{error(factor)}"
        )
    gpus = min(len(endpoints(transfers)), config.hw.nodes * config.hw.gpus)
    factors = calibration.factors(gpus=gpus)
    if "gpus" in factors:
        yield (
            f"warning: {gpus} GPUs take part, and samples of calibration={calibration.name} have "
            f"{calibration.gpus[1]}: extrapolated, by a factor of {factors['gpus']:.3g}{error(factors['gpus'])}"
        )
    if "hosts" in factors:
        yield (
            f"warning: host_factor={calibration.host:g} is that of no host of calibration={calibration.name}, "
            f"{min(calibration.hosts):g} to {max(calibration.hosts):g}: extrapolated, by a factor of "
            f"{factors['hosts']:.3g}{error(factors['hosts'])}"
        )


@dataclass(frozen=True)
class HostSpread:
    """How many times as long isolated transfers of a run take on other hosts, in the median over their shapes.

    *low* and *high* are the 95 % interval of *draws* hosts, drawn from the run's seed: how many times as long the
    transfers take.  *known* are the factors of the hosts that the calibration knows.
    """

    low: float
    high: float
    draws: int
    known: tuple[float, ...]


def host_spread(config: Config, transfers: Sequence[TransferRecord]) -> HostSpread | None:
    """Return how the times of modelled *transfers* vary over hosts."""
    calibration, engine = config.calibration, config.backend
    if config.target != "model" or calibration is None or engine.intra is None:
        return None
    moves = {(shape.descriptors, shape.nbytes, shape.operation == "read") for shape in _moves(transfers)}
    if calibration.host or len(set(calibration.hosts)) < 2 or not moves:
        return None
    factors, line = sorted(drawn(calibration.hosts, config.seed, DRAWS)), config.hw.interconnect.rate
    low, high = (  # times grow with the factor, so do quantiles
        median(
            slow.intra.isolated_time(count, size, line, read=read)
            / engine.intra.isolated_time(count, size, line, read=read)
            for count, size, read in moves
        )
        for slow in (on_host(engine, factors[int(DRAWS * quantile)]) for quantile in (0.025, 0.975))
        if slow.intra
    )
    return HostSpread(low, high, DRAWS, calibration.hosts)


def host_note(config: Config, transfers: Sequence[TransferRecord]) -> list[str]:
    """Return the line about `host_spread`, or none."""
    spread, calibration = host_spread(config, transfers), config.calibration
    if spread is None or calibration is None:
        return []
    return [
        f"host: on {len(spread.known)} hosts the host's part of a transfer took {min(spread.known):.2g} to "
        f"{max(spread.known):.2g} times what this run takes; alone, these transfers take "
        f"{spread.low:.2f} to {spread.high:.2f} times as long on 95 of 100 hosts (draw_host=true, host_factor=, "
        "pdsim calibrate --host)"
    ]


FACTORS = {
    "small": 1.34,
    "large": 1.13,
    "apart": 1.36,
    "shared": 2.33,
    "handoff": 1.74,
    "thread small": 1.36,
    "thread large": 1.3,
    "thread shared": 2.88,
    "bare small": 1.22,
    "bare large": 1.11,
    "bare shared": 1.99,
    "bare thread small": 1.83,
    "bare thread large": 1.55,
    "bare thread shared": 2.91,
}
"""What 95 of 100 sealed predictions of transfers were within, predicted over measured or its inverse, by class.

``small``: one transfer at a time of less than `LARGE` bytes; ``apart``: several, of each GPU to one other;
``shared``: all others.  ``thread``: NIXL with its progress thread; ``bare``: programs that call the library.
``python -m tools.transferred`` derives them.
"""

LARGE = 10_000_000
_KINDS = {
    "small": "for one transfer at a time",
    "large": f"from {LARGE / 1e6:g} MB on",
    "apart": "for several from GPU to GPU",
    "shared": "for others at once",
}
_MANY = ("handoff", "metadata", "serve")
_IN_FLIGHT = re.compile(r" c(?!1\b)\d")


def cause(software: str, group: str, label: str, nbytes: int, threads: int = 1) -> str:
    """Return which of `FACTORS` holds for a transfer of *nbytes* of class *group*, posted by *threads* of a rank.

    >>> cause("", "pair, read", "pair 1x4096 c1 read", 4096), cause("thread", "pair", "pair 1x4096 c2", 4096)
    ('small', 'thread shared')
    """
    name = group.partition(",")[0]
    if name in _MANY:
        return "handoff"
    kind = "shared"
    if name == "pair" and threads == 1 and not _IN_FLIGHT.search(label):
        kind = "large" if nbytes >= LARGE else "small"
    elif name in ("pair", "pairs", "bidirectional") and threads == 1 and not software:
        kind = "apart"
    return f"{software} {kind}".strip()


def software(config: Config) -> str:
    """Return whose classes of `FACTORS` those of *config* are: thread, bare, both, or none of them."""
    bare = config.calibration is not None and "_bare-" in config.calibration.name
    thread = config.backend.options.get("progress_thread") == "true"
    return " ".join(name for name, of in (("bare", bare), ("thread", thread)) if of)


VALIDATED = ("nvlink", "mooncake_nvlink", "nixl")
"""Choices of ``backend`` whose transfers within a node of H100 or H200 were predicted, sealed and then measured."""

TITLES = {"ttft_p50": "TTFT p50", "tpot_p50": "TPOT p50", "e2e_p50": "end to end p50"}
"""Metrics whose intervals a run prints."""

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
    whose = software(config)
    known = {kind: FACTORS.get(f"{whose} {kind}".strip()) for kind in ("small", "large", "apart", "shared")}
    texts = [f"{factor:g} {_KINDS[kind]}" for kind, factor in known.items() if factor]
    return [
        f"95 % interval: over and times {', '.join(texts)}, as sealed predictions{whose and f' ({whose})'} were off"
    ]


def lines(accuracy: Mapping[str, Any], metrics: Mapping[str, Any], *, between: bool) -> list[str]:
    """Return the line about *accuracy*, of `Accuracy` as kept in run.json, for the latencies in *metrics*, if any.

    There is no interval for transfers *between* nodes that take more than `MOST_TRANSFER` of the time.
    """
    if between and (metrics.get("share_transfer") or 0.0) > MOST_TRANSFER:
        return ["95 % interval: not known, for no server was measured whose transfers between nodes take so long"]
    spans = Accuracy(**accuracy).spans(metrics)
    texts = [f"{TITLES[name]} {span(spans[name])}" for name in TITLES if name in spans]
    by = f", by {accuracy['loads']} loads of {accuracy['servers']}"
    return [f"95 % interval: {', '.join(texts)}{by}"] if texts else []


def span(ends: tuple[float, float]) -> str:
    """Return *ends*, of seconds, for people.

    >>> span((0.0124, 0.019))
    '12.4 to 19 ms'
    """
    low, high = (format_time(end) for end in ends)
    unit = high.partition(" ")[2]
    return f"{low.removesuffix(f' {unit}')} to {high}"
