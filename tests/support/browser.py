"""A page in headless Chromium, by Playwright (``pip install playwright``): its requests and its complaints."""

import importlib.util
import shutil
import time
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MISSING = not CHROMIUM or importlib.util.find_spec("playwright") is None
SILENCE = 90_000.0
"""Milliseconds without an answer after which a test fails: many times what a page takes."""


class Browser:
    """Chromium with one *page*."""

    def __init__(self) -> None:
        from playwright.sync_api import sync_playwright

        self._playwright = sync_playwright().start()
        self._chromium = self._playwright.chromium.launch(executable_path=CHROMIUM)
        self.page = self._chromium.new_page(viewport={"width": 800, "height": 600})
        self.page.set_default_timeout(SILENCE)
        self.evaluate = self.page.evaluate
        self.complaints: list[str] = []
        """What is in the console, but for remarks, and what scripts raised."""
        self.requests: list[str] = []
        """The addresses that the page asked for, but for itself and what it has within."""
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._heard)
        self.page.on("request", self._asked)

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning", "assert"):
            self.complaints.append(message.text)

    def _asked(self, request: Any) -> None:
        if not request.is_navigation_request() and not request.url.startswith(("data:", "blob:")):
            self.requests.append(request.url)

    def close(self) -> None:
        self._chromium.close()
        self._playwright.stop()

    def open(self, address: str, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Open *address* and wait until all of its figures are drawn."""
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.emulate_media(color_scheme="dark" if dark else "light")
        self.page.goto(address)
        plots = self.page.locator(".plot")
        for number in range(plots.count()):  # what comes into view is drawn
            plots.nth(number).evaluate("plot => plot.scrollIntoView({behavior: 'instant'})")
            plots.nth(number).locator("svg").first.wait_for(state="attached")
        self.wait(f"Number(document.documentElement.dataset.drawn || 0) === {plots.count()}")

    def wait(self, condition: str) -> None:
        end = time.monotonic() + SILENCE * 1e-3
        while not self.evaluate(condition):  # not `wait_for_function`, which the pages' policy of scripts refuses
            assert time.monotonic() < end, f"not within {SILENCE * 1e-3:g} s: {condition}"
            self.page.wait_for_timeout(50)
