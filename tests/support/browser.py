"""A page in headless Chromium: what it asks the network for, what it complains of, and what it shows."""

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SCREEN = {"deviceScaleFactor": 1, "mobile": False}
SILENCE = 90.0
"""Seconds without an answer after which a test fails: many times what a page takes."""


class Browser:
    """Chromium with one page, spoken to over the pipe of its DevTools protocol; *folder* is its profile."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()

        def ends() -> None:  # Chromium reads from 3 and writes to 4
            high = os.dup(theirs_out), os.dup(theirs_in)
            os.dup2(high[1], 3)
            os.dup2(high[0], 4)

        words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"]
        words += ["--disable-background-networking", "--hide-scrollbars", "--remote-debugging-pipe"]
        self._process = subprocess.Popen(
            [CHROMIUM, *words, f"--user-data-dir={folder}", "about:blank"],
            close_fds=False,
            preexec_fn=ends,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._number = 0
        self._left = b""
        self.events: list[dict[str, Any]] = []
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        os.close(self._out)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait(10)
        os.close(self._in)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the answer to a command of the protocol; events that come before it are kept in `events`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])
            if "method" in answer:
                self.events.append(answer)

    def evaluate(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def open(self, page: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Open *page* and wait until all of its figures are drawn."""
        self.events.clear()
        self.call("Emulation.setDeviceMetricsOverride", **SCREEN, width=width, height=height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=page.as_uri())
        self.wait("document.readyState === 'complete' && document.getElementById('theme') !== null")
        self.evaluate("document.querySelectorAll('.plot').forEach((each) => each.scrollIntoView())")
        count = self.evaluate("document.querySelectorAll('.plot').length")
        for number in range(count):  # what comes into view is drawn
            self.evaluate(f"document.querySelectorAll('.plot')[{number}].scrollIntoView({{behavior: 'instant'}})")
            self.wait(f"document.querySelectorAll('.plot')[{number}].querySelector('svg') !== null")
        self.wait(f"Number(document.documentElement.dataset.drawn || 0) === {count}")

    def wait(self, condition: str) -> None:
        end = time.monotonic() + SILENCE
        while not self.evaluate(condition):
            assert time.monotonic() < end, f"not within {SILENCE:g} s: {condition}"
            time.sleep(0.05)

    @property
    def requests(self) -> list[str]:
        """The addresses that the page asked for, but for itself and what it has within."""
        sent = [
            each["params"]["request"]["url"] for each in self.events if each["method"] == "Network.requestWillBeSent"
        ]
        return [url for url in sent[1:] if not url.startswith(("data:", "blob:"))]

    @property
    def complaints(self) -> list[str]:
        """What is in the console, but for remarks, and what scripts raised."""
        found = []
        for event in self.events:
            method, parameters = event["method"], event["params"]
            if method == "Runtime.exceptionThrown":
                found.append(str(parameters["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
                found.append(str(parameters["args"]))
            elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
                found.append(str(parameters["entry"]))
        return found

    def _receive(self) -> dict[str, Any]:
        end = time.monotonic() + SILENCE
        while b"\0" not in self._left:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"Chromium has not answered for {SILENCE:g} s"
            piece = os.read(self._in, 1 << 16)
            assert piece, "Chromium has ended"
            self._left += piece
        message, _, self._left = self._left.partition(b"\0")
        return dict(json.loads(message))
