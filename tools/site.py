# SPDX-License-Identifier: Apache-2.0
"""Hook of MkDocs: gather the pages of the site, which lie in several folders, with the generated ones.

``mkdocs build --strict`` (extra ``docs``) checks every link and anchor.  The pages keep their places in the
repository, so their links hold here and on a Git server; files that they link to are copied beside them.
"""

import ast
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools import reference

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md", "data/**/README.md", "docs/*.md")
LINK = re.compile(r"\]\(([^)\s#]+)")
API = (
    "pdsim.simulate", "pdsim.load", "pdsim.results.kept.KeptRun", "pdsim.core.errors", "pdsim.transfer",
    "pdsim.transfer.batch", "pdsim.serving.policies", "backends.base.endpoint.RealEndpoint", "backends.capabilities",
)  # fmt: skip
"""What a program or a plug-in uses, a section each."""


def on_config(config: Any) -> Any:
    """Point MkDocs to a temporary folder with the pages."""
    folder = Path(tempfile.mkdtemp(prefix="pdsim-docs-"))
    config.docs_dir = str(folder)
    gather(folder)
    return config


def on_post_build(config: Any) -> None:
    """Remove the folder of `on_config`."""
    shutil.rmtree(config.docs_dir, ignore_errors=True)


def gather(folder: Path) -> None:
    """Copy the pages and the files that they link to into *folder*, and write the generated pages there."""
    pages = {page for pattern in PAGES for page in ROOT.glob(pattern)}
    linked = {(page.parent / name).resolve() for page in pages for name in LINK.findall(page.read_text("utf-8"))}
    for path in pages | {path for path in linked if path.is_file()}:
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    reference.build(folder / "docs")
    built = {"api.md": ["# Python API", *(f"::: {name}" for name in API)], "messages.md": messages()}
    for name, paragraphs in built.items():
        (folder / "docs" / name).write_text("\n\n".join(paragraphs) + "\n", encoding="utf-8")


def messages() -> Iterator[str]:
    """Yield the paragraphs of the page of messages: what a `ConfigError` says, with ``...`` for a value."""
    yield "# Messages"
    yield "Each has the value (`...`), the rule and the way out. Exit status 2: nothing was written."
    rooms = (ROOT / name for name in ("pdsim", "backends", "experiments"))
    for path in sorted(path for room in rooms for path in room.rglob("*.py")):
        texts = dict.fromkeys(_texts(path))
        if texts:
            yield f"## `{path.relative_to(ROOT)}`"
            yield "\n".join(f"- `{text}`" for text in texts)


def _texts(path: Path) -> Iterator[str]:
    # arguments of ConfigError, and what a generator of problems yields (pdsim/config/rules.py)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        value = _said(node, path.name == "rules.py")
        if isinstance(value, ast.JoinedStr | ast.Constant):
            parts = value.values if isinstance(value, ast.JoinedStr) else [value]
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in parts)
            if " " in text:
                yield " ".join(text.replace("`", "'").split())


def _said(node: ast.AST, yields: bool) -> ast.expr | None:
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "ConfigError"
        and node.args
    ):
        return node.args[0]
    return node.value if yields and isinstance(node, ast.Yield) else None
