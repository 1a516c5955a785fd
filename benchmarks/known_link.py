# SPDX-License-Identifier: Apache-2.0
"""Real engines over links of known rate and delay: ``python -m benchmarks.known_link WHAT FILE [LINK ...]``.

``validate`` runs ``pdsim validate``, which predicts first, ``measure`` writes what both engines over TCP take,
``recover`` what a transfer takes that is cut or stalled on its way, and ``all FOLDER SECONDS`` does all of that,
over every link of this file, and begins no job after *SECONDS*.  Rows are written job by job, and what a file has is
not measured again.  `benchmarks.known_link_model` fits and compares.

If the machine has other things to do, run it in a control group of its own: ``systemd-run --scope -p
CPUWeight=10000``. Ranks have slices of 0.1 ms, so that they get a processor at once when they wake up.

A link is what `conf/hw/link.yaml` is changed by, with who writes to whom: ``"rate=200Mbps delay=1ms flows=0>1"``.  A
point is *blocks* of *size* bytes, *gap* seconds after the one before.  Steady points have short gaps or none, and
follow two that are not counted; those after a long gap begin with the window to which TCP has shrunk by then.
"""

from __future__ import annotations

import csv
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pdsim.config import Config
from pdsim.core.units import parse_rate
from pdsim.hardware.machine import LinkChange
from pdsim.sim.model import Model
from pdsim.transfer import Batch, Program
from pdsim.transfer.job import Place, Rank, RankSpec

BACKENDS = ("mooncake_tcp", "nixl_tcp")
FITTED = [
    "rate=100Mbps delay=3ms",
    "rate=150Mbps delay=8ms",
    "rate=400Mbps delay=1.5ms",
    "rate=600Mbps delay=0.3ms",
]
UNSEEN = [
    "rate=200Mbps delay=1ms",
    "rate=300Mbps delay=6ms",
    "rate=500Mbps delay=0.5ms",
    "rate=800Mbps delay=2ms",
]
VALIDATED = [
    "rate=120Mbps delay=2ms",
    "rate=280Mbps delay=3ms",
    "rate=420Mbps delay=0.9ms",
    "rate=750Mbps delay=1.6ms",
    "rate=80Mbps delay=4ms",
    "rate=180Mbps delay=10ms",
    "rate=220Mbps delay=3.5ms",
    "rate=350Mbps delay=0.8ms",
    "rate=550Mbps delay=2ms",
    "rate=700Mbps delay=1.2ms",
    "rate=250Mbps delay=5ms",
    "rate=320Mbps delay=0.6ms",
    "rate=480Mbps delay=3ms",
    "rate=650Mbps delay=1.8ms",
]
SHAPED = [
    "rate=300Mbps delay=2ms back=60Mbps flows=0>1",
    "rate=300Mbps delay=2ms back=60Mbps flows=1>0",
    "rate=200Mbps rates=[400Mbps,200Mbps] delay=2ms nodes=3 flows=0>2",
    "rate=300Mbps delay=2ms flows=0>1,0>1",
    "rate=300Mbps delay=2ms nodes=3 flows=0>2,1>2",
]
DISTURBED = [
    "rate=200Mbps delay=1ms window=4MiB",
    "rate=300Mbps delay=2ms window=4MiB",
    "rate=400Mbps delay=3ms window=4MiB",
    "rate=400Mbps delay=3ms window=1MiB",
]

DISTURBED_UNSEEN = [  # by nothing that the model says of cuts
    "rate=250Mbps delay=1.5ms window=4MiB",
    "rate=350Mbps delay=4ms window=2MiB",
    "rate=150Mbps delay=5ms window=1MiB",
]

STEADY = [(1, 4 << 10 << shift) for shift in range(0, 14, 2)]  # 4 KiB to 16 MiB
BLOCKS = [(4, 4 << 10), (16, 4 << 10), (64, 4 << 10), (16, 64 << 10), (16, 256 << 10)]
COLD = [(1, 256 << 10), (1, 1 << 20), (1, 4 << 20)]
GAPS, LONG = (5e-3, 0.0), 1.5  # seconds between
LARGE = 1 << 20
COLUMNS = (
    "backend", "link", "flow", "blocks", "size", "gap", "seconds", "low", "high", "repeats", "load", "late",
)  # fmt: skip
Point = tuple[int, int, float, int]  # blocks, size, gap, transfers
Flow = tuple[int, int]  # from this node to that


def points(link: str) -> list[Point]:
    """Return what is run on *link*: where it has a shape, messages only; and nothing of more than 2 s.

    Those of several flows begin together, a gap after they last did, so that they share the link all the time.
    """
    blocks = [] if link in SHAPED else BLOCKS
    each = [(gap, count, size) for gap in GAPS for count, size in [*STEADY, *blocks]]
    steady = [(count, size, gap, 17 if count * size < LARGE else 11) for gap, count, size in each]
    cold = [] if link in SHAPED else [(count, size, LONG, 5) for count, size in COLD]
    slowest = min(parse_rate(value) for key, value in _settings(link) if key in ("rate", "back"))
    if len(flows(link)) > 1:
        return [(count, size, round(0.1 + 2.5 * size / slowest, 3), 9) for count, size in STEADY[2:]]
    return [point for point in [*steady, *cold] if point[0] * point[1] / slowest < 2.0]


# --- programs ------------------------------------------------------------------------------------------------------


def write(rank: Rank, points: Sequence[Point], taker: str, together: bool) -> Program:
    """Write every one of *points* to *taker*; *together* with other writers, at times of the job."""
    region = rank.endpoint.register(rank.device.allocate(32 << 20), "all")
    rank.channel.send(taker, b"")
    _, address = yield rank.channel.receive()
    peer = rank.endpoint.connect(address)
    begun = False  # what a disturbance is timed against begins at a time of the job, however long it took to connect
    due = AT
    for number, (blocks, size, gap, many) in enumerate(points):
        offset = np.arange(blocks, dtype=np.int64) * size
        batch = Batch(region, peer.regions["all"], offset, offset, np.full(blocks, size))
        for _ in range(many):
            due += gap
            wait = due if together else gap
            yield rank.clock.timeout(max(0.0, wait - rank.clock.now) if together or not begun else gap)
            begun = True
            yield rank.endpoint.write(peer, batch, label=str(number))
    rank.channel.send(taker, b"done")


def take(rank: Rank) -> Program:
    """Be written to by one rank until it has done."""
    rank.endpoint.register(rank.device.allocate(32 << 20), "all")
    writer, _ = yield rank.channel.receive()
    rank.channel.send(writer, rank.endpoint.address())
    yield rank.channel.receive()


def times(config: Config, flows: Sequence[Flow], every: Sequence[Point]) -> tuple[list[list[list[float]]], float]:
    """Return the seconds of each transfer of each point of each of *flows*, on the target of *config*.

    And the share of packets that a real link passed on late.
    """
    target: Any = _target(config)
    ranks = []
    for number, (source, sink) in enumerate(flows):
        words = {"points": every, "taker": f"taker{number}", "together": len(flows) > 1}
        ranks.append(RankSpec(f"writer{number}", f"{__spec__.name}:write", Place(source), words))
        ranks.append(RankSpec(f"taker{number}", f"{__spec__.name}:take", Place(sink), {}))
    outcome = target.run(ranks)
    if errors := [result.error for result in outcome.ranks.values() if result.error]:
        raise SystemExit("\n".join(errors))
    found: list[list[list[float]]] = [[[] for _ in every] for _ in flows]
    for number in range(len(flows)):
        for record in outcome.ranks[f"writer{number}"].transfers:
            found[number][int(record.label)].append(record.seen - record.submitted)
    late = target.lateness[-1] if config.target == "real" else None
    return found, late.late / max(1, late.packets) if late else 0.0


def _target(config: Config) -> Any:
    if config.target == "model":
        return Model(config.hw, config.backend)
    from backends.jobs.launcher import Processes

    return Processes(config.backend, deadline=600, link=config.hw.link, nodes=config.hw.nodes)


def kept(point: Point, seconds: Sequence[float]) -> Sequence[float]:
    """Return what counts: of steady points all but the first two."""
    return seconds[2:] if point[2] < LONG else seconds


# --- links ---------------------------------------------------------------------------------------------------------


def _settings(link: str) -> Iterator[tuple[str, str]]:
    for word in link.split():
        key, _, value = word.partition("=")
        yield key, value


def flows(link: str) -> list[Flow]:
    """Return who writes to whom on *link*: ``flows=0>2,1>2``, or node 0 to node 1."""
    asked = dict(_settings(link)).get("flows", "0>1")
    return [(int(flow.partition(">")[0]), int(flow.partition(">")[2])) for flow in asked.split(",")]


def composed(backend: str, link: str, target: str) -> Config:
    """Return the configuration of *link*."""
    from pdsim.config.compose import compose

    return compose([f"target={target}", *_words(backend, link)])


def _words(backend: str, link: str) -> list[str]:
    changed = [f"hw.nodes={v}" if k == "nodes" else f"hw.link.{k}={v}" for k, v in _settings(link) if k != "flows"]
    return [f"backend={backend}", "hw=link", *changed]


# --- measurements --------------------------------------------------------------------------------------------------


def measure(path: Path, links: Iterable[str], until: float = float("inf")) -> None:
    """Add to *path* what the engines take on each of *links*."""
    have = {(row["backend"], row["link"]) for row in read(path)}
    for link in links:
        for backend in BACKENDS:
            if (backend, link) not in have and time.monotonic() < until:
                every = points(link)
                found, late = times(composed(backend, link, "real"), flows(link), every)
                for flow, own in zip(flows(link), found, strict=True):
                    _append(path, [[*row, f"{late:.4f}"] for row in _rows(backend, link, flow, every, own)], COLUMNS)


def _rows(
    backend: str, link: str, flow: Flow, every: Sequence[Point], found: Sequence[Sequence[float]]
) -> Iterator[list[Any]]:
    for point, seconds in zip(every, found, strict=True):
        own = kept(point, seconds)
        numbers = [f"{value:.6g}" for value in (statistics.median(own), min(own), max(own))]
        way = f"{flow[0]}>{flow[1]}"
        yield [backend, link, way, *point[:3], *numbers, len(own), f"{os.getloadavg()[0]:.1f}"]


def _append(path: Path, rows: Sequence[Sequence[Any]], columns: Sequence[str]) -> None:
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if fresh:
            writer.writerow(columns)
        writer.writerows(rows)


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows of *path*, comments left out; none if it is not there."""
    if not path.exists():
        return []
    return list(csv.DictReader(line for line in path.read_text().splitlines() if not line.startswith("#")))


# --- validation ----------------------------------------------------------------------------------------------------

DESIGN = [
    "experiment=validate",
    "experiment.classes=[pair]",
    "experiment.size=[6KiB,24KiB,96KiB,384KiB,1536KiB,6MiB,16MiB]",
    "experiment.blocks=[1]",
    "experiment.repeat=15",
    "experiment.volume=96MiB",
    "experiment.jobs=1",
    "experiment.bounds.large=1MiB",
]
COMPARED = ("backend", "link", "size", "predicted", "measured", "predictions", "written", "began", "notes")


def validate(path: Path, links: Iterable[str], until: float = float("inf")) -> None:
    """Add to *path* what ``pdsim validate`` predicts and measures on each of *links*."""
    have = {(row["backend"], row["link"]) for row in read(path)}
    for link in links:
        for backend in BACKENDS:
            if (backend, link) not in have and time.monotonic() < until:
                _append(path, [[backend, link, *row] for row in _validated(backend, link)], COMPARED)


def _validated(backend: str, link: str) -> list[list[Any]]:
    """Return size, predicted and measured seconds of each point, and hash and times of the predictions."""
    from pdsim.cli.main import main

    with tempfile.TemporaryDirectory() as folder:
        main(["run", "-q", *DESIGN, "target=real", *_words(backend, link), f"output={folder}"])
        (made,) = Path(folder).iterdir()
        kept_in = ("expectations", "measurements", "summary")
        expected, found, summary = (json.loads((made / f"{name}.json").read_text()) for name in kept_in)
    assert found["expectations"] == expected["sha256"]
    seconds = {value["label"]: value["value"] for value in found["measured"]}
    about = [expected["sha256"][:16], expected["written"], found["began"]]
    about.append("; ".join(note for note in summary["notes"] if note.startswith("the link was late")))
    return [
        [each["nbytes"], f"{each['value']:.6g}", f"{seconds[each['label']]:.6g}", *about]
        for each in expected["expected"]
    ]


# --- recovery ------------------------------------------------------------------------------------------------------

RUNS = {"": (0.0,), "cut": (0.1, 0.5, 1.0), "stall": (0.3, 1.0)}  # what happens, and for how many seconds
REPEATS = {"": 3, "cut": 5, "stall": 3}
AT, SIZE = 1.0, 16 << 20
RECOVERY = ("backend", "link", "kind", "length", "run", "size", "seconds", "load", "late")


def recover(path: Path, links: Iterable[str], until: float = float("inf")) -> None:
    """Add to *path* how long transfers take that are disturbed 0.2 s after they began, on each of *links*."""
    have = {tuple(row[name] for name in RECOVERY[:5]) for row in read(path)}
    for link in links:
        for backend in BACKENDS:
            for kind, length, run in [(k, s, n) for k in RUNS for s in RUNS[k] for n in range(REPEATS[k])]:
                key = (backend, link, kind, str(length), str(run))
                if key not in have and time.monotonic() < until:
                    seconds, late = disturbed(backend, link, "real", kind, length)
                    row = [*key, SIZE, f"{seconds:.6g}", f"{os.getloadavg()[0]:.1f}", f"{late:.4f}"]
                    _append(path, [row], RECOVERY)


def disturbed(backend: str, link: str, target: str, kind: str = "", length: float = 0.0) -> tuple[float, float]:
    """Return the seconds of one transfer that begins 1 s after the start, with what happens to it 0.2 s later.

    And the share of packets that were late.
    """
    config = composed(backend, link, target)
    if kind:
        changes = (LinkChange(kind=kind, start=AT + 0.2, end=AT + 0.2 + length),)
        assert config.hw.link is not None
        config = replace(config, hw=replace(config.hw, link=replace(config.hw.link, changes=changes)))
    found, late = times(config, flows(link), [(1, SIZE, AT, 1)])
    return found[0][0][0], late


def hurry() -> None:
    """Go before all else that this machine does, with all ranks."""
    from backends.jobs.affinity import keep_for

    os.nice(-20)  # with autogroups, among the processes of its control group only
    keep_for(1e-4)


def main(what: str, path: Path, rest: Sequence[str]) -> None:
    """Do *what*, as the module says."""
    hurry()
    if what == "measure":
        measure(path, rest or UNSEEN)
    elif what == "recover":
        recover(path, rest or [*DISTURBED_UNSEEN, *DISTURBED])
    elif what == "validate":
        validate(path, rest or VALIDATED)
    elif what == "all":
        until = time.monotonic() + float(rest[0])
        measure(path / "known_link_fit.csv", FITTED, until)
        validate(path / "known_link_validate.csv", VALIDATED, until)
        measure(path / "known_link.csv", [*UNSEEN, *SHAPED], until)
        recover(path / "known_link_recovery.csv", [*DISTURBED_UNSEEN, *DISTURBED], until)
    else:
        raise SystemExit(f"{what} is none of validate, measure, recover, all")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
