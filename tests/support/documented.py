"""Fenced blocks of a Markdown page, and the shell commands in them."""

import re
from collections.abc import Iterator
from pathlib import Path

BLOCK = re.compile(r"(?:^<!-- ([^\n]*) -->\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> Iterator[tuple[str, str, str]]:
    """Yield the mark (a comment on the line before), the language and the text of each fenced block."""
    yield from (match.groups(default="") for match in BLOCK.finditer(page.read_text(encoding="utf-8")))


def commands(text: str) -> list[str]:
    """Return the commands of a shell block, each on one line and without its comment."""
    lines = (re.sub(r"\s+# .*", "", line).strip() for line in text.replace("\\\n", " ").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def documented(page: Path) -> list[str]:
    return [command for _, language, text in blocks(page) if language == "sh" for command in commands(text)]
