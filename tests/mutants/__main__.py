"""Catch every mutant and write the table of `docs/faults.md`: ``python -m tests.mutants``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.mutants.catalog import MUTANTS, Caught

DOCUMENT = Path(__file__).parents[2] / "docs" / "faults.md"
BEGIN, END = "<!-- mutants -->\n", "<!-- end of mutants -->\n"


def table(caught: Mapping[str, Caught | None] | None) -> Iterator[str]:
    """Yield the lines of the table, without figures if *caught* is None."""
    for mutant in MUTANTS:
        found = caught[mutant.hazard] if caught else None
        figures = f"{found.seeds} | {found.run}" if found else "not caught | -"
        yield f"| {mutant.hazard} | {mutant.what} | {mutant.invariant} | {figures} |"


def main() -> None:
    """Write the table between the two marks."""
    caught = {mutant.hazard: mutant.catch() for mutant in MUTANTS}
    head = ["| hazard | what is changed | caught by | seeds needed | of these run |", "|---|---|---|---|---|"]
    lines = [*head, *table(caught)]
    before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    DOCUMENT.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
