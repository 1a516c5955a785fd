"""Draw the picture of `pdsim report` in docs/how-to.md again: ``python -m tests.support.screenshots``."""

from __future__ import annotations

import base64
from pathlib import Path
from tempfile import TemporaryDirectory

from pdsim.cli.main import main
from tests.support.browser import Browser

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "report.png"

if __name__ == "__main__":
    with TemporaryDirectory() as place:
        folder, page = Path(place), Path(place) / "page.html"
        words = ["hw=8xh200", "workload=smoke", "samples=500", "--quiet", f"output={folder / 'results'}"]
        assert main(["run", *words]) == 0
        assert main(["report", str(next((folder / "results").iterdir())), "-o", str(page)]) == 0
        browser = Browser(folder / "profile")
        browser.open(page, 1000, 1250)
        browser.evaluate("window.scrollTo(0, 0)")
        PICTURE.write_bytes(base64.b64decode(browser.call("Page.captureScreenshot")["data"]))
        browser.close()
