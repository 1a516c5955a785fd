"""Build the compiled wheel, run jobs with and without it, and compare them: the same bits, in how much less time.

    python -m benchmarks.compiled [--requests 500] [--case NAME ...] [--wheel FILE]

The wheel is built as `PDSIM_COMPILE=1 pip wheel .` does (`hatch_build.py`), in a folder that is thrown away, with
the packages that are installed here.  Cases are those of `benchmarks.serve`; seconds are of the processor, pure and
compiled by turns.  Exits with 1 if a result differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pdsim.clock
from benchmarks.serve import CASES, configuration, measure, overrides_of

ROOT = Path(__file__).resolve().parents[1]


def digest(requests: Mapping[str, Sequence[Any]], transfers: Sequence[Any], links: Mapping[str, float]) -> str:
    """Return a hash of all values of a result, to the last bit."""
    found = hashlib.sha256()
    for name, values in sorted(requests.items()):
        found.update(repr((name, list(values))).encode())
    for record in transfers:
        found.update(repr(record).encode())
    found.update(repr(sorted(links.items())).encode())
    return found.hexdigest()


def one(case: str, requests: int) -> dict[str, Any]:
    """Run *case* with the pdsim that is imported, and say which one that is, what came of it, and its seconds."""
    result, seconds = measure(configuration(overrides_of(CASES[case], None, requests)))
    assert result.outcome is not None
    marks = digest(result.requests, result.transfers, result.outcome.links)
    return {"compiled": pdsim.clock.__file__.endswith(".so"), "digest": marks, "seconds": seconds}


def wheel(folder: Path) -> Path:
    """Build the compiled wheel in *folder* and return it."""
    options = ["-q", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    pip = [sys.executable, "-m", "pip", "wheel", *options, str(ROOT)]
    subprocess.run(pip, check=True, env=os.environ | {"PDSIM_COMPILE": "1"})
    return next(folder.glob("pdsim-*.whl"))


def run(site: Path | None, case: str, requests: int) -> dict[str, Any]:
    """Return what `one` says in a process of its own, with the pdsim of *site* or of this checkout."""
    path = os.pathsep.join(map(str, [*([site] if site else []), ROOT]))
    command = [sys.executable, str(Path(__file__).resolve()), "--one", case, "--requests", str(requests)]
    done = subprocess.run(
        command, check=True, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, text=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def compare(site: Path, cases: Sequence[str], requests: int) -> bool:
    """Print a line for each of *cases*, and return whether all results of the pdsim in *site* are those of the pure."""
    same = True
    print(f"{'case':16}{'pure CPU s':>12}{'compiled':>10}{'times':>7}  results")
    for case in cases:
        pairs = [(run(None, case, requests), run(site, case, requests)) for _ in range(2)]
        pure, fast = (min(pair[i]["seconds"] for pair in pairs) for i in range(2))
        equal = all(one["digest"] == other["digest"] and other["compiled"] for one, other in pairs)
        same = same and equal
        print(
            f"{case:16}{pure:12.2f}{fast:10.2f}{pure / fast:7.2f}  {'equal' if equal else 'DIFFERENT'}", flush=True
        )
    return same


def main(argv: Sequence[str] | None = None) -> int:
    """Build, run, compare; return 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500, help="of each case")
    parser.add_argument("--case", action="append", choices=CASES, help="this case only; repeatable")
    parser.add_argument("--wheel", type=Path, help="one that was built before")
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one:
        print(json.dumps(one(options.one, options.requests)))
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        built = options.wheel or wheel(Path(scratch))
        site = Path(scratch, "site")
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(built)]
        subprocess.run(install, check=True)
        return 0 if compare(site, options.case or ["main", "tp4-tp2", "tp4-tp2-staged"], options.requests) else 1


if __name__ == "__main__":
    sys.exit(main())
