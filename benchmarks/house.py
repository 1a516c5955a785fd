# SPDX-License-Identifier: Apache-2.0
"""Count how easy pdsim's source is to enter, beside SimPy, httpx and fsspec.

    python -m benchmarks.house                       # the table: pdsim before, now, the three, and their median
    python -m benchmarks.house list                  # what the counts of pdsim count: files, lines, names
    python -m benchmarks.house measure [--site DIR]  # count the three again, from DIR or installed anew; keep it

pdsim is its packages `PACKAGES`, without tests and benchmarks.  `ROOMS` says which package may import which;
`tests/test_house.py` asserts it.  Figures are kept in `data/benchmarks/house.json`.
Those of pdsim before are of commit 6db8051, whose modules were given the rooms that they moved to.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.source_figures import GENERIC, Room, Source, read

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "data" / "benchmarks" / "house.json"
PACKAGES = ("pdsim", "backends", "experiments")
REFERENCES = {"simpy": "4.1.2", "httpx": "0.28.1", "fsspec": "2026.9.0"}
LONGEST_LINE, LONG_LINE, LONGEST_FILE, LONG_FILE, SHORT_FILE, MOST_METHODS = 117, 120, 700, 300, 40, 25
HEAVY = (
    *("torch", "triton", "zmq", "mooncake", "nixl", "nixl_cu12", "nixl_cu13", "mori"),
    *("pyarrow", "plotly", "matplotlib", "ray", "scipy", "joblib"),
)
"""Libraries that pdsim/ imports where it uses them, so that `pdsim --help` answers at once."""

_RECORDS = ("record", "statistics", "environment", "schema")
_SIMULATION = ("serving", "verify", "kv", "compute", "models", "sim", "waist")
_ALL = ("sweep", "execution", "validation", "results", "config", "calibration", "records", *_SIMULATION)

_OUTCOMES = ("results", "records", "config", "waist")

ROOMS = {
    "waist": Room(("pdsim.core", "pdsim.hardware", "pdsim.transfer", "pdsim.version")),
    "sim": Room(("pdsim.sim",), ("waist",)),
    "kv": Room(("pdsim.kv",), ("waist",)),
    "models": Room(("pdsim.models",), ("waist",)),
    "compute": Room(("pdsim.compute",), ("kv", "models", "waist")),
    "verify": Room(("pdsim.verify",), ("kv", "waist")),
    "serving": Room(("pdsim.serving",), ("kv", "compute", "models", "waist")),
    # what results are made of
    "records": Room(tuple(f"pdsim.results.{name}" for name in _RECORDS), ("waist", "face")),
    "calibration": Room(("pdsim.calibration",), ("records", "compute", "models", "waist")),
    "config": Room(("pdsim.config",), ("calibration", "serving", "kv", "compute", "models", "waist")),
    "composition": Room(  # and the rules, which ask engines whether they work here
        ("pdsim.config.compose", "pdsim.config.rules"),
        ("registry", "live", "config", "serving", "compute", "calibration", "models", "waist"),
    ),
    "results": Room(("pdsim.results",), ("records", "config", "calibration", "waist", "face")),
    "validation": Room(("pdsim.validation",), ("results", "records", "config", "calibration", "waist")),
    "execution": Room(("pdsim.run",), ("registry", "live", "sim", "verify", "composition", *_OUTCOMES)),
    "sweep": Room(("pdsim.sweep",), ("execution", "results", "records", "config", "waist", "face")),
    "cli": Room(("pdsim.cli",), ("face", "registry", "live", "profiling", "composition", *_ALL)),
    "face": Room(("=pdsim", "=pdsim.__main__"), ("cli", "composition", *_ALL)),  # `import pdsim`, and its version
    "registry": Room(  # backends without their names
        tuple(f"backends.{name}" for name in ("registry", "capabilities", "diagnosis", "jobs", "emulation")),
        ("backends", "waist"),
    ),
    "backends": Room(("backends",), ("registry", "waist")),
    "profiling": Room(("backends.profiling",), ("compute", "models", "waist")),
    "testing": Room(("pdsim.testing",), ("registry", "kv", "sim", "waist")),  # the conformance suite
    "live": Room(("backends.live",), ("registry", "config", "serving", "models", "waist")),
    "experiments": Room(("experiments",), ("live", *_ALL)),
}
"""Rooms of the house, from the ground up.  A room imports only those that it names."""

FIGURES = {
    "modules": "files",
    "lines": "lines of them",
    "docstring lines per 100 lines": "of modules, classes and functions",
    "docstring lines per 100 code lines": "without blank lines, comments and docstrings",
    "modules with one importer": "that exactly one other module imports",
    "of all modules, %": "their share",
    "class names more than once": "of classes at the top of modules",
    "module names more than once": "but for __init__ and __main__",
    "circles at import": "groups of modules that import each other when they are imported",
    "circles": "also within functions and for type checkers",
    "arrows up": "imports that the table of rooms does not allow",
    "private names of others": "x._name where x is neither self, cls nor super()",
    "per 1000 lines": "the same",
    "private names of other packages": "of them, those that no module of the same package defines",
    "longest line": "characters",
    "lines over 120": "characters",
    "longest file": "lines",
    "files over 500 lines": "",
    "files over 300 lines": "",
    "files under 40 lines": "but for __init__ and __main__",
    "classes over 25 methods": "",
}
"""Name of each figure, and what it counts."""


def figures(source: Source, rooms: Mapping[str, Room] | None = None) -> dict[str, float | None]:
    """Return all `FIGURES` of *source*; arrows are None without *rooms*."""
    modules = source.modules.values()
    files, lines = source.files(), sum(source.files().values())
    documented, code = sum(m.docstring_lines for m in modules), sum(m.code_lines for m in modules)
    alone, private = source.one_importer(), _total(source.private_of_others())
    values = (
        *(len(files), lines, 100 * documented / lines, 100 * documented / code),
        *(len(alone), 100 * len(alone) / len(files), len(source.class_names()), len(source.module_names())),
        *(len(source.circles()), len(source.circles(lazy=True))),
        None if rooms is None else len(source.arrows_up(rooms)),
        *(private, 1000 * private / lines, _total(source.foreign_private())),
        *(max(len(line) for m in modules for line in m.lines), len(source.long_lines(LONG_LINE))),
        max(files.values()),
        *(sum(n > LONGEST_FILE for n in files.values()), sum(n > LONG_FILE for n in files.values())),
        *(len(short_files(source)), sum(n > MOST_METHODS for n in source.methods().values())),
    )
    return {name: value and round(value, 1) for name, value in zip(FIGURES, values, strict=True)}


def _total(found: Mapping[str, Sequence[str]]) -> int:
    return sum(map(len, found.values()))


def short_files(source: Source) -> list[str]:
    """Return lines and name of each file that may be too short to be one."""
    return [
        f"{n} {name}"
        for name, n in source.files().items()
        if n < SHORT_FILE and source.modules[name].path.stem not in GENERIC
    ]


def house(root: Path = ROOT) -> Source:
    """Read pdsim's packages in the repository *root*."""
    return read(root, PACKAGES)


def table(kept: Mapping[str, Mapping[str, float | None]], now: Mapping[str, float | None]) -> str:
    """Return the figures as text: a row each, *kept* as `house.json` has them."""
    references = [name for name in kept if name != "before"]
    lines = [["", "before", "now", *references, "median"]]
    for name in FIGURES:
        values = [value for value in (kept[r][name] for r in references) if value is not None]
        cells = [kept["before"][name], now[name], *(kept[r][name] for r in references)]
        lines.append([name, *map(_cell, cells), _cell(statistics.median(values) if values else None)])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    )


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, int) else f"{value:.1f}"


def details(source: Source) -> str:
    """Return what is behind the counts, for who wants to lower them."""
    files, methods = source.files(), source.methods()
    sections: dict[str, Sequence[str]] = {
        "circles": [" <-> ".join(circle) for circle in source.circles(lazy=True)],
        "arrows up": [f"{e.source}:{e.line} -> {e.target}" for e in source.arrows_up(ROOMS)],
        "private names of other packages": [
            f"{m}:{hit}" for m, hits in source.foreign_private().items() for hit in hits
        ],
        "private names of others": [f"{len(hits):3} {m}" for m, hits in source.private_of_others().items()],
        "class names more than once": [
            f"{name}: {', '.join(where)}" for name, where in source.class_names().items()
        ],
        "module names more than once": source.module_names(),
        "modules with one importer": source.one_importer(),
        f"lines over {LONGEST_LINE}": source.long_lines(LONGEST_LINE),
        f"files over {LONG_FILE} lines": [f"{n} {name}" for name, n in files.items() if n > LONG_FILE],
        f"files under {SHORT_FILE} lines": short_files(source),
        f"classes over {MOST_METHODS} methods": [f"{n} {name}" for name, n in methods.items() if n > MOST_METHODS],
        "heavy imports": source.heavy(HEAVY),
    }
    return "\n".join(
        f"{name}: {len(items)}" + "".join(f"\n    {item}" for item in items) for name, items in sections.items()
    )


def measure(site: Path | None) -> dict[str, dict[str, float | None]]:
    """Count `REFERENCES` in *site*, or as installed into a temporary virtual environment.

    Raises:
        FileNotFoundError: *site* does not have one of them, in this version.
    """
    if site is not None:
        for name, version in REFERENCES.items():
            if not (site / f"{name}-{version}.dist-info").is_dir():
                raise FileNotFoundError(f"{site} has no {name} {version}; pip install {name}=={version} there")
        return {f"{n} {v}": figures(read(site, (n,), without=("tests",))) for n, v in REFERENCES.items()}
    with tempfile.TemporaryDirectory(prefix="house-") as scratch:
        venv.create(scratch, with_pip=True)
        wanted = [f"{name}=={version}" for name, version in REFERENCES.items()]
        subprocess.run([f"{scratch}/bin/python", "-m", "pip", "install", "-q", "--no-deps", *wanted], check=True)
        return measure(next(Path(scratch).glob("lib/python3*/site-packages")))


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.house", description=__doc__.splitlines()[0])
    parser.add_argument("command", nargs="?", default="table", choices=("table", "list", "measure"))
    parser.add_argument(
        "--site", type=Path, help=f"measure: a folder with {', '.join(REFERENCES)} of these versions"
    )
    options = parser.parse_args(argv)
    kept = json.loads(KEPT.read_text())
    if options.command == "list":
        print(details(house()))
    elif options.command == "measure":
        kept = {"before": kept["before"], **measure(options.site)}
        KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    else:
        print(table(kept, figures(house(), ROOMS)))


if __name__ == "__main__":
    main()
