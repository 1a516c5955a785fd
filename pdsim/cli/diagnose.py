# SPDX-License-Identifier: Apache-2.0
"""`pdsim diagnose`: measured transfers beside what the engine's model expects, and what explains the difference."""

import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from http.client import HTTPException
from json import dumps
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import NamedTemporaryFile
from threading import Thread
from typing import Any

from pdsim.calibration import diagnosis, importers, pasted
from pdsim.calibration import samples as points
from pdsim.calibration.calibrate import base_of, link_of
from pdsim.calibration.diagnosis import EXPECTED, TOLERANCE, Explanation, Timing
from pdsim.calibration.pasted import Fact
from pdsim.calibration.samples import Sample
from pdsim.cli.help import parse
from pdsim.config import Config
from pdsim.config.compose import CommandLine, composed
from pdsim.core import files, plugins
from pdsim.core.errors import ConfigError
from pdsim.core.units import Rate, format_size, format_time
from pdsim.hardware.costs import EngineModel
from pdsim.recipes import wire_chosen
from pdsim.results import terminal
from pdsim.results.kept import KeptRun
from pdsim.results.record import Table
from pdsim.transfer import TransferRecord

_LARGEST = 64 << 20  # bytes of a metrics page
_UNEXPLAINED = 0.5  # beyond it the best cause is none
_PATIENCE = 10.0  # seconds for one
_FULL = 1 << 16  # bytes of messages that fill a wire


def diagnose(words: Sequence[str]) -> int:
    """Print what slows the transfers in the file, folder or at the URL of *words*; return the exit status.

    Raise a `ConfigError` for what holds no transfers, and for a deployment that cannot be composed.
    """
    rest, asked = parse("diagnose", words)
    sources, overrides = [word for word in rest if "=" not in word], [word for word in rest if "=" in word]
    if not sources:
        raise ConfigError("diagnose needs a log, folder or URL; see pdsim diagnose --help")
    texts = {
        source: files.given(path, "name a text file") if (path := Path(source)).is_file() else ""
        for source in sources
    }
    if not (timed := [source for source, text in texts.items() if not _tells(text)]):
        raise ConfigError(f"{sources[0]} holds no times of transfers; name a log or a bench beside it")
    samples, config = _measured(timed[0], overrides, asked)
    for source in timed[1:]:
        samples += _measured(source, overrides, asked)[0]
    at = asked.get("--path", "") or ("intra" if config.backend.intra and config.hw.nodes == 1 else "inter")
    if at not in ("intra", "inter"):
        raise ConfigError(f"--path {at}: must be intra or inter")
    facts = _facts("\n".join(texts.values()), config, at)
    model, line = _expected(config, at)
    hw, tcp = config.hw, _over_tcp(config, overrides, asked, at)
    engine = [one for one in samples if not one.bare]
    if not engine:
        raise ConfigError(f"{sources[0]} measures the wire alone; name what the engine took beside it")
    samples = [*engine, *_widest([one for one in samples if one.bare], threads := engine[0].concurrency)]
    if threads > 1:  # each posts its own, and all share the links
        model, line = _of_threads(model, threads), line / threads
        tcp = tcp and _of_threads(tcp, threads)
        hw = replace(hw, host=replace(hw.host, tcp_rate=hw.host.tcp_rate / threads))
    timings = diagnosis.timings(engine, model, line)
    ranked = diagnosis.explanations(samples, model, hw, line, tcp, facts)
    if "--json" in asked:
        about = {"backend": config.backend.name, "hw": config.hw.name, "path": at}
        terminal.show_lines(
            dumps(
                about
                | {"transfers": list(map(asdict, timings)), "causes": list(map(asdict, ranked)), "facts": facts}
            )
        )
        return 0
    shared = f", {threads} threads that share the links" if threads > 1 else ""
    terminal.show_lines(f"{config.backend.name} on {config.hw.name}, {at}: measured beside the model{shared}")
    names = {"hw": config.hw.name, "backend": config.backend.name}
    unnamed = [
        f"{key}={name}" for key, name in names.items() if not any(one.startswith(f"{key}=") for one in overrides)
    ]
    if unnamed and not Path(timed[0]).is_dir():
        terminal.show_lines(f"warning: {' and '.join(unnamed)} by default; name those that the times are of")
    terminal.show_table(_timings(timings), definitions=False)
    terminal.show_lines(*_verdict(ranked, timings))
    terminal.show_table(_causes(ranked), definitions=False)
    terminal.show_lines(*(f"seen: {one.what} ({_speaks(one)})" for one in facts))
    if fewer := _fewer(timings, model, line):
        terminal.show_lines(fewer)
    return 0


def _tells(text: str) -> bool:
    # whether it has no times, but what tools say about the machine
    return bool(text and not importers.tool_of(text) and pasted.SIGN.search(text))


def _facts(text: str, config: Config, at: str) -> list[Fact]:
    # beside what tools said, the wire that variables choose, as `pdsim recipe` takes it
    facts, chosen = pasted.facts(text, config.hw, local=at == "intra"), pasted.variables(text)
    for variable, keys in wire_chosen(chosen, config.backend.name).items():
        over_tcp = keys.get("backend", "").endswith("_tcp") and (at == "inter" or "tcp" in variable.lower())
        if over_tcp or (at == "inter" and keys.get("backend.inter.path") == "tcp"):
            facts.append(Fact("over TCP", variable))
    return facts


def _speaks(one: Fact) -> str:
    return f"speaks for {one.cause}{f', {one.factor:.3g} times' * (one.factor > 1.0)}"


def _measured(source: str, overrides: Sequence[str], asked: Mapping[str, Any]) -> tuple[list[Sample], Config]:
    # transfers from one rank to another alone: others slow each other, which no cause here is about
    tool = asked.get("--format", "")
    if source.startswith(("http://", "https://")):
        samples = _fetched(source, tool)
    elif (path := Path(source)).is_dir():
        rows = KeptRun(path).transfers.to_pylist()
        names = dict(zip(TransferRecord._fields, TransferRecord._fields, strict=True)) | {
            "descriptors": "batch_size"
        }
        samples = points.from_transfers(
            [[TransferRecord(**{name: row[column] for name, column in names.items()}) for row in rows]]
        )
        config = composed(CommandLine.of(list(overrides), {**asked, "--config-path": path}))
        return _alone(samples, source), config
    else:
        samples = list(importers.read(path, tool).rows)
        if pairs := [one for one in samples if one.pattern == "pair" and one.flows == 1]:
            threads = min((one.concurrency for one in pairs if not one.bare), default=1)
            samples = [one for one in pairs if one.bare or one.concurrency == threads]
            return samples, _composed([*overrides, "experiment=transfer"], asked)
    return _alone(samples, source), _composed([*overrides, "experiment=transfer"], asked)


def _widest(bare: Sequence[Sample], threads: int) -> list[Sample]:
    # the quickest of each memory, as one of *threads* transfers that share the wire; messages decide small ones
    best: dict[str, Sample] = {}
    large = [one for one in bare if one.size >= _FULL]
    for one in sorted(large, key=lambda one: one.seconds / (one.blocks * one.size * one.concurrency)):
        best.setdefault(one.memory, replace(one, seconds=one.seconds / one.concurrency * threads))
    return list(best.values())


def _of_threads(model: EngineModel, threads: int) -> EngineModel:
    return replace(model, queue_rate=model.queue_rate / threads)


def _composed(words: list[str], asked: Mapping[str, Any]) -> Config:
    return composed(CommandLine.of(words, asked))


def _expected(config: Config, at: str) -> tuple[EngineModel, Rate]:
    # the engine's model, and the rate of its links; between nodes TCP takes the link of known rate, if there is one
    model, link = base_of(config.backend, at), config.hw.link
    line = link_of(config.hw, model.path)[1]
    if model.path == "rdma":
        nic = config.hw.nic
        return model.on_cards(nic.rate, nic.rails, nic.ports), line * nic.rails
    if link is None or (model.path, at) != ("tcp", "inter"):
        return model, line
    return replace(model, latency=model.latency + 2 * link.delay), min(line, link.forward(0))


def _alone(samples: Sequence[Sample], source: str) -> list[Sample]:
    alone = [one for one in samples if one.pattern == "pair" and one.concurrency == one.flows == 1]
    if not alone:
        way = "name a log, or a run with experiment.patterns=[pair]"
        raise ConfigError(f"{source} has no transfer of a pair alone; {way}")
    return alone


def _fetched(url: str, tool: str) -> list[Sample]:
    come: SimpleQueue[bytes | Exception] = SimpleQueue()

    def fetch() -> None:
        try:
            with urllib.request.urlopen(url, timeout=_PATIENCE) as page:  # noqa: S310  the scheme was looked at
                come.put(page.read(_LARGEST))
        except HTTPException as error:
            come.put(ValueError(f"no HTTP: {error}"))
        except (OSError, ValueError) as error:
            come.put(error)

    Thread(target=fetch, daemon=True).start()  # urllib's timeout is one of each read: a page may trickle for ever
    try:
        text = come.get(timeout=_PATIENCE)
    except Empty:
        text = TimeoutError(f"not all of it has come within {_PATIENCE:g} s")
    if isinstance(text, Exception):
        reason = " ".join(str(getattr(text, "reason", "") or text).split())
        raise ConfigError(f"{url}: {reason}; name the address of a server's /metrics") from text
    with NamedTemporaryFile(suffix=".txt") as file:
        file.write(text)
        file.flush()
        try:
            return list(importers.read(Path(file.name), tool).rows)
        except ConfigError as error:
            raise ConfigError(str(error).replace(file.name, url)) from error


def _over_tcp(config: Config, overrides: Sequence[str], asked: Mapping[str, Any], at: str) -> EngineModel | None:
    name = f"{config.backend.implementation}_tcp"
    if base_of(config.backend, at).path == "tcp" or name not in plugins.options("backend"):
        return None
    kept = [word for word in overrides if not word.startswith("backend")]
    other = _composed([*kept, f"hw={config.hw.name}", f"backend={name}", "experiment=transfer"], asked)
    return base_of(other.backend, at)


def _timings(timings: Sequence[Timing]) -> Table:
    heads = ("descriptors", "size", "measured", "expected", "times", "posting", "of it expected", "wire", "waiting")
    rows = [
        [
            one.sample.blocks,
            format_size(one.sample.size),
            format_time(one.sample.seconds),
            format_time(one.expected),
            f"{one.sample.seconds / one.expected:.2f}",
            format_time(one.sample.posting) if one.sample.posting else "-",
            format_time(one.posting),
            format_time(one.wire),
            format_time(one.waiting),
        ]
        for one in timings
    ]
    return Table("Transfers", dict.fromkeys(heads, ""), rows)


def _verdict(ranked: Sequence[Explanation], timings: Sequence[Timing]) -> list[str]:
    first, *others = ranked
    worst = max(timings, key=lambda one: one.sample.seconds / one.expected)
    slowest = worst.sample.seconds / worst.expected
    if slowest < 1.0 and first.unexplained > TOLERANCE:
        return [f"nothing is slow: every transfer is faster than the model, {1 / slowest:.2g} times or more"]
    alike = [one.cause for one in others if one.alike]
    if first.cause == EXPECTED and first.unexplained <= TOLERANCE:
        return [f"transfers are as expected, {first.unexplained:.0%} off in the mean"]
    if first.cause == EXPECTED or first.unexplained > _UNEXPLAINED:
        return [f"no single cause explains these times; {_said(first)} leaves {first.unexplained:.0%} in the mean"]
    lines = [f"likely: {_said(first)}; {first.remedy}"]
    if slowest > 1.0:
        took, takes = format_time(worst.sample.seconds), format_time(worst.expected)
        lines.append(f"without it {worst.sample.blocks} x {format_size(worst.sample.size)} take {takes}, not {took}")
    if alike:
        lines.append(f"or {', '.join(alike)}: only transfers of other sizes and numbers of descriptors tell which")
    return lines


def _said(one: Explanation) -> str:
    return one.cause if one.factor == 1.0 else f"{one.cause}, {one.factor:.3g} times"


def _causes(ranked: Sequence[Explanation]) -> Table:
    rows = [[one.cause, f"{one.factor:.3g}", f"{one.unexplained:.1%}", one.remedy] for one in ranked]
    return Table("Causes", dict.fromkeys(("cause", "factor", "unexplained", "what to look at"), ""), rows)


def _fewer(timings: Sequence[Timing], model: EngineModel, line: float) -> str:
    # where posting decides, what a quarter of the descriptors would take
    slow = max(timings, key=lambda one: one.sample.seconds)
    if slow.posting < slow.wire or slow.sample.blocks < 4:
        return ""
    blocks, read = slow.sample.blocks // 4, slow.sample.operation == "read"
    after = model.isolated_time(blocks, slow.sample.blocks * slow.sample.size, line, read=read)
    return (
        f"posting of {slow.sample.blocks} descriptors decides: with blocks four times as large a transfer takes "
        f"{format_time(after)} instead of {format_time(slow.expected)} (kv.page_size, like layouts, kv.staging=true)"
    )
