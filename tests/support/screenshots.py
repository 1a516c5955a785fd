"""Draw the pictures of `pdsim report` again: ``python -m tests.support.screenshots [FOLDER]``.

Without a FOLDER it writes ``docs/report.png``, of the run in docs/how-to.md; with one, pages of a run, a sweep, a
capacity search and a validation, light and dark, in two widths, to be looked at.
"""

from __future__ import annotations

import base64
import sys
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from pdsim.cli.main import main
from tests.support.browser import Browser

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "run": ["run", "hw=8xh200", "workload=smoke", "samples=500"],
    "sweep": ["sweep", "hw=8xh200,8xh20", "workload=poisson", "workload.count=30", "workload.rate=1,2,4,8"],
    "capacity": ["run", "experiment=capacity", "hw=2xh200", "model=qwen3-8b", "workload=smoke"],
}
VALIDATION = ROOT / "data" / "validation" / "nixl-2xh200"
SIZES = ((1280, 2400), (480, 2400))


def draw(browser: Browser, page: Path, picture: Path, width: int, height: int, *, dark: bool = False) -> None:
    """Write what *browser* shows of *page*, from its top, to *picture*."""
    browser.open(page, width, height, dark)
    browser.evaluate("window.scrollTo(0, 0)")
    picture.write_bytes(base64.b64decode(browser.call("Page.captureScreenshot")["data"]))


def pages(names: list[str], folder: Path) -> dict[str, Path]:
    """Run the commands of *names* below *folder* and return their pages."""
    made = {}
    for name in names:
        if name in PAGES:
            assert main([*PAGES[name], "--quiet", f"output={folder / name}"]) == 0
        kept = next((folder / name).iterdir()) if name in PAGES else VALIDATION
        made[name] = folder / f"{name}.html"
        assert main(["report", str(kept), "-o", str(made[name])]) == 0
    return made


if __name__ == "__main__":
    with TemporaryDirectory() as place:
        browser = Browser(Path(place) / "profile")
        if len(sys.argv) > 1:
            for name, page in pages([*PAGES, "validation"], Path(place)).items():
                for (width, height), dark in product(SIZES, (False, True)):
                    picture = Path(sys.argv[1]) / f"{name}-{width}-{'dark' if dark else 'light'}.png"
                    draw(browser, page, picture, width, height, dark=dark)
        else:
            draw(browser, pages(["run"], Path(place))["run"], ROOT / "docs" / "report.png", 1000, 1250)
        browser.close()
