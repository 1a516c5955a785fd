# SPDX-License-Identifier: Apache-2.0
"""`pdsim report FOLDER --serve`: the page of a sweep or run on this machine's browser, and that of each point.

Pages are made when they are asked for, so those of a sweep under way have the points that have ended.  Only this
machine is answered, under its own name: no page of another site can read them.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from pdsim.core.errors import ConfigError
from pdsim.results.kept import SloLimits, parse_slo
from pdsim.results.report.page import Content, Explore, page
from pdsim.sweep import collect

Make = Callable[[Path, SloLimits | None], Content]


def server(folder: Path, content: Make, port: int = 0) -> ThreadingHTTPServer:
    """Return a server of the report of *folder* on 127.0.0.1, not yet serving; *port* 0 is one that is free.

    ``/?slo=ttft=2s`` is the report under that SLO, ``/point?name=NAME`` that of a point of the sweep.  Raise a
    `ConfigError` if *port* is taken.
    """

    class Pages(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = self._answer()
            body = text.encode()
            with suppress(ConnectionError):  # the browser has left the page
                self._send(status, body)

        def _send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", f"text/{'html' if status == 200 else 'plain'}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _answer(self) -> tuple[int, str]:
            if self.headers.get("Host", "").partition(":")[0] not in ("127.0.0.1", "localhost"):
                return 403, "open it as 127.0.0.1, as the command printed it"
            asked = urlsplit(self.path)
            values = {key: value[0] for key, value in parse_qs(asked.query).items()}
            points = _points(folder)
            try:
                if asked.path == "/":
                    slo = parse_slo(values["slo"]) if "slo" in values else None
                    return 200, page(content(folder, slo), Explore(points, values.get("slo", "")))
                if asked.path == "/point" and values.get("name") in points:
                    return 200, page(content(folder / values["name"], None), Explore(points, at=values["name"]))
            except ConfigError as error:
                return 400, str(error)
            return 404, "no such page; the report is at /"

        def log_message(self, *_: object) -> None:
            pass

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Pages)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--port {port}: {error}; name a free one, or leave --port out") from error


def serve(folder: Path, content: Make, port: int) -> None:
    """Serve the report of *folder* until Ctrl-C."""
    with server(folder, content, port) as pages:
        sys.stdout.write(f"http://127.0.0.1:{pages.server_address[1]} (Ctrl-C ends it)\n")
        sys.stdout.flush()
        try:
            pages.serve_forever()
        except KeyboardInterrupt:
            return


def _points(folder: Path) -> dict[str, str]:
    # The name of each point with a folder, and its values.
    if not any((folder / name).is_file() for name in (collect.POINTS, collect.LEDGER)):
        return {}
    table = collect.points(folder)
    keys = collect.swept(table.to_pylist(), table.schema)
    return {
        row["point"]: ", ".join(f"{key}={row[key]}" for key in keys) or row["point"]
        for row in table.to_pylist()
        if row["folder"] and (folder / row["point"]).is_dir()
    }
