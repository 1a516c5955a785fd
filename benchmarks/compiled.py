# SPDX-License-Identifier: Apache-2.0
"""Build the compiled wheel, run jobs with and without it, and compare them: the same bits, in how much less time.

    python -m benchmarks.compiled [--requests 500] [--case NAME ...] [--wheel FILE]
    PDSIM_COMPILE_LEVEL=0 python -m benchmarks.compiled --tests

The wheel is built as `PDSIM_COMPILE=1 pip wheel .` does (`hatch_build.py`), in a folder that is thrown away, with
the packages that are installed here.  Cases are those of `benchmarks.serve`; seconds are of the processor, pure and
compiled by turns.  Exits with 1 if a result differs.

With --tests, as in CI: the wheel is installed into an environment of its own, which borrows the packages of this
one; `RUNS` of `benchmarks.fixed_runs` must give there what is recorded of the pure pdsim, and `TESTS` must pass.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pdsim.core.clock
from benchmarks.serve import CASES, configuration, measure, overrides_of

ROOT = Path(__file__).resolve().parents[1]
RUNS = (
    *("serve-tp4-tp4", "serve-tp4-tp2-sliced", "serve-tp4-tp2-staged", "serve-pulled", "serve-dp8-mla"),
    "serve-state-aborts",
    *("serve-tracked-state", "transfer-rdma", "handoff-paths"),
)
"""Both sides' programs, pages, state and contents, over every path."""
TESTS = (
    *(f"tests/sim/test_{name}.py" for name in ("endpoint", "hosts", "link", "memory", "posting")),
    *(f"tests/kv/test_{name}.py" for name in ("messages", "pages", "plan", "push", "receiver", "rooms")),
    "tests/test_clock.py",
)
"""Tests of modules that are compiled, and of the messages that these pass on: about ten seconds."""


def digest(requests: Mapping[str, Sequence[Any]], transfers: Sequence[Any], links: Mapping[str, float]) -> str:
    """Return a hash of all values of a result, to the last bit."""
    sha = hashlib.sha256()
    for name, values in sorted(requests.items()):
        sha.update(repr((name, list(values))).encode())
    for record in transfers:
        sha.update(repr(record).encode())
    sha.update(repr(sorted(links.items())).encode())
    return sha.hexdigest()


def one(case: str, requests: int) -> dict[str, Any]:
    """Run *case* with the pdsim that is imported, and say which one that is, what came of it, and its seconds."""
    result, seconds = measure(configuration(overrides_of(CASES[case], None, requests)))
    assert result.outcome is not None
    marks = digest(result.requests, result.transfers, result.outcome.links)
    return {"compiled": pdsim.core.clock.__file__.endswith(".so"), "digest": marks, "seconds": seconds}


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
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def compare(site: Path, cases: Sequence[str], requests: int) -> bool:
    """Print a line for each of *cases*; return whether all results of the pdsim in *site* are those of the pure."""
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


def environment(folder: Path, built: Path) -> Path:
    """Install the wheel *built* into a new environment in *folder*, and return its Python.

    Other packages are those of the environment that this runs in, and `benchmarks` and `tests` this checkout's; they
    come after the wheel, so that nothing of pdsim is taken from either.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    borrowed = dict.fromkeys([*(sysconfig.get_path(name) for name in ("purelib", "platlib")), *_added(), str(ROOT)])
    (site / "borrowed.pth").write_text("\n".join(borrowed) + "\n")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", str(built)]
    subprocess.run(install, check=True)
    return python


def _added() -> list[str]:
    return [path for path in sys.path if path.endswith("site-packages")]


def tested(python: Path) -> bool:
    """Return whether `RUNS` and `TESTS` are in the environment of *python* what they are here."""
    environ = os.environ | {"PYTHONSAFEPATH": "1"}  # the folder that it is called in has a pdsim, too
    environ.pop("PYTHONPATH", None)
    code = "import pdsim.core.clock, sys; sys.exit(pdsim.core.clock.__file__.endswith('.py'))"
    runs = ["-m", "benchmarks.fixed_runs", "check", "data/benchmarks/fixed_runs.json"]
    tests = ["-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "--import-mode=append", *TESTS]
    commands = (["-c", code], [*runs, *(f"--run={name}" for name in RUNS)], tests)
    return all(
        subprocess.run([str(python), *words], check=False, cwd=ROOT, env=environ).returncode == 0
        for words in commands
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Build, run, compare; return 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500, help="of each case")
    parser.add_argument("--case", action="append", choices=CASES, help="this case only; repeatable")
    parser.add_argument("--wheel", type=Path, help="one that was built before")
    parser.add_argument("--tests", action="store_true", help="fixed runs and tests, instead of times")
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one:
        print(json.dumps(one(options.one, options.requests)))
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        built = options.wheel or wheel(Path(scratch))
        if options.tests:
            return 0 if tested(environment(Path(scratch, "environment"), built)) else 1
        site = Path(scratch, "site")
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(built)]
        subprocess.run(install, check=True)
        return 0 if compare(site, options.case or ["main", "tp4-tp2", "tp4-tp2-staged"], options.requests) else 1


if __name__ == "__main__":
    sys.exit(main())
