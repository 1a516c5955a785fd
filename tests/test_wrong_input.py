"""Wrong and nonsensical configurations: one line that says why and what to write instead, status 2, nothing written.

`WRONG` breaks a rule of the grammar, a type, a unit or a range; `NONSENSE` keeps them all and means nothing that
there is.  Refusals of commands, files and combinations are in `tests.test_cli`.
"""

import importlib
from importlib.metadata import EntryPoint

import pytest

from pdsim.core import plugins
from tests.test_cli import QUICK, cases

WRONG = """
hw.nic.rate=400Gb -> hw.nic.rate: '400Gb' is not a rate; write something like 400Gbps or 50GB/s
"hw.nic.rate=[1Gbps,2Gbps]" -> hw.nic.rate: ['1Gbps', '2Gbps'] is not a rate
"hw.nic.rate=???" -> hw.nic.rate: it has no value yet; write hw.nic.rate=VALUE
"hw.nic.rate=${hw.nic}" -> hw.nic.rate: Interpolation to parent node detected; write hw.nic.rate=VALUE, or
hw.nic.rate==3 -> a value with blanks, commas, brackets, quotes or = needs quotes
hw.link.rate=5Mbps -> hw.link.delay is missing and has no default
hw=link hw.link.changes=stall -> hw.link.changes[0] must have keys of its own (kind, start, end, share, hop)
hw=link "hw.link.changes=[{kind: stal, start: 1s, end: 3s}]" -> got 'stal'; did you mean stall?
backend.intra=null -> has costs neither in backend.intra nor in inter; leave one of them as it is
collective=gloo collective.timing=device -> needs collective.plain.device, and nobody has measured it for gloo
"backend.options={a: {b: c}}" -> backend.options.a must be text
model.hybrid.pattern=xyz -> model.hybrid.pattern must be of a, w and m with at least one a, got 'xyz'
workload=poisson workload.rate=2Gbps -> workload.rate: '2Gbps' is not a number a second; write something like 4 or
hw=8xh20 backend=nixl parallel.decode.tp=2 kv.staging=true kv.staging_ring=64GiB -> kv.staging_ring=64 GiB does not
launch.silence=5s -> launch sets options of processes, and target=model starts none; set target=real or
output= -> output must name a folder, got ''; write output=FOLDER, or leave output out
workload.trace= -> workload.trace= is empty; name a file, or leave it out
output=\udcc3\udcb8 -> is not text in this terminal's encoding; set LC_ALL=C.UTF-8 or PYTHONUTF8=1
output=/dev/null/x -> output=/dev/null/x: Not a directory; name a folder that can be written to
experiment.router=nearest -> experiment.router=nearest is provided by no installed package; there are cache_aware,
"experiment=[]" -> experiment=[] chooses nothing; there are allgather,
experiment=transfer experiment.points=/ -> experiment.points=/: Is a directory; name a CSV file of points
hw.interconnect.kind=nvswitch -> must be one of switch, mesh, none, got 'nvswitch'; did you mean switch?
hw=8xh2O -> hw=8xh2O does not exist; did you mean hw=8xh20?
cache.host=100GB -> cache.host: '100GB' is not a number; write a number or something like 8k,
policy.queues=3 -> unknown key policy; it belongs to the backend: write backend.policy.KEY=VALUE
"""

NONSENSE = """
hw.nic.rate=400 -> hw.nic.rate=400 has no unit; did you mean 400Gbps?
"hw.nic={rate: 400}" -> hw.nic.rate=400 has no unit; did you mean 400Gbps?
hw.gpu.compute=148 -> hw.gpu.compute=148 has no unit; did you mean 148TFLOPS?
backend.intra.call=3 -> backend.intra.call=3 has no unit; did you mean 3us?
hw=link "hw.link.changes=[{kind: stall, start: 1, end: 3s}]" -> hw.link.changes[0].start=1 has no unit; did you
hw.nic.rate=4e20 -> hw.nic.rate=4e+20 has no unit; write it with one of Gbps, GB/s
hw.interconnect.latency=2h -> did you mean 2us?
hw.nic.rate=1bps -> did you mean 1Gbps?
hw.nic.latency=1e-30s -> expected 0.1 ns to 1 s; correct it, or set
hw.gpu.memory=96 -> hw.gpu.memory=96 B is not plausible, expected 64 MiB to 16 TiB; did you mean 96GiB?
hw.nic.rate=400bps -> hw.nic.rate=400bps is not plausible, expected 1 MB/s to 10 TB/s; did you mean 400Gbps?
hw.gpus=100000 -> hw.gpus=100,000 is not plausible, expected 1 to 1,024
model.parameters=7 -> model.parameters=7 is not plausible, expected 1e+04 to 1e+15; did you mean 7B?
workload=poisson workload.count=1e9 -> workload.count=1,000,000,000 is not plausible, expected 1 to 10,000,000
hw.gpus=0 -> moves bytes over nvlink, but hw=8xh20 has no GPUs (hw.gpus=0)
hw.name=../x -> hw.name='../x' must be 1 to 64 characters without a slash
model.kv_dtype=int8 -> model.kv_dtype must be one of bf16, fp16,
model.kv_heads=7 -> model.heads=64 must be a multiple of model.kv_heads=7; correct one of them
model.attention=mla -> model.latent_dim must be > 0 for attention=mla, got 0; write model.latent_dim=512
parallel.prefill.dp=3 -> parallel.prefill.dp must divide tp=4, whose ranks it divides among groups, got 3; use 1, 2,
parallel.decode.cp=2 -> decode ranks are not context-parallel; leave decode.cp at 1
kv.pool=1MiB kv.page_size=64 -> a page of kv.page_size=64 tokens takes 5 MiB a rank, and 1 MiB are left for KV
workload=poisson workload.trace=x -> workload.trace=x has requests of its own, and workload.arrivals=poisson gen
workload=poisson workload.input_mean=200k -> exceed model.context=131072; lower them, choose a model with a longer
workload=poisson workload.count=null -> workload.arrivals=poisson has no end; set workload.count=N
hw=link hw.nodes=1 -> hw.nodes must be from 2 to 250 with hw.link, which joins them, got 1
hw=link "hw.link.changes=[{kind: stall, start: 3s, end: 1s}]" -> end must be > start=3.0, got 1.0
experiment=allgather "experiment.ranks=[99]" -> experiment.ranks=99: each takes a GPU and hw=8xh20 has 8
"""

GLOO = ("hw=loopback", "target=real", "collective=gloo", "collective.timing=device")
GLOO += tuple(f"collective.{kind}.device=[{{latency: 1us, rate: 1GB/s}}]" for kind in ("plain", "symmetric"))
LONG = (GLOO, "collective=gloo gathers memory of the host; use timing=caller")
CASES = [*cases(WRONG), *cases(NONSENSE), LONG]


pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


@pytest.mark.slow
@pytest.mark.parametrize(("words", "message"), CASES, ids=lambda text: " ".join(text)[:60])
def test_wrong_input_is_one_line_status_two_and_nothing_written(pdsim_says, tmp_path, words, message):
    status, out, err = pdsim_says("run", *words)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert err.startswith("pdsim: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "hw.name, hw.vendor, hw.nodes, hw.gpus, hw.gpu, hw.interconnect, hw.nic, hw.host are missing"),
        (b"\xff\xfe\0", "{mine} is not text in UTF-8: 'utf-8' codec can't decode byte 0xff"),
        (b"name: [", "{mine} is not YAML: while parsing a flow node"),
        (b"nodes: 1\nnodes: 2", "{mine} is not YAML: while constructing a mapping"),
        (b"nodes:\t1", "{mine} is not YAML: while scanning for the next token found character"),
    ],
)
def test_a_file_that_is_no_configuration_is_one_line(pdsim_refuses, tmp_path, content, said):
    (tmp_path / "hw").mkdir()
    mine = tmp_path / "hw" / "mine.yaml"
    mine.write_bytes(content)
    (line,) = pdsim_refuses("run", "--config-dir", tmp_path, "hw=mine").splitlines()
    assert line.startswith(f"pdsim: {said.format(mine=mine)}")


@pytest.mark.parametrize(
    "words",
    [
        ("model.parameters=7B",),
        ("slo.ttft=500ms",),
        ("hw.nic.latency=0",),
        ("hw.interconnect.latency=5s", "check.plausible=false"),
        ("workload=poisson", "workload.rate=4req/s", "workload.input_mean=8k"),
    ],
)
def test_what_was_meant_is_taken(pdsim_says, words):
    assert pdsim_says("run", *QUICK, *words, "--quiet") == (0, "", "")


@pytest.mark.parametrize(("words", "warns"), [((), True), (("--config-dir", "own"), False)])
def test_an_engine_that_was_never_calibrated_here_is_named(pdsim_says, tmp_path, words, warns):
    source = plugins.conf() / "calibration" / "mooncake_tcp-link.yaml"
    own = tmp_path / "own" / "calibration"
    own.mkdir(parents=True)
    text = source.read_text(encoding="utf-8").replace("mooncake_tcp-link", "mooncake_tcp-loopback")
    (own / "mooncake_tcp-loopback.yaml").write_text(text.replace("hw: link", "hw: loopback"), encoding="utf-8")
    _, out, _ = pdsim_says("run", *QUICK, "hw=loopback", "backend=mooncake_tcp", *words)
    line = "calibrate first: pdsim calibrate target=real hw=loopback backend=mooncake_tcp --quick"
    assert (line in out) == warns


@pytest.mark.parametrize(
    ("option", "way_out"),
    [("threads=4", "only the real engine reads options"), ("MC_FORCE_TCP=1", "the model of TCP is backend=moon")],
)
def test_ignored_options_of_the_engine_are_named(pdsim_prints, option, way_out):
    said = f"backend.options.{option.partition('=')[0]} has no effect on target=model: {way_out}"
    assert said in pdsim_prints("run", *QUICK, f"backend.options.{option}")
    assert "has no effect" not in pdsim_prints("run", *QUICK)


@pytest.mark.parametrize("name", ["结果", "mit leer", "Ωμέγα/нуль"])
def test_folders_and_traces_may_have_any_name(pdsim_says, tmp_path, monkeypatch, name):
    home = tmp_path / "дом 家"
    home.mkdir()
    monkeypatch.chdir(home)
    (home / "spur-ß.jsonl").write_text('{"timestamp": 0, "input_length": 9, "output_length": 2}\n')
    for _ in range(2):
        status, out, err = pdsim_says("run", "workload.trace=spur-ß.jsonl", f"output='{name}'")
        assert (status, name in out, err) == (0, True, "")
    folders = sorted((home / name).iterdir())
    for words in (["show", folders[0]], ["compare", *folders]):
        status, out, _ = pdsim_says(*words)
        assert (status, name in out) == (0, True)


def test_an_error_after_an_interruption_is_the_interruption(monkeypatch, capsys):
    def cleaning_up_fails(words):
        try:
            raise KeyboardInterrupt
        finally:
            raise AttributeError("of a library")

    module = importlib.import_module("pdsim.cli.main")
    monkeypatch.setitem(module._DO, "list", cleaning_up_fails)
    assert module.main(["list"]) == 130
    assert capsys.readouterr().err == "pdsim: interrupted; nothing was kept\n"


KEYS = {"engine.scheduler": plugins.SCHEDULERS, "engine.handoff": plugins.HANDOFFS}
KEYS |= {"experiment.router": plugins.ROUTERS, "autoscale.policy": plugins.AUTOSCALERS}


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("nowhere:Mine", "(nowhere:Mine) cannot be imported: No module named 'nowhere'; correct"),
        ("sys:Mine", "(sys:Mine) cannot be imported: module 'sys' has no attribute 'Mine'; correct"),
        ("sys:maxsize", "sys:maxsize is neither a class nor a function; correct"),
    ],
)
def test_a_plugin_that_cannot_be_used_is_refused(pdsim_says, monkeypatch, key, target, why):
    before = plugins._entries
    own = {target: EntryPoint(target, target, KEYS[key])}
    monkeypatch.setattr(plugins, "_entries", lambda group: before(group) | own)
    status, _, err = pdsim_says("run", f"{key}='{target}'")
    assert (status, err.count("\n")) == (2, 1)
    assert err.startswith(f"pdsim: {key}={target}: ")
    assert why in err
