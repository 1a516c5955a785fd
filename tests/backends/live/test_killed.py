"""A live run that is killed, at any moment, keeps every request that had ended."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from aiohttp import web

from pdsim.cli.main import main

COUNT, OUTPUT = 100, 5
WORDS = (
    *("run", "-q", "target=live", "hw=loopback", "live.vocabulary=512", "live.warmup=1", f"workload.count={COUNT}"),
    *("workload.rate=40", "workload.input_mean=20", f"workload.output_mean={OUTPUT}", "workload.output_cv=0"),
)
KILLS = 10
LATER = 0.5  # seconds that a client on a busy machine may take from the end of its connection to its journal


class Counterpart(threading.Thread):
    """Streams `OUTPUT` tokens to every request, as OpenAI's API has it; *ended* are the times of the ends seen."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.ended: list[float] = []
        self.ready = threading.Event()
        self.start()
        assert self.ready.wait(10)

    def run(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        self._over = asyncio.Event()
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        ((_, self.port),) = runner.addresses
        self.ready.set()
        await self._over.wait()
        await runner.cleanup()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self._over.set)
        self.join()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        with suppress(ConnectionError):  # the client was killed
            for number in range(OUTPUT):
                await asyncio.sleep(random.random() * 0.02)
                finish = "length" if number == OUTPUT - 1 else None
                chunk = {"choices": [{"text": "a", "token_ids": [number], "finish_reason": finish}]}
                await stream.write(f"data: {json.dumps(chunk)}\n\n".encode())
            await stream.write(b"data: [DONE]\n\n")
            await stream.write_eof()
            while request.transport is not None and not request.transport.is_closing():  # until the client hangs up
                await asyncio.sleep(0.005)
            self.ended.append(time.monotonic())
        return stream


@pytest.fixture
def counterpart() -> Iterator[Counterpart]:
    server = Counterpart()
    yield server
    server.close()


@pytest.mark.slow
@pytest.mark.parametrize("number", range(KILLS))
def test_a_killed_run_loses_no_request_that_had_ended(counterpart: Counterpart, tmp_path: Path, number: int, capsys):
    words = [*WORDS, f"live.url=http://127.0.0.1:{counterpart.port}", f"seed={number}", f"output={tmp_path}"]
    with subprocess.Popen([sys.executable, "-m", "pdsim", *words]) as run:
        moment = 2 + random.randrange(1, COUNT - 20)  # two are the requests before the workload
        while len(counterpart.ended) < moment:
            assert run.poll() is None
            time.sleep(random.random() * 0.02)
        killed = time.monotonic()
        run.send_signal(signal.SIGKILL)
    ended = sum(at < killed - LATER for at in counterpart.ended) - 2
    (folder,) = tmp_path.iterdir()
    assert folder.name.endswith(".incomplete")
    assert main(["show", str(folder)]) == 0
    kept = pq.read_table(folder / "requests.parquet").to_pylist()
    assert f"the run ended early: these are {len(kept)} of {COUNT} requests" in capsys.readouterr().out
    assert ended <= len(kept) < COUNT
    assert [row["id"] for row in kept] == sorted({row["id"] for row in kept})
    assert {(row["status"], row["tokens"]) for row in kept} == {("ok", OUTPUT)}
    assert all(row["arrival"] <= row["sent"] and 0 < row["ttft"] <= row["e2e"] for row in kept)
