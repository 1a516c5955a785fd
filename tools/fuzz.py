# SPDX-License-Identifier: Apache-2.0
"""Feed what others write to whatever reads it, changed at random: ``python -m tools.fuzz --state FILE``.

Each family is a kind of input: messages, frames of the wire, traces, outputs of other tools, samples, calibrations,
configurations, overrides, folders of results and answers of servers over HTTP.  Input *i* of a family follows from
``--seed``, the family and *i* alone, so a run can be cut, resumed from its state file, and a finding repeated:
``--only FAMILY:I``.  A finding is an exception that is not the documented one, an error that is not of one line a
mistake, or an input that takes longer than `SLOW` seconds of processor time.  The exit status is 1 if there are
findings.
"""

import argparse
import copy
import io
import json
import re
import sys
import tempfile
import textwrap
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from math import inf
from pathlib import Path
from random import Random
from typing import Any, TextIO

from pdsim.core.errors import ConfigError, MessageError
from pdsim.core.files import data
from pdsim.results.record import Table

SLOW = 5.0
"""Seconds of processor time that reading one small input may take."""

SHARES = {
    "messages": 500_000,
    "wire": 350_000,
    "traces": 30_000,
    "tools": 30_000,
    "samples": 30_000,
    "calibrations": 25_000,
    "configurations": 25_000,
    "overrides": 20_000,
    "results": 2_000,
    "http": 50_000,
}
"""Inputs of each family in a whole run: 1,062,000."""

RECORDS = data("benchmarks", "fuzz")
"""State files of whole runs, each of a seed of its own."""

_PARTS = 1000
"""In which a family is tried; the state is written after each."""

_CHARACTERS = "0123456789.-+eE|:,{}[]()\"'#=$%&*!?/\\ \n\t\x00NaTrufl\u00e9\u2028\ud7ff"
_ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1 << 62, 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf"), "", "x", "1e9", "\x00",
    "400Gbps", "-3us", [], {}, [1], [None], {"a": 1}, {"kind": "stall"}, "${hw}", [[[]]], "???",
)  # fmt: skip


def edited(random: Random, text: str) -> str:
    """Return *text* with one to six pieces of it replaced, copied or left out."""
    for _ in range(random.randint(1, 6)):
        at, length = random.randint(0, len(text)), random.choice((0, 0, 1, 1, 2, 5, 12, 80))
        new = "".join(random.choices(_CHARACTERS, k=random.choice((0, 1, 1, 2, 4))))
        if random.random() < 0.2:
            start = random.randint(0, len(text))
            new = text[start : start + length]
        text = text[:at] + new + text[at + length :]
    return text


def torn(random: Random, payload: bytes) -> bytes:
    """Return *payload* with bytes changed, cut, repeated or put in; now and then nothing of it is left."""
    if random.random() < 0.05:
        return random.randbytes(random.randint(0, 64))
    damaged = bytearray(payload)
    for _ in range(random.randint(1, 4)):
        at = random.randint(0, len(damaged))
        kind = random.random()
        if kind < 0.5 and at < len(damaged):
            damaged[at] = random.randrange(256)
        elif kind < 0.7:
            del damaged[at : at + random.randint(1, 8)]
        else:
            damaged[at:at] = random.choice(
                (random.randbytes(random.randint(1, 9)), damaged[at : at + 9], b"\xc1", b"\xa3")
            )
    return bytes(damaged)


def miscounted(random: Random, payload: bytes) -> bytes:
    """Return *payload* with up to three of its numbers replaced by odd ones."""
    odd = b"-1", b"0", b"5", b"1.5", b"true", b"null", b"1e308", b"%d" % (1 << 62), b"9" * 400, b'"4"'
    for _ in range(random.randint(1, 3)):
        at = random.choice(list(re.finditer(rb"\d+", payload)))
        payload = payload[: at.start()] + random.choice(odd) + payload[at.end() :]
    return payload


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return where something is in a tree of mappings and lists."""
    below = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, item in below for place in places(item, (*at, key)))]


def changed(random: Random, value: Any) -> Any:
    """Return a copy of the tree *value* with one to three values replaced, put in under another key, or left out."""
    variants = {"": copy.deepcopy(value)}
    for _ in range(random.randint(1, 3)):
        place = ("", *random.choice(places(variants[""])))
        inner: Any = variants
        for key in place[:-1]:
            inner = inner[key]
        kind, odd = random.random(), copy.deepcopy(random.choice(_ODD))
        if kind < 0.8:
            inner[place[-1]] = odd
        elif kind < 0.9 and isinstance(inner[place[-1]], dict):
            inner[place[-1]]["".join(random.choices("abz.é", k=3))] = odd
        elif len(place) > 1:
            del inner[place[-1]]
    return variants[""]


def refused_in_one_line(act: Callable[..., Any], *arguments: Any) -> None:
    """Call *act*; what it may raise is a `ConfigError` of one line a mistake, none of them empty."""
    try:
        act(*arguments)
    except ConfigError as error:
        if not all(line.strip() for line in str(error).split("\n")):
            raise AssertionError(f"an empty line in {error!r}") from error


class Bench:
    """What families share: valid inputs, and a folder to write into."""

    def __init__(self, folder: Path) -> None:
        from tools import fuzz_inputs as right

        self.folder = folder
        self.path = folder / "input"
        self.right = right
        self.kept = right.kept_run(folder / "kept")

    def messages(self, random: Random) -> None:
        """Read a payload of the control channel or of a notification."""
        from pdsim.kv.messages import decode

        try:
            decode(torn(random, random.choice(self.right.payloads())))
        except MessageError:
            return

    def wire(self, random: Random) -> None:
        """Read frames of the connections between endpoints, and the address of one."""
        from backends.base.control import _card, fields
        from pdsim.core.errors import TransferError

        kind = random.randrange(3)
        try:
            if kind == 0:
                kinds: list[Any] = random.choices((str, int), k=2)
                fields([torn(random, b"12") for _ in range(random.randint(0, 3))], *kinds)
            elif kind == 1:
                _card("a", [torn(random, self.right.card()) for _ in range(random.choice((0, 1, 1, 1, 2)))])
            else:
                self.right.endpoint().connect(torn(random, self.right.address()))
        except (MessageError, TransferError):
            return

    def traces(self, random: Random) -> None:
        """Read a trace of Mooncake or Azure."""
        from pdsim.serving.settings import Workload
        from pdsim.serving.workload import load

        self._damage(random, random.choice(self.right.TRACES))
        refused_in_one_line(load, Workload(trace=str(self.path)), 0, 1000)

    def tools(self, random: Random) -> None:
        """Read the output of another tool."""
        from pdsim.calibration import importers

        self._damage(random, random.choice(self.right.outputs()))
        refused_in_one_line(importers.read, self.path, random.choice(("", *importers.FORMATS)))

    def samples(self, random: Random) -> None:
        """Read samples of a calibration."""
        from pdsim.calibration import samples

        self._damage(random, self.right.SAMPLES)
        refused_in_one_line(samples.read, self.path)

    def calibrations(self, random: Random) -> None:
        """Type a calibration in a configuration."""
        from pdsim.config import load

        values = {**self.right.CONFIG, "calibration": changed(random, self.right.CALIBRATION)}
        refused_in_one_line(load, values)

    def configurations(self, random: Random) -> None:
        """Type a composed configuration."""
        from pdsim.config import load

        values = changed(random, self.right.CONFIG)
        if isinstance(values, dict):
            refused_in_one_line(load, values)

    def overrides(self, random: Random) -> None:
        """Read what is typed, up to Hydra's grammar."""
        from hydra.core.override_parser.overrides_parser import OverridesParser
        from hydra.errors import OverrideParseException

        from pdsim.cli.help import parse
        from pdsim.config import compose

        words = [edited(random, random.choice(self.right.WORDS)) for _ in range(random.randint(1, 3))]

        def act() -> None:
            overrides, _ = parse("run", words)
            ready = compose.ready(overrides)
            try:
                OverridesParser.create().parse_overrides(ready)
            except OverrideParseException as error:
                compose.explain(error)  # as Hydra would raise when it composes
                return
            compose.leaves(ready)
            compose.set_keys([word.lstrip("+") for word in overrides])

        refused_in_one_line(act)

    def results(self, random: Random) -> None:
        """Read a folder of results in every way there is."""
        from pdsim.results import compare, terminal
        from pdsim.results.store import FILES

        folder = self.folder / "sweep" / "run"
        folder.mkdir(parents=True, exist_ok=True)
        which = random.choice([name for name in FILES if not name.endswith("parquet")])
        for name in FILES:
            content = (self.kept / name).read_bytes()
            if name == which and name.endswith("json") and random.random() < 0.6:
                content = json.dumps(changed(random, json.loads(content))).encode()
            elif name == which:
                content = edited(random, content.decode()).encode(errors="surrogatepass")
            (folder / name).write_bytes(content)
        out = io.StringIO()
        for act in (
            lambda: terminal.show(folder, out),
            lambda: terminal.as_json(folder),
            lambda: _shown(compare.tables([self.kept, folder]), out),
            lambda: compare.as_dict([folder, self.kept]),
        ):
            refused_in_one_line(act)

    def http(self, random: Random) -> None:
        """Serve a request by a server, or a pair, whose answers are damaged, miscounted, late, or cut."""
        damage = random.choice((torn, torn, miscounted, lambda _, answer: answer))
        answers = [damage(random, answer) for answer in self.right.answers(random)]
        manner = random.choices(self.right.MANNERS, (20, 2, 2, 1))[0]
        served = self.right.served(answers, manner)
        known = "ok", "Aborted: ", "Error: ", "HTTP ", "Malformed: ", "ServerLost: ", "Timeout: "
        if not served.status.startswith(known) or len(served.status.splitlines()) > 1:
            raise AssertionError(f"the request ended with {served.status!r}")
        if served.status == "ok" and (served.tokens != 4 or served.first is None or min(served.gaps, default=0) < 0):
            raise AssertionError(f"a request that was served has {served}")
        if served.status.startswith("Timeout") and manner != "stalled":
            raise AssertionError(f"{manner}, but {served.status}")

    def _damage(self, random: Random, right: str) -> None:
        if random.random() < 0.05:
            self.path.write_bytes(torn(random, right[:200].encode()))
        else:
            self.path.write_text(edited(random, right), encoding="utf-8", errors="surrogatepass")


FAMILIES: dict[str, Callable[[Bench, Random], None]] = {name: getattr(Bench, name) for name in SHARES}


def _shown(tables: Iterable[Table], out: TextIO) -> None:
    from pdsim.results import terminal

    for each in tables:
        terminal.show_table(each, out)


def one(bench: Bench, family: str, seed: int, number: int) -> str:
    """Try input *number* of *family*; return "" or the finding, in one line."""
    began = time.process_time()
    try:
        FAMILIES[family](bench, Random(f"{seed}/{family}/{number}"))
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {str(error)[:160]!r} in {Path(where.filename).name}:{where.lineno}"
    took = time.process_time() - began
    return f"took {took:.1f} s" if took > SLOW else ""


def lines() -> Iterator[str]:
    """Yield the number of inputs of the runs in `RECORDS`, by family, and of their findings."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RECORDS.glob("*.json"))]
    done = sum((Counter(run["done"]) for run in runs), Counter[str]())
    each = ", ".join(f"{family} {count:,}" for family, count in done.most_common())
    named = [f"{family}:{number}" for run in runs for family, number, _ in run["findings"]]
    yield from textwrap.wrap(f"Inputs: {done.total():,} ({each}); findings: {', '.join(named) or 'none'}.", 117)


def main(arguments: list[str] | None = None) -> int:
    """Try all inputs that the state file does not have yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, help="file that says how far each family is, and what was found")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of inputs")
    parser.add_argument("--families", default=",".join(SHARES))
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--seconds", type=float, default=inf, help="after which no more inputs are begun")
    parser.add_argument("--only", help="FAMILY:I, whose exception is shown")
    options = parser.parse_args(arguments)
    if options.state is None and not options.only:
        parser.error("--state is missing: name a file")
    with tempfile.TemporaryDirectory() as folder:
        if options.only:
            family, _, number = options.only.partition(":")
            FAMILIES[family](_bench(folder), Random(f"{options.seed}/{family}/{number}"))
            return 0
        return _all(options, folder)


@cache
def _bench(folder: str) -> Bench:
    return Bench(Path(tempfile.mkdtemp(dir=folder)))  # one for each process


def _block(folder: str, until: float, seed: int, block: tuple[str, int, int]) -> tuple[str, int, list[list[Any]]]:
    # The family, the number after its last input, or 0 if time was over, and what was found.
    family, first, end = block
    if time.monotonic() > until:
        return family, 0, []
    tried = ((number, one(_bench(folder), family, seed, number)) for number in range(first, end))
    return family, end, [[family, number, problem] for number, problem in tried if problem]


def _all(options: argparse.Namespace, folder: str) -> int:
    path: Path = options.state
    known = json.loads(path.read_text()) if path.exists() else {"seed": options.seed, "done": {}, "findings": []}
    if known["seed"] != options.seed:
        sys.exit(f"--state {path} is of --seed {known['seed']}: its inputs and these do not add up")
    done: dict[str, int] = known["done"]
    blocks: list[tuple[float, tuple[str, int, int]]] = []
    for family in options.families.split(","):
        count = int(SHARES[family] * options.scale)
        size = max(1, count // _PARTS)
        firsts = range(done.setdefault(family, 0), count, size)
        blocks += [(first / count, (family, first, min(first + size, count))) for first in firsts]
    order = [block for _, block in sorted(blocks)]  # families keep step, if time is short
    tried = partial(_block, folder, time.monotonic() + options.seconds, options.seed)
    with ProcessPoolExecutor(options.workers) as pool:
        for family, end, findings in pool.map(tried, order):
            done[family] = max(done[family], end)
            known["findings"] += findings
            for _, number, problem in findings:
                print(f"{family}:{number} {problem}", flush=True)
            path.write_text(json.dumps(known))
    for family, count in done.items():
        print(f"{family}: {count} inputs")
    print(f"{sum(done.values())} inputs, {len(known['findings'])} findings")
    return 1 if known["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
