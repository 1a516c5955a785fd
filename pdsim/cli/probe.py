# SPDX-License-Identifier: Apache-2.0
"""`pdsim probe`: measure in some minutes what works on this machine, and write one bundle that others can fit.

Each part is a command of pdsim's own in a process of its own, so that an engine that crashes or hangs ends its part
alone: ``calibrate --quick`` for each engine, ``profile``, and ``experiment=allgather``.  The bundle is written anew
after each, and is `pdsim.calibration.bundle`'s.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from backends import registry
from backends.diagnosis import gpu_count, rdma_devices
from backends.profiling import runner
from pdsim.calibration import bundle
from pdsim.calibration.definition import measure
from pdsim.cli.doctor import report
from pdsim.cli.help import parse
from pdsim.config import Config
from pdsim.config.compose import CommandLine, composed
from pdsim.core import plugins
from pdsim.core.errors import ConfigError
from pdsim.core.units import format_size, format_time
from pdsim.results import record, schema, store, terminal
from pdsim.results.record import Table

_TRANSFERS, _FORWARDS, _GATHERS = 180.0, 150.0, 60.0
"""Seconds that each part needs at most, where there is enough time."""
_START = 40.0  # of these, what `profile` takes beside measuring
_GRACE = 10.0  # seconds for a part to put its processes away
_NIC = Path("/sys/class/infiniband")

Files = Mapping[str, str]


@dataclass(frozen=True)
class _Part:
    name: str
    words: Sequence[str]  # of the command, {limit} for its seconds
    most: float  # seconds
    kept: Callable[[Path], Files]  # from its folder, what there is for the bundle, however it ended


def probe(words: Sequence[str]) -> int:
    """Measure what works here and write the bundle; return 1 if a part failed, else 0.

    Raise a `ConfigError` for a machine that is not this one, and if nothing can be measured.
    """
    overrides, asked = parse("probe", words)
    if not (minutes := asked.get("--minutes", 10)):
        raise ConfigError("--minutes 0: must be >= 1")
    if not any(word.startswith("hw=") for word in overrides):
        if gpu_count() or rdma_devices() or Path("/dev/kfd").exists():
            raise ConfigError(
                "probe needs hw= on a machine with GPUs or network cards: pdsim list hw, or --config-dir"
            )
        overrides = [*overrides, "hw=loopback"]
    began, to = time.monotonic(), store.make(asked.get("--to", Path()), "--to ")
    terminal.show_lines("looks for what works here ...")
    parts, lacking = _parts(overrides, asked)
    config = composed(CommandLine.of([*overrides, "experiment=transfer", "calibration=none"], asked))
    path = to / f"probe-{config.hw.name}.zip"
    end = began + 60.0 * minutes - _GRACE
    _show_plan(parts, lacking, end - time.monotonic())
    if not parts:
        raise ConfigError("nothing can be measured here; the lines above say why, pdsim doctor what would help")
    about, texts = _about(config, overrides), _texts(config, asked)
    done: list[dict[str, Any]] = [
        {"part": name, "status": "skipped", "why": bundle.bare(why)} for name, why in lacking
    ]

    def keep(part: _Part, folder: Path, status: str, why: str, seconds: float) -> None:
        more = part.kept(folder)
        texts.update(more)
        status = status if more or status == "interrupted" else "failed"
        entry = {"part": part.name, "status": status, "why": bundle.bare(why), "seconds": round(seconds, 1)}
        done.append(entry | {"files": list(more)})
        bundle.write(path, {**about, "parts": done, "seconds": round(time.monotonic() - began, 1)}, texts)
        what = ", ".join(f"{text.count(chr(10)) - text.count('# ') - 1} rows" for text in more.values()) or "nothing"
        terminal.show_lines(f"{part.name}: {status}, {what} in {format_time(seconds)}{f'; {why}' if why else ''}")

    with TemporaryDirectory(prefix="pdsim-probe-") as work:
        for number, part in enumerate(parts):
            left, needed = end - time.monotonic(), sum(one.most for one in parts[number:])
            limit = part.most * min(1.0, max(left, 0.0) / needed)
            folder = Path(work, part.name.replace(" ", "-"))
            folder.mkdir()
            at, status, why = time.monotonic(), "interrupted", "ended by the user"
            try:
                status, why = _ran(part, folder, limit, asked)
            except KeyboardInterrupt:
                raise KeyboardInterrupt(
                    f"{path} holds the measurements of {number + 1} of {len(parts)} parts"
                ) from None
            finally:
                keep(part, folder, status, why, time.monotonic() - at)
    terminal.show_lines(
        f"bundle: {path}, {format_size(path.stat().st_size)}, after {format_time(time.monotonic() - began)}; look "
        f"into it before you give it away: unzip -p {path} | less"
    )
    if any(one.get("files") for one in done):
        terminal.show_lines(f"to fit it: pdsim calibrate --from {path}")
    return 1 if any(one["status"] == "failed" for one in done) else 0


def _parts(overrides: Sequence[str], asked: Mapping[str, Any]) -> tuple[list[_Part], list[tuple[str, str]]]:
    # what can be measured here, what cannot and why; engines of GPUs first, should time be short
    parts, lacking = list[_Part](), list[tuple[str, str]]()

    def composes(name: str, *words: str) -> Config | None:
        try:
            return composed(CommandLine.of([*overrides, "target=real", *words], asked))
        except ConfigError as error:
            lacking.append((name, str(error).splitlines()[0]))
            return None

    chosen = [word.partition("=")[2] for word in overrides if word.startswith("backend=")]
    for name in chosen or registry.backends():
        words = [f"backend={name}", "experiment=transfer", "calibration=none"]
        if composes(f"transfers {name}", *words) is not None:
            command = ["calibrate", "target=real", f"backend={name}", "--quick", "--no-fit"]
            parts.append(_Part(f"transfers {name}", command, _TRANSFERS, _samples))
    on_gpus = composed(CommandLine.of(list(overrides), asked)).hw.gpu is not None
    parts.sort(key=lambda one: on_gpus and one.name.endswith(("_tcp", "_shm")))
    try:
        runner.device("cuda")
        command = ["profile", "--limit", "{limit}", "--name", "forwards"]
        parts.insert(1, _Part("forwards", command, _FORWARDS, _forwards))
    except ConfigError as error:
        lacking.append(("forwards", str(error)))
    for name in plugins.options("collective"):
        config = composes(f"all-gathers {name}", f"collective={name}", "experiment=allgather")
        if config is None or config.collective is None:
            continue
        if why := plugins.missing(plugins.COLLECTIVES, config.collective.implementation):
            lacking.append((f"all-gathers {name}", why))
            continue
        memory = plugins.resolve(plugins.COLLECTIVES, config.collective.implementation).memory
        if (memory == "gpu") != on_gpus:
            lacking.append(
                (f"all-gathers {name}", f"it gathers memory of the {memory}, and hw={config.hw.name} has none")
            )
            continue
        gpus = config.hw.gpus * config.hw.nodes
        ranks = ",".join(str(count) for count in (2, 4, 8) if count <= max(gpus, 2))
        sizes = "[4096,65536,1048576,16777216]"
        command = ["run", "target=real", "experiment=allgather", f"collective={name}", f"experiment.ranks=[{ranks}]"]
        command += ["experiment.growth=false", f"experiment.size={sizes}", "--quiet"]
        parts.append(_Part(f"all-gathers {name}", command, _GATHERS, _gathers))
    every = [word for word in overrides if not word.startswith(("backend=", "output=", "target="))]
    return [_Part(one.name, [*one.words, *every], one.most, one.kept) for one in parts], lacking


def _show_plan(parts: Sequence[_Part], lacking: Sequence[tuple[str, str]], left: float) -> None:
    share = min(1.0, left / max(sum(one.most for one in parts), 1.0))
    rows = [[one.name, f"pdsim {one.words[0]}", format_time(share * one.most)] for one in parts]
    terminal.show_table(Table("Plan", dict.fromkeys(("part", "by", "at most"), ""), rows), definitions=False)
    reasons: dict[str, list[str]] = {}
    for name, why in lacking:  # those of several engines are often one
        reasons.setdefault(why.partition("; ")[0].removeprefix(f"backend={name.split()[-1]} "), []).append(name)
    terminal.show_lines(
        *(f"not measured: {', '.join(names)}: {why}" for why, names in reasons.items()),
        f"ends within {format_time(max(left, 0.0) + _GRACE)}",
    )


def _ran(part: _Part, folder: Path, limit: float, asked: Mapping[str, Any]) -> tuple[str, str]:
    # its status, and why it is not all there
    own = [f"--config-dir={asked['--config-dir'].resolve()}"] if "--config-dir" in asked else []
    words = [word.replace("{limit}", f"{min(110.0, max(5.0, limit - _START)):.0f}s") for word in part.words]
    command = [sys.executable, "-m", "pdsim", *words, *own, *([] if words[0] == "profile" else ["output=runs"])]
    log, at = folder / "log", time.monotonic()
    with log.open("wb") as file, terminal.Progress(f"probe {part.name}", at_once=True) as bar:
        process = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
        try:
            while process.poll() is None:
                time.sleep(0.1)
                bar((passed := time.monotonic() - at) / limit, f"at most {format_time(limit)}")
                if passed > limit:
                    return "partly", f"stopped after {format_time(limit)}; raise --minutes"
        finally:
            _end(process)
    if not process.returncode:
        return "measured", ""
    lines = log.read_text("utf-8", "replace").splitlines() or [f"exit status {process.returncode}"]
    return "partly", next((line for line in reversed(lines) if line.startswith("pdsim: ")), lines[-1])


def _end(process: subprocess.Popen[bytes]) -> None:
    # SIGTERM lets it stop its ranks and keep its samples
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _samples(folder: Path) -> Files:
    paths = [*folder.glob("*.csv")]
    return {
        f"transfers/{path.name.replace('.partial', '')}": bundle.bare_samples(path.read_text("utf-8"))
        for path in paths
    }


def _forwards(folder: Path) -> Files:
    return {f"compute/{path.name}": bundle.bare_samples(path.read_text("utf-8")) for path in folder.glob("*.csv")}


def _gathers(folder: Path) -> Files:
    # a row for each rank's part of each, as data/collective has them
    lines = ["rank,label,bytes,submitted_us,seen_us"]
    for path in folder.glob("runs/*/transfers.parquet"):
        lines += [
            f"{row['target']},{row['label']},{row['nbytes']},{row['submitted'] * 1e6:.3f},{row['seen'] * 1e6:.3f}"
            for row in schema.read_table(path).to_pylist()
        ]
    return {f"gathers/{folder.name.removeprefix('all-gathers-')}.csv": "\n".join([*lines, ""])} if lines[1:] else {}


def _about(config: Config, overrides: Sequence[str]) -> dict[str, Any]:
    here, turns = record.here(), measure()
    return {
        "format": 1,
        "pdsim": record.environment()["pdsim"],
        "hw": config.hw.name,
        "words": [word for word in overrides if word.startswith("hw.")],
        "turn": f"{turns[0] * 1e9:.2f}ns",
        **{key: bundle.bare(value) for key, value in here.items()},
        "cards": _cards(),
    }


def _cards() -> list[dict[str, str]]:
    # rate, kind of link and socket of each port of each RDMA device, as Linux says them
    cards = []
    for name in rdma_devices():
        for port in sorted((_NIC / name / "ports").glob("*")):
            files = {
                "rate": port / "rate",
                "link": port / "link_layer",
                "numa": _NIC / name / "device" / "numa_node",
            }
            said = {key: path.read_text().strip() for key, path in files.items() if path.is_file()}
            cards.append({"card": f"{name}:{port.name}", **said})
    return cards


def _texts(config: Config, asked: Mapping[str, Any]) -> dict[str, str]:
    texts = {"doctor.txt": bundle.bare(report())}
    own = asked["--config-dir"] / "hw" / f"{config.hw.name}.yaml" if "--config-dir" in asked else None
    if own is not None and own.is_file():
        texts["hw.yaml"] = bundle.bare(own.read_text("utf-8"))
    return texts
