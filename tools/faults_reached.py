# SPDX-License-Identifier: Apache-2.0
"""Run the default trial and keep what it reached, for docs/faults.md: ``python -m tools.faults_reached``."""

import csv
from collections.abc import Iterator

from experiments.faults import FaultsOptions, FaultTrial, reached, tries
from pdsim.core.files import data
from pdsim.verify.reached import MESSAGES

RECORD = data("benchmarks", "faults_reached.csv")


def lines() -> Iterator[str]:
    """Yield the three transitions and the three messages that were reached least often, and how often."""
    with RECORD.open(encoding="utf-8", newline="") as file:
        rows = [(row["what"], f"{row['what']} {int(row['times']):,}") for row in csv.DictReader(file)]
    messages = [text for what, text in rows if what in MESSAGES]
    yield ", ".join([*[text for what, text in rows if what not in MESSAGES][:3], *messages[:3]])


def main() -> None:
    """Write the record."""
    options = FaultsOptions()
    table = reached(tries([FaultTrial(seed) for seed in range(options.scenarios)], workers=2))
    with RECORD.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(table.columns)
        writer.writerows(table.rows)


if __name__ == "__main__":
    main()
