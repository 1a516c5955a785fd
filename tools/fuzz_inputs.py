# SPDX-License-Identifier: Apache-2.0
"""Right inputs of every kind that `tools.fuzz` changes: what is wrong with one is the change alone."""

import contextlib
import typing
from functools import cache
from pathlib import Path
from random import Random
from types import UnionType
from typing import Any

import msgspec

from pdsim.hardware.costs import Engine, EngineModel
from pdsim.kv import messages
from pdsim.kv.layout import KvLayout, KvShape
from pdsim.kv.messages import KvMessage

ROOT = Path(__file__).resolve().parent.parent

TRACES = (
    '{"timestamp": 0, "input_length": 90, "output_length": 2, "hash_ids": [1]}\n' * 3,
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.99,396,109\n",
)
SAMPLES = (
    "# kind: measured\npattern,blocks,size,seconds,per_job,held\npair,1,4096,1e-5,1e-5 2e-5,0\nincast:2,8,1,3,,1\n"
)
WORDS = (
    "hw.nic.rate=400Gbps", "workload=poisson", "workload.rate=2", "parallel.prefill.tp=2,4", "hw.link.changes=[]",
    "hw.link.changes=[{kind: stall, start: 1s, end: 1000s}]", "seed=3", "experiment.deadline=60s", "model=qwen3-8b",
    "~hw.nic", "+a.b=c", "output='a, b'", "backend.options={a: b}", "hw=8xh20,8xh200", "check.plausible=false",
)  # fmt: skip
MACHINE = {
    "name": "box",
    "vendor": "nvidia",
    "nodes": 1,
    "gpus": 2,
    "gpu": {"name": "G", "memory": "80GB", "memory_rate": "2TB/s", "compute": "312TFLOPS", "pcie": "25GB/s"},
    "interconnect": {"kind": "switch", "rate": "240GB/s"},
    "nic": {"count": 1, "rate": "400Gbps", "latency": "2us"},
    "host": {"memory": "1TB", "memory_rate": 2e11, "tcp_rate": "10Gbps", "tcp_latency": "50us"},
    "sources": {"gpu": "datasheet: G", "nodes, gpus": "assumed: two", "nic.rate": "measured: here"},
}
ENGINE = {
    "name": "engine",
    "implementation": "engine",
    "vendors": ["nvidia"],
    "intra": {"path": "nvlink", "call": "1us", "descriptor": "2us", "overlap": True, "latency": 0},
    "inter": None,
}
MODEL = {
    "name": "m", "parameters": 1e9, "active": 1e9, "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 4,
    "head_dim": 16,
}  # fmt: skip
CONFIG = {
    "target": "model",
    "experiment": {"name": "transfer"},
    "hw": MACHINE,
    "backend": ENGINE,
    "model": MODEL,
    "parallel": {"prefill": {"tp": 1}, "decode": {"tp": 1}},
}
CALIBRATION = {
    "name": "c",
    "kind": "measured",
    "hw": ["box"],
    "backend": ["engine"],
    "form": "sum",
    "date": "2026-11-21",
    "source": "us",
    "parameters": {"backend.intra.call": "3us", "hw.interconnect.latency": 1e-6},
    "intervals": {"backend.intra.call": ["2us", "4us"]},
    "unidentified": ["backend.intra.wire_descriptor"],
    "held_out": {"points": 9, "how": "at random", "mean": 0.1, "median": 0.1, "p95": 0.2, "bias": 0.0},
    "provenance": {"commit": "abc"},
}

_LAYOUT = KvLayout(KvShape(layers=2, heads=4, head_bytes=8), 1, 4, 10, 2)
_PLAIN: dict[Any, Any] = {int: 3, str: "prefill0@1", float: 0.5, bytes: b"xy", bool: True, KvLayout: _LAYOUT}


@cache
def outputs() -> tuple[str, ...]:
    """Return an output of each tool that can be read."""
    folder = ROOT / "tests" / "calibration" / "outputs"
    return tuple(path.read_text(encoding="utf-8") for path in sorted(folder.iterdir()))


@cache
def payloads() -> tuple[bytes, ...]:
    """Return a message of every kind as bytes, and a refusal."""
    kinds = [kind for kind in vars(messages).values() if isinstance(kind, type) and issubclass(kind, KvMessage)]
    encoded = [messages.encode(_example(kind)) for kind in kinds if kind is not KvMessage]
    assert len({type(messages.decode(payload)) for payload in encoded}) == len(encoded)
    return (*encoded, messages.refusal("why"))


def _example(kind: Any) -> Any:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return tuple(_example(one) for one in (inner[:1] * 2 if inner[-1] is Ellipsis else inner))
    if origin is dict:
        return {_example(inner[0]): _example(inner[1])}
    if origin in (UnionType, typing.Union):
        return _example(inner[0])
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind)
        return kind(*(_example(hints[name]) for name in kind.__struct_fields__))
    return _PLAIN[kind]


@cache
def card() -> bytes:
    """Return what an endpoint introduces itself with."""
    from backends.base.control import Card

    return msgspec.msgpack.encode(Card("a", "tcp://127.0.0.1:4000", b"0123456789abcdef", "1/2/3"))


_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
_PREFILLED = (
    b'{"choices":[{"text":"a","finish_reason":"length"}],"usage":{"prompt_tokens":3,"completion_tokens":1},'
    b'"kv_transfer_params":{"do_remote_prefill":true,"remote_engine_id":"e","remote_block_ids":[1,2]}}'
)
_COMPLETED = tuple(
    b'data: {"choices":[{"text":"a","token_ids":[7]%b}],"usage":{"prompt_tokens":3,"completion_tokens":%d}}\n\n'
    % (b',"finish_reason":"length"' if count == 4 else b"", count)
    for count in range(1, 5)
)
_GENERATED = tuple(
    b'data: {"text":"a","meta_info":{"id":"r","finish_reason":%b,"prompt_tokens":3,"completion_tokens":%d}}\n\n'
    % (b'{"type":"length","length":4}' if count == 4 else b"null", count)
    for count in range(1, 5)
)


def answers(random: Random) -> list[bytes]:
    """Return the right answers of one server: of vLLM or SGLang; or of two: vLLM's prefill and decode."""
    kind = random.randrange(3)
    stream = _HEAD + b"".join(_GENERATED if kind == 1 else _COMPLETED) + b"data: [DONE]\n\n"
    return [_HEAD + _PREFILLED, stream] if kind == 2 else [stream]


MANNERS = "whole", "pieces", "reset", "stalled"
"""How a server sends its answer: at once, bit by bit, up to a reset of the connection, or half of it and no more."""


def served(answers: list[bytes], manner: str = "whole") -> Any:
    """Return the row of a request of 3 and 4 tokens that servers on loopback answer with these bytes, in turn.

    The first server answers in a *manner* of `MANNERS`.
    """
    import asyncio

    from backends.live.client import _one
    from backends.live.http import LiveServer, OpenAiCompletions, SglangGenerate, session
    from backends.live.routes import Direct, RequestRow, VllmPair
    from pdsim.serving.workload import Request

    left, manners = list(answers), [manner]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await reader.readuntil(b"\r\n\r\n")
            data, how = left.pop(0) if left else b"", manners.pop() if manners else "whole"
            half = len(data) // 2
            for start, end in ((0, half), (half, len(data))):
                writer.write(data[start:end])
                await writer.drain()
                if how == "reset":
                    writer.transport.abort()
                await asyncio.sleep({"pieces": 1e-3, "stalled": 1.0}.get(how, 0.0))
        writer.close()

    async def serve() -> RequestRow:
        listener = await asyncio.start_server(answer, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        servers, row = [LiveServer("server", "server0", url)], RequestRow()
        form: Any = OpenAiCompletions("tiny", ignore_eos=True, continuous=True, request={})
        if b"meta_info" in answers[-1]:
            form = SglangGenerate(ignore_eos=True, prompts="ids", request={})
        pair = VllmPair(form, "round_robin", True, servers, servers)
        route = pair if len(answers) > 1 else Direct(form, "round_robin", True, servers)
        async with session(key="", connections=2, connect_timeout=2.0) as opened:
            slots, start = asyncio.Semaphore(1), asyncio.get_running_loop().time()
            patience = 0.1 if manner == "stalled" else 5.0
            await _one(Request(0.0, 3, 4), row, route, opened, b"[1,2,3]", slots, start, patience)
        listener.close()
        return row

    return asyncio.run(serve())


@cache
def endpoint() -> Any:
    """Return an endpoint of a modelled job to which a peer has been added that can be connected to."""
    return _endpoints()[0]


@cache
def address() -> bytes:
    """Return the address of that peer."""
    blob: bytes = _endpoints()[1].address()
    return blob


@cache
def _endpoints() -> tuple[Any, Any]:
    from pdsim.config import build
    from pdsim.core.clock import Clock
    from pdsim.hardware.machine import Machine
    from pdsim.sim.endpoint import SimEndpoint
    from pdsim.sim.memory import DeviceMemory, SimDevice
    from pdsim.sim.model import _Records
    from pdsim.sim.network import Network
    from pdsim.sim.posting import Fabric
    from pdsim.sim.topology import Topology
    from pdsim.transfer.job import Place

    machine, clock = build(Machine, MACHINE, "hw"), Clock()
    network = Network(clock)
    topology = Topology(machine, network)
    model = EngineModel(path="nvlink", call=1e-6, descriptor=1e-6, overlap=False, latency=0.0)
    engine = Engine(name="e", implementation="e", vendors=("nvidia",), intra=model, inter=None)
    fabric = Fabric(clock, network, topology, engine)
    endpoints = []
    for gpu, name in enumerate("ab"):
        site = topology.site(Place(0, gpu))
        device = SimDevice(DeviceMemory(site.name, 1 << 20), clock, network, topology.memory(site))
        one = SimEndpoint(fabric, name, clock, device, site, _Records())
        one.register(device.allocate(4096), "kv")
        endpoints.append(one)
    return endpoints[0], endpoints[1]


def kept_run(folder: Path) -> Path:
    """Return the folder, within *folder*, of a right run: a small one on the model."""
    from pdsim.config.compose import compose
    from pdsim.run import run

    words = ["hw=8xh20", "workload.count=3", f"output={folder}"]
    return run(compose(words), words, quiet=True)[1]
