# SPDX-License-Identifier: Apache-2.0
"""Build the compiled wheel, and measure or test it in an environment of its own.

    python -m benchmarks.compiled [--requests 500] [--case NAME ...] [--wheel FILE]
    PDSIM_COMPILE_LEVEL=0 python -m benchmarks.compiled --tests

The wheel is built as `PDSIM_COMPILE=1 pip wheel .` does (`hatch_build.py`), in a folder that is thrown away, with
the packages that are installed here, which its environment borrows.  `benchmarks.serve` prints its table of the
cases with the pure pdsim and with the compiled one, two times by turns.

With --tests, as in CI: `RUNS` of `benchmarks.fixed_runs` must give there what is recorded of the pure pdsim, to the
last bit, and `TESTS` must pass.
"""

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.serve import CASES

ROOT = Path(__file__).resolve().parents[1]
RUNS = (
    *("serve-tp4-tp4", "serve-tp4-tp2-sliced", "serve-tp4-tp2-staged", "serve-pulled", "serve-dp8-mla"),
    "serve-state-aborts",
    *("serve-tracked-state", "transfer-rdma", "handoff-paths"),
)
"""Both sides' programs, pages, state and contents, over every path."""
TESTS = (
    *(f"tests/sim/test_{name}.py" for name in ("endpoint", "hosts", "memory", "model", "posting")),
    *(f"tests/kv/test_{name}.py" for name in ("messages", "pages", "plan", "push", "receiver")),
    "tests/test_clock.py",
)
"""Tests of modules that are compiled, and of the messages that these pass on: about ten seconds."""
CHECK = "import pdsim.core.clock, sys; sys.exit(pdsim.core.clock.__file__.endswith('.py') and 'not compiled')"


def wheel(folder: Path) -> Path:
    """Build the compiled wheel in *folder* and return it."""
    options = ["-q", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    pip = [sys.executable, "-m", "pip", "wheel", *options, str(ROOT)]
    subprocess.run(pip, check=True, env=os.environ | {"PDSIM_COMPILE": "1"})
    return next(folder.glob("pdsim-*.whl"))


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


def called(python: Path | str, *words: str, path: str = "") -> bool:
    """Return whether *python* with *words* ends well; modules of *path* come before those that are installed."""
    environ = os.environ | {"PYTHONSAFEPATH": "1", "PYTHONPATH": path}  # the folder that it is called in has a pdsim
    return subprocess.run([str(python), *words], check=False, cwd=ROOT, env=environ).returncode == 0


def tested(python: Path) -> bool:
    """Return whether `RUNS` and `TESTS` are in the environment of *python* what they are here."""
    runs = ["-m", "benchmarks.fixed_runs", "check", "data/benchmarks/fixed_runs.json"]
    tests = ["-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "--import-mode=append", *TESTS]
    return called(python, *runs, *(f"--run={name}" for name in RUNS)) and called(python, *tests)


def main(argv: Sequence[str] | None = None) -> int:
    """Build, then measure or test; return 1 if anything fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500, help="of each case")
    parser.add_argument("--case", action="append", choices=CASES, help="this case only; repeatable")
    parser.add_argument("--wheel", type=Path, help="one that was built before")
    parser.add_argument("--tests", action="store_true", help="fixed runs and tests, instead of times")
    options = parser.parse_args(argv)
    cases = [f"--case={name}" for name in options.case or ("main", "tp4-tp2", "tp4-tp2-staged")]
    with tempfile.TemporaryDirectory() as scratch:
        compiled = environment(Path(scratch, "environment"), options.wheel or wheel(Path(scratch)))
        if not called(compiled, "-c", CHECK):
            return 1
        if options.tests:
            return 0 if tested(compiled) else 1
        ended = []
        for name, python, path in (("pure", sys.executable, str(ROOT)), ("compiled", compiled, "")) * 2:
            print(name, flush=True)
            words = ("-m", "benchmarks.serve", f"--requests={options.requests}", *cases)
            ended.append(called(python, *words, path=path))
        return 0 if all(ended) else 1


if __name__ == "__main__":
    sys.exit(main())
