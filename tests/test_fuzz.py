"""What others write is read, or refused as documented, however it is damaged.

``PDSIM_FUZZ=20000 pytest tests/test_fuzz.py -m "slow or not slow" --timeout 0`` draws 20,000 new inputs a test.
"""

import asyncio
import copy
import io
import json
import os
import re
import typing
from contextlib import suppress
from functools import cache, reduce
from operator import getitem
from pathlib import Path
from types import UnionType

import msgspec
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

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


def inputs(count):
    """Try *count* inputs, the same each time, or as many new ones as PDSIM_FUZZ says; 10 s are too long for one."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    how = {"database": None, "deadline": 10_000, "suppress_health_check": checks}
    return settings(max_examples=MANY or count, derandomize=not MANY, **how)


def refused_in_one_line(act, *arguments):
    """Call *act*; what it may raise is a `ConfigError` of one line a mistake, none of them empty."""
    problem = ""
    try:
        act(*arguments)
    except ConfigError as error:
        problem = str(error)
    assert all(map(str.strip, problem.split("\n"))) or not problem


# --- damage


@st.composite
def damaged(draw, valid, pieces):
    """Draw one of *valid*, texts or bytes, with up to four places cut, repeated, or overwritten with *pieces*."""
    value = draw(valid)
    for _ in range(draw(st.integers(0, 4))):
        at, old = draw(st.integers(0, len(value))), draw(st.sampled_from((0, 0, 1, 1, 2, 5, 12, 80)))
        again = draw(st.integers(0, len(value)))
        value = value[:at] + draw(pieces | st.just(value[again : again + 12])) + value[at + old :]
    return value


CHARACTERS = st.text("0123456789.-+eE|:,{}[]()\"'#=$%&*!?/\\ \n\t\x00NaTrufl\u00e9\u2028\ud7ff", max_size=4)
BYTES = st.binary(max_size=8) | st.sampled_from([b"\xc1", b"\xa3"])
NUMBERS = ("-1", "0", "1.5", "true", "null", "1e308", f"{1 << 62}", "9" * 400, '"4"')
ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([10**400, "1e9", "400Gbps", "-3us", "${hw}", "???", {"kind": "stall"}]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=3,
)


def torn(*valid):
    return damaged(st.sampled_from(valid), BYTES)


def edited(*valid):
    texts = damaged(st.sampled_from(valid), CHARACTERS).map(lambda text: text.encode(errors="surrogatepass"))
    return texts | torn(*(text[:200].encode() for text in valid))


GONE = "left out"


def places(value, at=()):
    """Yield where something is in a tree of mappings and lists, or could be."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*at, key)
        yield from places(inner, (*at, key))
    if isinstance(value, dict):
        yield (*at, "another")


def changes(values):
    """Draw one to three places of the tree *values*, and what is put there."""
    return st.lists(st.tuples(st.sampled_from([*places(values)]), ODD | st.just(GONE)), min_size=1, max_size=3)


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


@inputs(1000)
@given(torn(*PAYLOADS) | st.binary(max_size=64).map(bytes([messages.VERSION]).__add__))
@example(b"\x93\xa1\x93")
def test_any_bytes_are_a_message_or_a_message_error(payload):
    with suppress(MessageError):
        messages.decode(payload)


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


@inputs(300)
@given(torn(endpoints()[1]), st.lists(torn(CARD), max_size=2), st.lists(torn(b"12"), max_size=3), st.booleans())
def test_any_frames_of_a_connection_are_read_or_refused(address, cards, frames, number):
    for act in (
        lambda: endpoints()[0].connect(address),
        lambda: _card("a", cards),
        lambda: fields(frames, int if number else str, int),
    ):
        with suppress(MessageError, TransferError):
            act()


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
@inputs(300)
@given(edited(*TRACES), edited(SAMPLES), edited(*OUTPUTS), st.sampled_from(["", *importers.FORMATS]))
def test_any_file_is_read_or_refused_in_a_line(tmp_path, trace, rows, output, tool):
    path = tmp_path / "input"
    for content, act in (
        (trace, lambda: workload.load(Workload(trace=str(path)), 0, 1000)),
        (rows, lambda: samples.read(path)),
        (output, lambda: importers.read(path, tool)),
    ):
        path.write_bytes(content)
        refused_in_one_line(act)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    words = ["hw=8xh20", "workload.count=3", f"output={tmp_path_factory.mktemp('kept')}"]
    return run(compose.compose(words), words, quiet=True)[1]


@pytest.mark.slow
@inputs(60)
@given(st.data())
def test_any_folder_of_results_is_shown_or_refused(kept, tmp_path, data):
    folder = tmp_path / "sweep" / "run"
    folder.mkdir(parents=True, exist_ok=True)
    contents = {name: (kept / name).read_bytes() for name in FILES}
    which = data.draw(st.sampled_from([name for name in FILES if not name.endswith("parquet")]))
    content = edited(contents[which].decode())
    if which.endswith("json"):
        right = json.loads(contents[which])
        content |= changes(right).map(lambda drawn: json.dumps(changed(right, drawn)).encode())
    for name in FILES:
        (folder / name).write_bytes(data.draw(content) if name == which else contents[name])
    out = io.StringIO()
    for act in (
        lambda: terminal.show(folder, out),
        lambda: terminal.as_json(folder),
        lambda: [terminal.show_table(table, out) for table in compare.tables([kept, folder])],
        lambda: compare.as_dict([folder, kept]),
    ):
        refused_in_one_line(act)


# --- configurations

TREES = (
    "hw=2xh200 backend=nixl calibration=nixl-2xh200 autoscale.policy=thresholds",
    "hw=link backend=nixl_tcp experiment=transfer hw.link.changes=[{kind:stall,start:1s,end:2s}]",
    "target=live live.url=[http://localhost:8000] workload=tenants",
)


@pytest.mark.slow
@inputs(150)
@given(st.sampled_from(TREES).flatmap(lambda words: st.tuples(st.just(words), changes(tree(*words.split())))))
@example((TREES[0], [(("backend", "policy"), None)]))
@example((TREES[0], [(("engine", "sources"), None)]))
@example((TREES[0], [(("model", "hf_config", "intermediate_size"), None)]))
def test_any_values_are_a_configuration_or_refused(drawn):
    words, changes = drawn
    refused_in_one_line(load, changed(tree(*words.split()), changes))


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


@inputs(150)
@given(st.lists(damaged(st.sampled_from(WORDS), CHARACTERS), min_size=1, max_size=3))
def test_any_words_are_overrides_or_refused(words):
    refused_in_one_line(overridden, words)


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


@st.composite
def miscounted(draw, payload):
    """Draw *payload* with one of its numbers replaced by an odd one."""
    at = draw(st.sampled_from(list(re.finditer(rb"\d+", payload))))
    return payload[: at.start()] + draw(st.sampled_from(NUMBERS)).encode() + payload[at.end() :]


@pytest.mark.slow
@inputs(150)
@given(
    st.data(),
    st.sampled_from([VLLM, SGLANG]),
    st.booleans(),
    st.sampled_from(["whole"] * 17 + ["late", "cut", "held"]),
)
def test_a_request_ends_whatever_a_server_answers(data, form, pair, manner):
    stream = OK + b"".join(STREAMS[form]) + b"data: [DONE]\n\n"
    answers = [OK + PREFILLED, stream] if pair and form is VLLM else [stream]
    drawn = [data.draw(torn(answer) | miscounted(answer) | st.just(answer)) for answer in answers]
    parts = [[answer[: len(answer) // 2], answer[len(answer) // 2 :]] for answer in drawn]
    parts[0].insert(1, {"whole": b"", "late": 1e-3, "cut": None, "held": 1.0}[manner])
    row = asyncio.run(served(*(part.copy for part in parts), form=form, patience=0.1 if manner == "held" else 5.0))
    assert row.status.startswith(ENDS)
    assert len(row.status.splitlines()) == 1
    assert row.status != "ok" or (row.tokens == 4 and row.first is not None and min(row.gaps, default=0) >= 0)
    assert manner == "held" or not row.status.startswith("Timeout")
