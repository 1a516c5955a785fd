"""Catch every mutant and write the table of `docs/faults.md`: ``python -m tests.mutants``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import fill

from tests.mutants.catalog import BY_TEST, IMPOSSIBLE, MUTANTS, Caught

DOCUMENT = Path(__file__).parents[2] / "docs" / "faults.md"
WIDTH = 118
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
    impossible = [
        fill(f"- **{hazard}**: {reason}.", WIDTH, subsequent_indent="  ") for hazard, reason in IMPOSSIBLE.items()
    ]
    tested = [
        fill(f"- **{hazard}**, {what}: {why}. `{test}`", WIDTH, subsequent_indent="  ", break_long_words=False)
        for hazard, (what, test, why) in BY_TEST.items()
    ]
    lines = [*head, *table(caught), "", "Not shown by a scenario, but by a test:", "", *tested]
    lines += ["", "Not possible in this design:", "", *impossible]
    before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    DOCUMENT.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
