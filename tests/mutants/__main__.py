"""Catch every mutant and write `data/benchmarks/mutants.csv`: ``python -m tests.mutants``."""

import argparse
import csv
from pathlib import Path

from tests.mutants.catalog import MUTANTS

RECORD = Path(__file__).parents[2] / "data" / "benchmarks" / "mutants.csv"
COLUMNS = ("hazard", "change", "invariant", "seeds", "run")
"""``seeds`` were needed until the invariant caught the change; ``run`` of them had scenarios where it can show."""


def recorded() -> dict[tuple[str, str, str], int]:
    """Return the seeds that each mutant needed, by hazard, change and invariant."""
    with RECORD.open(encoding="utf-8", newline="") as file:
        return {(row["hazard"], row["change"], row["invariant"]): int(row["seeds"]) for row in csv.DictReader(file)}


def main() -> None:
    """Write the record."""
    argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__).parse_args()
    caught = [(mutant, mutant.catch()) for mutant in MUTANTS]
    with RECORD.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for mutant, seeds in caught:
            figures = ("not caught", "-") if seeds is None else (seeds.seeds, seeds.run)
            writer.writerow([mutant.hazard, mutant.what, mutant.invariant, *figures])


if __name__ == "__main__":
    main()
