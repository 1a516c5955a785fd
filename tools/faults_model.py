# SPDX-License-Identifier: Apache-2.0
"""What simulated faults found: ``python -m tools.faults_model [PARTS...]`` prints docs/reliability.md's table.

``python -m tools.faults_model reached`` runs the default trial and keeps how often it reached what; ``branches``
which branches of the protocol (with coverage.py, four times as long).

PARTS are files that ``experiment=faults experiment.parts=FILE`` kept.
``python -m tools.faults_model --save FILE PARTS`` keeps the sum of one of them for `STORED`, whose files are always
counted; each is an object with the code and the options of a campaign, its seeds as pairs of the
first and the one after the last, how requests ended, in how many scenarios a message or transition was reached, CPU
seconds, and rows of violations that begin with the seed.
"""

import argparse
import csv
import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.faults import FaultsOptions, FaultTrial, reached, tries
from pdsim.core.files import data
from pdsim.verify.reached import MESSAGES
from tools.tables import markdown, rows

STORED = data("benchmarks", "faults_model")
REACHED = data("benchmarks", "faults_reached.csv")
BRANCHES = data("benchmarks", "faults_branches.csv")

PROTOCOL = (
    *(f"kv/{name}" for name in ("messages", "pages", "plan", "pull", "push", "receiver", "tiers")),
    *(f"serving/{name}" for name in ("cp_gather", "decode", "handoff/pull", "handoff/push", "membership")),
    *(f"serving/{name}" for name in ("offload", "prefill", "rank_process", "router")),
)
"""Files whose branches are counted."""


def table(files: Sequence[Path] = ()) -> Iterator[str]:
    """Yield the lines of a table of *files* and those of `STORED`, a row for the kinds in each scenario."""
    parts: dict[str, list[dict[str, Any]]] = {}
    stored = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(STORED.glob("*.json"))]
    for part in (*stored, *map(_read, files)):
        parts.setdefault(", ".join(part.get("always", ())), []).append(part)
    lines = []
    for always, group in parts.items():
        ends = sum((Counter(part["statuses"]) for part in group), Counter[str]())
        scenarios = sum(end - first for part in group for first, end in part["seeds"])
        bad = sum(len({row[0] for row in part["violations"]}) for part in group)
        codes = len({part["code"] for part in group})
        lines.append((always or "-", *(f"{each:,}" for each in (codes, scenarios, ends.total(), ends["ok"], bad))))
    heads = ("kinds in each", "codes", "scenarios", "requests", "of them served", "scenarios with violations")
    yield from markdown(heads, lines)


def _read(path: Path) -> dict[str, Any]:
    ends, reached, seeds, events, bad = Counter[str](), Counter[str](), [], 0, []
    with path.open(encoding="utf-8") as file:
        part = json.loads(next(file))
        for line in file:
            seed, violations, statuses, count, text, steps = json.loads(line)
            seeds.append([seed, seed + 1])
            ends.update(statuses)
            reached.update(steps.keys())
            events += count
            if violations:
                invariant, at, what = violations[0]
                bad.append([seed, invariant, f"{at:.6f} s: {what}", len(violations), text])
    sums = {"events": events, "statuses": ends, "reached": reached, "violations": bad}
    return {**part, "seeds": _joined(seeds), **sums}


def _joined(spans: list[list[int]]) -> list[list[int]]:
    joined: list[list[int]] = []
    for first, end in sorted(spans):
        if joined and first < joined[-1][1]:
            raise ValueError(f"seed {first} is in two parts; give each part seeds of its own")
        if joined and first == joined[-1][1]:
            joined[-1][1] = end
        else:
            joined.append([first, end])
    return joined


def least() -> Iterator[str]:
    """Yield the three transitions and the three messages that were reached least often, and branches taken."""
    branches: dict[str, list[int]] = {}
    for row in rows(BRANCHES):
        every = branches.setdefault(row["file"].partition("/")[0], [0, 0])
        every[0] += int(row["taken"])
        every[1] += int(row["branches"])
    taken = [f"{part} {own} of {every}" for part, (own, every) in branches.items()]
    kept = [(row["what"], f"{row['what']} {int(row['times']):,}") for row in rows(REACHED)]
    messages = [text for what, text in kept if what in MESSAGES]
    rare = [*[text for what, text in kept if what not in MESSAGES][:3], *messages[:3]]
    yield f"{', '.join(rare)}; branches: {', '.join(taken)}"


def keep_reached() -> None:
    """Run the default trial and write what it reached to `REACHED`."""
    table = reached(tries([FaultTrial(seed) for seed in range(FaultsOptions().scenarios)], workers=2))
    with REACHED.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([list(table.columns), *table.rows])


def keep_branches() -> None:
    """Run the default trial and write to `BRANCHES` which branches of `PROTOCOL` it took."""
    import coverage

    root = Path(__file__).parents[1] / "pdsim"
    measured = coverage.Coverage(branch=True, data_file=None, include=[f"{root / name}.py" for name in PROTOCOL])
    measured.start()
    for seed in range(FaultsOptions().scenarios):
        FaultTrial(seed).run()
    measured.stop()
    with tempfile.TemporaryDirectory() as folder:
        measured.json_report(outfile=f"{folder}/report.json")
        report = json.loads(Path(folder, "report.json").read_text(encoding="utf-8"))["files"]
    table = []
    for name in PROTOCOL:
        file = next(each for path, each in report.items() if path.endswith(f"pdsim/{name}.py"))
        lines = [line.strip() for line in (root / f"{name}.py").read_text(encoding="utf-8").split("\n")]
        left = [(lines[at - 1], lines[to - 1] if to > 0 else "return") for at, to in file["missing_branches"]]
        refused = sum(to.startswith("raise ") for _, to in left)
        others = "; ".join(f"{at} {to}"[:120] for at, to in left if not to.startswith("raise "))
        summary = file["summary"]
        table.append([name, summary["num_branches"], summary["covered_branches"], refused, others])
    with BRANCHES.open("w", encoding="utf-8", newline="") as out:
        heads = ["file", "branches", "taken", "never_refusals", "never_others"]
        csv.writer(out, lineterminator="\n").writerows([heads, *table])


def main() -> None:
    """Print the table, keep the sum of a part, or keep what the default trial reaches."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m tools.faults_model", description=__doc__, formatter_class=raw)
    parser.add_argument("parts", nargs="*", help='files of campaigns; or "reached", "branches"')
    parser.add_argument("--save", metavar="FILE", type=Path, help="keep the sum of the one part there")
    said = parser.parse_args()
    if said.parts == ["reached"]:
        keep_reached()
    elif said.parts == ["branches"]:
        keep_branches()
    elif said.save is None:
        print("\n".join(table([Path(name) for name in said.parts])))
    elif len(said.parts) == 1:
        said.save.write_text(json.dumps(_read(Path(said.parts[0]))) + "\n", encoding="utf-8")
    else:
        parser.error(f"--save needs one part, got {len(said.parts)}")


if __name__ == "__main__":
    main()
