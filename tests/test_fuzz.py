"""What others write is read, or refused as documented, however it is damaged.

``PDSIM_FUZZ=20000 pytest tests/test_fuzz.py -m "slow or not slow" --timeout 0`` draws 20,000 new inputs a test.
They are drawn by `random`: Hypothesis took 4 ms an input, hundreds of times what most readers take.
"""

import asyncio
import copy
import io
import json
import os
import re
import shutil
import typing
from contextlib import suppress
from functools import cache, reduce
from operator import getitem
from pathlib import Path
from random import Random
from time import monotonic
from types import UnionType

import msgspec
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException

from backends.base.control import Card, _card, fields
from pdsim.calibration import importers, samples
from pdsim.cli.help import parse
from pdsim.config import compose, load
from pdsim.core.clock import Clock
from pdsim.core.errors import ConfigError, MessageError, TransferError
from pdsim.kv import messages
from pdsim.kv.layout import KvLayout, KvShape
from pdsim.kv.messages import KvMessage
from pdsim.results import compare, terminal
from pdsim.results.store import FILES
from pdsim.run import run
from pdsim.serving import workload
from pdsim.serving.settings import Workload
from pdsim.sim.endpoint import SimEndpoint
from pdsim.sim.memory import DeviceMemory, SimDevice
from pdsim.sim.model import _Records
from pdsim.sim.network import Network
from pdsim.sim.posting import Fabric
from pdsim.sim.topology import Topology
from pdsim.transfer.job import Place
from tests.support.answering import OK, SGLANG, VLLM, served
from tests.support.composed import tree
from tests.support.machines import engine, machine
from tests.test_config import RULES

MANY = int(os.environ.get("PDSIM_FUZZ", "0"))


def inputs(count, draw, act):
    """Call *act* with *count* inputs, the same each time, or as many new ones as PDSIM_FUZZ says.

    *draw* makes one of a `Random`.  10 s are too long for one.
    """
    random = Random() if MANY else Random(0)
    for _ in range(MANY or count):
        drawn, start = draw(random), monotonic()
        try:
            act(drawn)
            assert monotonic() - start < 10
        except BaseException as error:
            error.add_note(f"input: {drawn!r}")
            raise


def refused_in_one_line(act, *arguments):
    """Call *act*; what it may raise is a `ConfigError` of one line a mistake, none of them empty."""
    problem = ""
    try:
        act(*arguments)
    except ConfigError as error:
        problem = str(error)
    assert all(map(str.strip, problem.split("\n"))) or not problem


# --- damage


def damaged(random, value, piece):
    """Return *value*, text or bytes, with up to four places cut, repeated, or overwritten by *piece*."""
    for _ in range(random.randint(0, 4)):
        at, old = random.randint(0, len(value)), random.choice((0, 0, 1, 1, 2, 5, 12, 80))
        again = random.randint(0, len(value))
        new = value[again : again + 12] if random.random() < 0.3 else piece(random)
        value = value[:at] + new + value[at + old :]
    return value


CHARACTERS = "0123456789.-+eE|:,{}[]()\"'#=$%&*!?/\\ \n\t\x00NaTrufl\u00e9\u2028\ud7ff\x1b\u202e"
BYTES = (b"\xc1", b"\xa3", b"\xff\xff\xff\xff", b"\x7f")
NUMBERS = ("-1", "0", "1.5", "true", "null", "1e308", f"{1 << 62}", "9" * 400, '"4"')
ODD = (None, True, False, 0, -1, 1, 1 << 63, 10**400, 0.5, -1e-9, 1e308, float("nan"), float("inf"), "", "1e9")
ODD += ("400Gbps", "-3us", "${hw}", "???", "\x1b[2J", "\u202eab", {"kind": "stall"})


def text(random):
    return "".join(random.choices(CHARACTERS, k=random.randint(0, 4)))


def binary(random):
    return random.randbytes(random.randint(0, 8)) if random.random() < 0.7 else random.choice(BYTES)


def odd(random, depth=2):
    kind = random.randint(0, 9)
    if kind < 2 and depth:
        values = [odd(random, depth - 1) for _ in range(random.randint(0, 2))]
        return values if kind else {text(random): value for value in values}
    if kind < 5:
        bits = random.getrandbits(random.choice((4, 20, 70)))
        return random.choice((text(random), bits, -bits, random.gauss(0, 10.0 ** random.randint(-20, 20))))
    return random.choice(ODD)


def torn(random, *valid):
    return damaged(random, random.choice(valid), binary)


def edited(random, *valid):
    if random.random() < 0.3:
        return torn(random, *(text[:200].encode() for text in valid))
    return damaged(random, random.choice(valid), text).encode(errors="surrogatepass")


GONE = "left out"


def places(value, at=()):
    """Yield where something is in a tree of mappings and lists, or could be."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*at, key)
        yield from places(inner, (*at, key))
    if isinstance(value, dict):
        yield (*at, "another")


def changes(random, where):
    """Draw one to three of the places *where*, and what is put there."""
    return [
        (random.choice(where), GONE if random.random() < 0.2 else odd(random)) for _ in range(random.randint(1, 3))
    ]


def changed(values, changes):
    """Return a copy of *values* with *changes*, but for places that an earlier one has taken away."""
    values = copy.deepcopy(values)
    for (*path, key), new in changes:
        with suppress(KeyError, IndexError, TypeError):
            inner = reduce(getitem, path, values)
            if new == GONE:
                del inner[key]
            else:
                inner[key] = new
    return values


# --- messages


def instance(kind):
    """Return a value of the type *kind* of a field or message."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return tuple(map(instance, inner[:1] * 2 if inner[-1] is Ellipsis else inner))
    if origin is dict:
        return {instance(inner[0]): instance(inner[1])}
    if origin in (UnionType, typing.Union):
        return instance(inner[0])
    if issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind)
        return kind(*(instance(hints[name]) for name in kind.__struct_fields__))
    layout = KvLayout(KvShape(layers=2, heads=4, head_bytes=8), 1, 4, 10, 2)
    return {int: 3, str: "prefill0@1", float: 0.5, bytes: b"xy", bool: True, KvLayout: layout}[kind]


KINDS = [kind for kind in vars(messages).values() if isinstance(kind, type) and issubclass(kind, KvMessage)]
PAYLOADS = [messages.encode(instance(kind)) for kind in KINDS if kind is not KvMessage] + [messages.refusal("why")]


def test_any_bytes_are_a_message_or_a_message_error():
    def draw(random):
        if random.random() < 0.3:
            return bytes([messages.VERSION]) + random.randbytes(random.randint(0, 64))
        return torn(random, *PAYLOADS)

    def act(payload):
        with suppress(MessageError):
            messages.decode(payload)

    act(b"\x93\xa1\x93")
    inputs(10_000, draw, act)


# --- connections


@cache
def endpoints():
    """Return a modelled endpoint, and the address of a peer that it can connect to."""
    clock = Clock()
    network = Network(clock)
    topology = Topology(machine(), network)
    fabric, made = Fabric(clock, network, topology, engine()), []
    for gpu, name in enumerate("ab"):
        site = topology.site(Place(0, gpu))
        device = SimDevice(DeviceMemory(site.name, 4096), clock, network, topology.memory(site))
        made.append(SimEndpoint(fabric, name, clock, device, site, _Records()))
        made[-1].register(device.allocate(512), "kv")
    return made[0], made[1].address()


CARD = msgspec.msgpack.encode(Card("a", "tcp://127.0.0.1:4000", b"0123456789abcdef", "1/2/3"))


def test_any_frames_of_a_connection_are_read_or_refused():
    def draw(random):
        cards, frames = ([torn(random, valid) for _ in range(random.randint(0, 3))] for valid in (CARD, b"12"))
        return torn(random, endpoints()[1]), cards, frames, random.choice((int, str))

    def act(drawn):
        address, cards, frames, kind = drawn
        for read in (
            lambda: endpoints()[0].connect(address),
            lambda: _card("a", cards),
            lambda: fields(frames, kind, int),
        ):
            with suppress(MessageError, TransferError):
                read()

    inputs(3000, draw, act)


# --- files

TRACES = (
    '{"timestamp": 0, "input_length": 90, "output_length": 2, "hash_ids": [1]}\n' * 3,
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.99,396,109\n",
)
SAMPLES = (
    "# kind: measured\npattern,blocks,size,seconds,per_job,held\npair,1,4096,1e-5,1e-5 2e-5,0\nincast:2,8,1,3,,1\n"
)
OUTPUTS = [path.read_text("utf-8") for path in sorted((Path(__file__).parent / "calibration/outputs").iterdir())]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["trace", "samples", "output"])
def test_any_file_is_read_or_refused_in_a_line(tmp_path, kind):
    path = tmp_path / "input"
    valid = {"trace": TRACES, "samples": (SAMPLES,), "output": OUTPUTS}[kind]
    read = {
        "trace": lambda tool: workload.load(Workload(trace=str(path)), 0, 1000),
        "samples": lambda tool: samples.read(path),
        "output": lambda tool: importers.read(path, tool),
    }[kind]

    def act(drawn):
        content, tool = drawn
        path.write_bytes(content)
        refused_in_one_line(read, tool)

    tools = ["", *importers.FORMATS]
    inputs(1000, lambda random: (edited(random, *valid), random.choice(tools)), act)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    words = ["hw=8xh20", "workload.count=3", f"output={tmp_path_factory.mktemp('kept')}"]
    return run(compose.compose(words), words, quiet=True)[1]


@pytest.mark.slow
def test_any_folder_of_results_is_shown_or_refused(kept, tmp_path):
    folder = tmp_path / "sweep" / "run"
    shutil.copytree(kept, folder)
    contents = {name: (kept / name).read_bytes() for name in FILES}
    trees = {name: json.loads(content) for name, content in contents.items() if name.endswith("json")}
    where = {name: [*places(right)] for name, right in trees.items()}

    def draw(random):
        name = random.choice(FILES)
        if name in trees and random.random() < 0.5:
            return name, json.dumps(changed(trees[name], changes(random, where[name]))).encode()
        valid = contents[name]
        return name, torn(random, valid) if name.endswith("parquet") else edited(random, valid.decode())

    def act(drawn):
        name, content = drawn
        (folder / name).write_bytes(content)
        out = io.StringIO()
        for show in (
            lambda: terminal.show(folder, out),
            lambda: terminal.as_json(folder),
            lambda: [terminal.show_table(table, out) for table in compare.tables([kept, folder])],
            lambda: compare.as_dict([folder, kept]),
        ):
            refused_in_one_line(show)
        (folder / name).write_bytes(contents[name])

    inputs(100, draw, act)


# --- configurations

TREES = (
    "hw=2xh200 backend=nixl calibration=nixl-2xh200 autoscale.policy=thresholds",
    "hw=link backend=nixl_tcp experiment=transfer hw.link.changes=[{kind:stall,start:1s,end:2s}]",
    "target=live live.url=[http://localhost:8000] workload=tenants",
)


@pytest.mark.slow
def test_any_values_are_a_configuration_or_refused():
    trees = {words: tree(*words.split()) for words in TREES}
    where = {words: [*places(right)] for words, right in trees.items()}

    def draw(random):
        words = random.choice(TREES)
        return words, changes(random, where[words])

    def act(drawn):
        refused_in_one_line(load, changed(trees[drawn[0]], drawn[1]))

    act((TREES[0], [(("backend", "policy"), None)]))
    act((TREES[0], [(("engine", "sources"), None)]))
    act((TREES[0], [(("model", "hf_config", "intermediate_size"), None)]))
    act((TREES[0], [(("model", "hf_config", "intermediate_size"), 10**400)]))
    act((TREES[0], [(("model", "layers"), 1 << 70)]))  # took all memory: a letter of a pattern each
    act((TREES[0], [(("model", "layers"), 1 << 40)]))
    act((TREES[0], [(("parallel", "decode", "tp"), 1e308)]))
    inputs(150, draw, act)


WORDS = [word for words, _ in RULES for word in words.split()]


def overridden(words):
    """Read *words* as a command line, up to Hydra's grammar."""
    overrides, _ = parse("run", words)
    ready = compose.ready(overrides)
    try:
        OverridesParser.create().parse_overrides(ready)
    except OverrideParseException as error:
        compose.explain(error)  # as Hydra would raise when it composes
        return
    compose.leaves(ready)
    compose.set_keys([word.lstrip("+") for word in overrides])


def test_any_words_are_overrides_or_refused():
    def draw(random):
        return [damaged(random, random.choice(WORDS), text) for _ in range(random.randint(1, 3))]

    inputs(500, draw, lambda words: refused_in_one_line(overridden, words))


# --- servers

PREFILLED = (
    b'{"choices":[{"text":"a","finish_reason":"length"}],"usage":{"prompt_tokens":3,"completion_tokens":1},'
    b'"kv_transfer_params":{"do_remote_prefill":true,"remote_engine_id":"e","remote_block_ids":[1,2]}}'
)
COMPLETED = (
    b'data: {"choices":[{"text":"a","token_ids":[7]%b}],"usage":{"prompt_tokens":3,"completion_tokens":%d}}\n\n'
)
GENERATED = (
    b'data: {"text":"a","meta_info":{"id":"r","finish_reason":%b,"prompt_tokens":3,"completion_tokens":%d}}\n\n'
)
STREAMS = {
    VLLM: [COMPLETED % (b',"finish_reason":"length"' if n == 4 else b"", n) for n in range(1, 5)],
    SGLANG: [GENERATED % (b'{"type":"length","length":4}' if n == 4 else b"null", n) for n in range(1, 5)],
}
MANNERS = ["whole"] * 17 + ["late", "cut", "held"]
ENDS = ("ok", "Aborted: ", "Error: ", "HTTP ", "Malformed: ", "ServerLost: ", "Timeout: ")


def miscounted(random, payload):
    """Draw *payload* with one of its numbers replaced by an odd one."""
    at = random.choice(list(re.finditer(rb"\d+", payload)))
    return payload[: at.start()] + random.choice(NUMBERS).encode() + payload[at.end() :]


@pytest.mark.slow
def test_a_request_ends_whatever_a_server_answers():
    def draw(random):
        form = random.choice((VLLM, SGLANG))
        stream = OK + b"".join(STREAMS[form]) + b"data: [DONE]\n\n"
        answers = [OK + PREFILLED, stream] if form is VLLM and random.random() < 0.5 else [stream]
        change = (torn, miscounted, lambda _, answer: answer)
        return form, [random.choice(change)(random, answer) for answer in answers], random.choice(MANNERS)

    def act(drawn):
        form, answers, manner = drawn
        parts = [[answer[: len(answer) // 2], answer[len(answer) // 2 :]] for answer in answers]
        parts[0].insert(1, {"whole": b"", "late": 1e-3, "cut": None, "held": 1.0}[manner])
        patience = 0.1 if manner == "held" else 5.0
        row = asyncio.run(served(*(part.copy for part in parts), form=form, patience=patience))
        assert row.status.startswith(ENDS)
        assert len(row.status.splitlines()) == 1
        assert row.status != "ok" or (row.tokens == 4 and row.first is not None and min(row.gaps, default=0) >= 0)
        assert manner == "held" or not row.status.startswith("Timeout")

    inputs(150, draw, act)
