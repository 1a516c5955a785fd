"""A live run that is killed, at any moment, keeps every request that had ended."""

import asyncio
import json
import random
import sys
import time
from contextlib import suppress

import pyarrow.parquet as pq
import pytest
from aiohttp import web

from pdsim.cli.main import main
from tests.support.answering import chunk, openai

COUNT, OUTPUT = 100, 5
WORDS = (
    *("-q", "target=live", "hw=loopback", "live.vocabulary=512", f"workload.count={COUNT}"),
    *("workload.rate=40", "workload.input_mean=20", f"workload.output_mean={OUTPUT}", "workload.output_cv=0"),
)
LATER = 0.5  # seconds that a client on a busy machine may take from the end of its connection to its journal


async def killed_among(words: list[str], moment: int, before: int) -> int:
    """Serve a run as OpenAI's API does, kill it at *moment* ended requests; return how many it must keep.

    *before* more go before the workload, and are not kept.
    """
    ended: list[float] = []

    async def complete(request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        with suppress(ConnectionError):  # the client was killed
            for number in range(OUTPUT):
                await asyncio.sleep(random.random() * 0.02)
                await stream.write(chunk(number, last=number == OUTPUT - 1))
            await stream.write_eof()
            while request.transport is not None and not request.transport.is_closing():  # until the client hangs up
                await asyncio.sleep(0.005)
            ended.append(time.monotonic())
        return stream

    async with openai(complete) as url:
        run = await asyncio.create_subprocess_exec(sys.executable, "-m", "pdsim", *words, f"live.url={url}")
        while len(ended) < moment + before:
            assert run.returncode is None
            await asyncio.sleep(random.random() * 0.02)
        killed = time.monotonic()
        run.kill()
        await run.wait()
    return sum(at < killed - LATER for at in ended) - before


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_killed_run_loses_no_request_that_had_ended(tmp_path, seed, capsys):
    words = ["run", *WORDS, "live.warmup=1", f"seed={seed}", f"output={tmp_path}"]
    ended = asyncio.run(killed_among(words, random.randrange(1, COUNT - 20), before=2))
    (folder,) = tmp_path.iterdir()
    assert folder.name.endswith(".incomplete")
    assert main(["show", str(folder)]) == 0
    kept = pq.read_table(folder / "requests.parquet").to_pylist()
    assert f"the run ended early: these are {len(kept)} of {COUNT} requests" in capsys.readouterr().out
    assert ended <= len(kept) < COUNT
    assert [row["id"] for row in kept] == sorted({row["id"] for row in kept})
    assert {(row["status"], row["tokens"]) for row in kept} == {("ok", OUTPUT)}
    assert all(row["arrival"] <= row["sent"] and 0 < row["ttft"] <= row["e2e"] for row in kept)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_killed_validation_compares_what_had_ended(tmp_path, seed, capfd):
    own = ["model=tiny", "experiment.lengths=[20]", "experiment.loads=[1.0]", "experiment.runs=1", "live.warmup=0"]
    words = ["validate", *WORDS, *own, f"seed={seed}", f"output={tmp_path}"]
    ended = asyncio.run(killed_among(words, random.randrange(20, COUNT - 20), before=0))
    (folder,) = tmp_path.iterdir()
    assert folder.name.endswith(".incomplete")
    assert main(["show", str(folder)]) == 0
    (run,) = json.loads((folder / "measurements.json").read_text())["runs"]
    count = sum(map(len, run.values()))
    assert f"the run ended early: these are {count} of {COUNT + 6} requests" in capfd.readouterr().out
    assert ended <= count < COUNT + 6
    assert [*run] == ["warmup-20", "single-20", "load-1"]
    again = ["experiment.loads=[1.0]", "model=tiny", "hw=loopback", f"experiment.stored={folder}", "--json"]
    main(
        ["validate", *again, f"output={tmp_path}/again"]
    )  # latencies of a server that computes nothing are not those of the model
    assert json.loads(capfd.readouterr().out)["metrics"]["error_e2e_p50"]["value"] > 0
