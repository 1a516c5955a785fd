"""Commands that a page shows, one string each."""

from __future__ import annotations

import re
from pathlib import Path

BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def documented(page: Path) -> list[str]:
    """Return the commands in the blocks of *page*, in their order and without comments."""
    text = "".join(BLOCK.findall(page.read_text(encoding="utf-8"))).replace("\\\n", " ")
    lines = (re.sub(r"\s+# .*", "", line).strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]
