"""The command line: what is typed is run, completed or explained, or a line says what to type instead."""

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import experiments.transfer
import pdsim
from pdsim.cli.complete import parser, values
from pdsim.cli.help import COMMANDS
from pdsim.cli.main import _DO
from pdsim.results.store import FILES

ROOT = Path(pdsim.__file__).parent.parent
QUICK = ("experiment=transfer", "experiment.patterns=[pair]", "experiment.size=4KiB", "experiment.blocks=1")
QUICK += ("experiment.repeat=2",)


pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def started(*words, python=(), **options):
    command = [sys.executable, *python, "-m", "pdsim", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def answer(*words, python=(), **options):
    process = started(*words, python=python, **options)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@pytest.mark.parametrize("words", [(), ("--help",), ("run", "--help"), ("run", "hw=8xh20", "-h"), ("--version",)])
def test_help_answers_without_importing_what_only_a_run_needs(words):
    status, out, err = answer(*words, python=("-X", "importtime"))
    imported = {line.rpartition("|")[2].strip() for line in err.splitlines()}
    assert status == 0
    assert out
    assert not imported & {"hydra", "omegaconf", "numpy", "simpy", "pyarrow", "rich", "zmq", "msgspec"}


def test_list_says_in_one_line_what_each_choice_is(pdsim_says):
    status, out, _ = pdsim_says("list", "hw")
    assert status == 0
    assert re.search(r"^  2x8xh20 +2 nodes of 8 x H20", out, re.MULTILINE)
    assert "@package" not in out
    assert "backend=" in pdsim_says("list")[1]


def test_a_copy_of_the_schema_s_template_runs(pdsim_says, tmp_path):
    status, out, _ = pdsim_says("list", "hw", "--schema")
    assert status == 0
    assert "hw.gpu.memory: size, > 0 (default: required)" in out
    template = Path(out.rpartition("begin with a copy of ")[2].partition(" as DIR")[0])
    (tmp_path / "hw").mkdir()
    (tmp_path / "hw" / "mine.yaml").write_text(template.read_text().replace("name: 8xh100", "name: mine"))
    words = ["hw=mine", "model=qwen3-8b", "workload.count=1", f"output={tmp_path}", "-q"]
    assert pdsim_says("run", "--config-dir", str(tmp_path), *words)[0] == 0
    status, _, error = pdsim_says("run", "--config-dir", str(tmp_path), "hw=mine", "hw.gpu.memry=1GB")
    assert status == 2
    assert error.strip().endswith("all keys: pdsim list hw --schema")


def test_doctor_tells_what_works_and_what_the_rest_needs(pdsim_says):
    status, out, _ = pdsim_says("doctor")
    assert status == 0
    for engine in ("mooncake_tcp", "nixl_tcp", "nixl_shm", "mooncake_nvlink", "mori"):
        assert re.search(rf"^  {engine} +(works  .|no     .+; .)", out, re.MULTILINE)
    assert re.search(r"^  submitit +(works  1\.|no     not installed: pdsim sweep cannot run)", out, re.MULTILINE)
    assert re.search(r"^  hw=link +(works|no     .+; .)", out, re.MULTILINE)


# --- refusals: exit status 2, one line for each mistake, nothing written


def cases(text):
    """Return the lines "WORDS -> MESSAGE" of *text* as pairs."""
    lines = (line.split(" -> ") for line in text.strip().splitlines())
    return [(tuple(shlex.split(words)), message) for words, message in lines]


REFUSALS = """
rnu -> unknown command 'rnu'; did you mean run?
serve -> 'serve' is not a command; did you mean pdsim run experiment=serve?
hw=8xh20 seed=1 -> did you mean pdsim run hw=8xh20 seed=1?
run --shell-completion -> unknown option --shell-completion; keys are written KEY=VALUE, without dashes;
run --hw 8xh20 -> unknown option --hw; write hw=8xh20, or see pdsim run --help
run workload.isl=1024 -> unknown key workload.isl; did you mean workload.input_mean?
run workload.input=8k -> unknown key workload.input; did you mean workload.input_mean or workload.input_cv?
run experiment=capacity experiment.rates=2 -> did you mean experiment.rate? experiment has
run tp=4 -> unknown key tp; did you mean parallel.prefill.tp or parallel.decode.tp?
run parallel.mem_fraction_static=0.8 -> did you mean scheduler.memory_fraction?
version -> unknown command 'version'; did you mean --version?
help concurrency -> no command and no key 'concurrency'; did you mean workload.users?
show -> show needs the folder of a run, such as one in results; see pdsim show --help
show nowhere -> nowhere is not a folder; name the folder of a run
show . -> . has no config.yaml,
compare . -> compare takes 2 to 26 folders of runs, got 1
best -> best needs the folder of a sweep, such as one in results; see pdsim best --help
best . -> best ranks the points of one sweep, got .; name the folder of a sweep, such as results/sweep-HASH,
recipe prefill.sh -> prefill.sh is not a file; name one, or write a command line in quotes: 'vllm serve MODEL'
recipe --to foo . -> --to foo is not known; write --to vllm or --to sglang
recipe --to vllm nowhere -> --to vllm needs the folder of one run, got nowhere; name one
list hw hw=8xh200 -> hw=8xh200: a value is for what auto takes; write pdsim list compute hw=8xh200
list modell -> no group 'modell'; did you mean model? There are backend,
doctor now -> doctor takes no arguments but --host and --config-dir, got 'now'
run 8xh200 -> '8xh200' is not KEY=VALUE; did you mean hw=8xh200?
run hw -> 'hw' is not KEY=VALUE; write hw=NAME with one of 1xa100,
run =8xh200 -> '=8xh200' is not KEY=VALUE, such as hw=8xh20 or workload.rate=2; see pdsim run --help
run workload.trace=~/nowhere/x.jsonl -> /nowhere/x.jsonl cannot be read: No such file or directory; name a file
run model=DeepSeek-R1 -> did you mean model=deepseek-v3, of the same shape? There are deepseek-r1-fp4,
run model=gpt-4 -> tiny-mla; or model=ORGANISATION/NAME of the Hugging Face Hub, or model=./FOLDER
run kv.dtype=fp8 -> unknown key kv.dtype; did you mean model.kv_dtype?
run batch_size=8 -> unknown key batch_size; did you mean scheduler.decode_batch?
run model.kv_dtype=fp8 -> got 'fp8'; fp8 of vLLM and SGLang is fp8_e4m3
run "~backend=nixl" -> ~backend=nixl would leave a run without backend; choose one, as in backend=NAME
run --cfg -> --cfg needs a value after it
run calibration=nonsense -> calibration=nonsense does not exist;
run output=/proc/none -> output=/proc/none: No such file or directory; name a folder that can be written to
run hw=mybox -> rdma_guest; a file of yours: DIR/hw/mybox.yaml, with --config-dir DIR
run hw= -> hw= chooses nothing; there are 1xa100,
run hw=8xh20,8xh200 -> hw=8xh20,8xh200 names several values; pdsim sweep runs one point for each
run "hw=[8xh20,8xh200]" -> hw=[8xh20,8xh200] would mix several files into one; choose one, as in hw=8xh20
run hw.gpuss=3 -> unknown key hw.gpuss; did you mean hw.gpus? hw has name,
run "~hw.nic" -> hw.nic is missing and has no default; set hw.nic=VALUE
run experiment.sizes=1 experiment=transfer -> unknown key experiment.sizes; did you mean experiment.size?
run experiment.name=srve -> experiment.name=srve does not exist; did you mean serve? There are
run workload.trace=none.jsonl -> workload.trace=none.jsonl cannot be read: No such file or directory;
run "kv.page_size=${other}" -> Interpolation key 'other' not found
run --config-dir nowhere -> --config-dir nowhere is not a folder; name one that has
run --cfg jobs -> --cfg jobs is not known; --cfg job prints what the run will use
run --config-name mine -> --config-name mine does not exist; leave it out,
run executor=ray -> executor=ray is about many points; use pdsim sweep, or leave it out
sweep hydra/launcher=joblib -> hydra/launcher=joblib is for pdsim run, which then is a job of Hydra's
sweep hw=8xh20,8xh200 executor=loca -> executor=loca does not exist; did you mean executor=local?
sweep hw=8xh20,8xh200 executor.worker=1 -> unknown key executor.worker; did you mean executor.workers
sweep seed=1,2 --zip seed,hw -> --zip seed,hw: hw has no list of values; write hw=A,B
sweep seed=1,2 hw=8xh20,8xh200,8xh100 --zip seed,hw -> but seed has 2, hw has 3
sweep seed=1,2 --seeds 2 -> --seeds and seed= set the same; give one of them
sweep --seeds none -> --seeds none: must be a whole number >= 0
sweep seed=1,2 --search optun -> --search optun is not known; write --search optuna
sweep seed=1,2 --trials 4 -> --trials needs --search optuna
sweep --search optuna -> --search has nothing to choose; write KEY=A,B or KEY=interval(LOW,HIGH)
sweep seed=1,2 --search optuna --trials 0 -> --trials 0: must be a whole number >= 1
sweep hw=8xh20,8xh200 --search optuna --seeds 2 -> --seeds with --search would search
sweep seed=1,2 --search optuna --maximize a --minimize b -> name one metric together
sweep "compute.scale=interval(1,2)" -> compute.scale=interval(...) has no list of values; add --search optuna
sweep hw=8xh20,9xh20 --search optuna -> hw=9xh20 does not exist; did you mean hw=8xh20?
run -m hw=8xh20,9xh20 -> hw=9xh20 does not exist; did you mean hw=8xh20?
run parallel.prefill.tp=8 -> 4 GPUs, hw=8xh20 has 8; lower tp or instances, or set experiment.deployment=colocated
run parallel=tp2 parallel.prefill.tp=3 -> tp=3 does not divide the 64 heads of model=llama-3.1-70b; use one
run model=qwen3-8b kv.pool=95GB -> of weights exceed the
run hw=2xh200 model=llama-3.1-70b -> puts 132 GiB of weights on each GPU at parallel.prefill.tp=1
run hw=2x8xh20 backend=mooncake_nvlink -> works within a node only, but prefill and decode lie on different
run backend=mori -> backend=mori runs on amd machines, hw=8xh20 is nvidia; leave backend out
run hw=8xh200 hw.nic.rails=3 -> hw.nic.rails=3 must divide hw.nic.count=8
run hw=8xh200 hw.nic.devices=[9] -> hw.nic.devices has card 9, and a node has cards 0 to 7
run hw=8xh200 hw.nic.devices=[1] hw.nic.rails=2 -> without the neighbours that hw.nic.rails=2 needs
run hw.nic.count=0 backend=mooncake -> moves bytes over rdma, but hw=8xh20 has no network cards
run workload.rate=2 -> workload.rate=2.0 has no effect on embedded arrivals; choose workload=poisson, or
run workload=poisson workload.cv=3 -> has no effect on poisson arrivals; choose workload=gamma, or
run target=real hw=loopback backend.options.thread=4 -> backend.options.thread is not an option of backend=mooncake_t
run target=real -> target=real on hw=8xh20 needs 8 nvidia GPUs, but
run target=real hw=loopback backend=mooncake_nvlink -> moves bytes over nvlink, but hw=loopback has no
run target=real hw=rdma_guest backend=nixl_shm -> target=real emulates hw=rdma_guest: it takes engines that go over R
run experiment=transfer experiment.ranks=9 -> experiment.ranks=9: 9 ranks take a GPU each and hw=8xh20 has 8; set
"""


@pytest.mark.parametrize(("words", "message"), cases(REFUSALS), ids=lambda value: " ".join(value)[:60])
def test_a_refused_command_says_why_and_writes_nothing(pdsim_says, tmp_path, words, message):
    status, out, err = pdsim_says(*words)
    assert (status, out) == (2, "")
    assert message in err
    assert all(line.startswith("pdsim: ") for line in err.splitlines())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package", ["conf", "backends", "experiments"])
def test_a_folder_that_hides_a_package_of_ours_is_named(tmp_path, package):
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").touch()
    status, _, err = answer("--help", cwd=tmp_path)
    assert status == 2
    assert f"the package '{package}' of pdsim is hidden by {tmp_path / package}; use the command pdsim" in err


def test_a_kept_run_is_shown_again_and_two_compared(pdsim_says, tmp_path):
    _, first, _ = pdsim_says("run", *QUICK, "output=a")
    status, json_of_b, err = pdsim_says("run", *QUICK, "output=b", "experiment.repeat=3", "--json")
    assert (status, err, json.loads(json_of_b)["overrides"][-1]) == (0, "", "experiment.repeat=3")
    a, b = (str(folder.relative_to(tmp_path)) for folder in sorted(tmp_path.glob("[ab]/*")))
    assert pdsim_says("show", a) == (0, first, "")
    shown = json.loads(pdsim_says("show", "--json", a)[1])
    assert (shown["folder"], shown["experiment"], shown["status"]) == (a, "transfer", "ok")
    assert set(shown["metrics"]["bw_max_gbs"]) == {"value", "definition", "tabled"}
    _, out, _ = pdsim_says("compare", a, b)
    assert re.search(r"^experiment.repeat +2 +3 *$", out, re.MULTILINE)
    assert re.search(r"^transfers +2 +3 +1.500 ", out, re.MULTILINE)
    assert json.loads(pdsim_says("compare", a, b, "--json")[1])["differences"] == {"experiment.repeat": [2, 3]}


def test_a_run_prints_its_table_and_keeps_one_complete_folder(pdsim_says, tmp_path):
    status, out, err = pdsim_says("run", *QUICK)
    (folder,) = (tmp_path / "results").iterdir()
    assert (status, err) == (0, "")
    assert "transfer on 8xh20 with mooncake_nvlink (model" in out
    assert f"results/{folder.name}" in out
    assert {path.name for path in folder.iterdir()} == set(FILES)
    assert {path.name for path in tmp_path.iterdir()} == {"results"}  # nothing of Hydra's


def test_the_default_is_to_serve_a_trace(pdsim_says):
    status, out, _ = pdsim_says("run", "workload.count=3")
    assert status == 0
    assert "serve llama-3.1-70b on 8xh20" in out
    _, offered, slo, *rest = out.splitlines()
    assert offered.startswith("load: prefill ")
    assert slo.startswith("SLO: 100.0 % of 3 requests meet TTFT <= 5 s and TPOT <= 50 ms (goal 99 %); 3 served in ")
    assert len(rest) <= 14
    assert rest[5].startswith("95 % interval: TTFT p50 33.4 ms to 21.3 s")


def test_the_printed_configuration_is_that_of_the_run(pdsim_says, tmp_path):
    words = (*QUICK, "hw=2xh200", "backend=mooncake_nvlink")
    text = pdsim_says("run", *words, "--cfg", "job")[1]
    assert "    rate: 394000000000.0  # 394 GB/s\n" in text
    assert "    compute: 989000000000000.0  # 989 TFLOPS\n" in text
    printed = OmegaConf.to_container(OmegaConf.create(text))
    pdsim_says("run", *words, "--quiet")
    (folder,) = (tmp_path / "results").iterdir()
    kept = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
    assert printed == {key: value for key, value in kept.items() if key not in ("defaults", "hydra")}
    assert printed["calibration"]["name"] == "mooncake_nvlink-2xh200"
    assert "calibration mooncake_nvlink-2xh200" in printed["backend"]["sources"]["intra.descriptor"]


def test_what_fails_leaves_one_line_and_marked_folder(pdsim_says, tmp_path, monkeypatch):
    def fail(config, target, progress):
        raise RuntimeError("the disk is full")

    monkeypatch.setattr("experiments.transfer.run", fail)
    status, out, err = pdsim_says("run", *QUICK)
    (folder,) = (tmp_path / "results").iterdir()
    assert (status, out) == (1, "")
    assert err.count("\n") == 1
    assert err.startswith("pdsim: RuntimeError: the disk is full (what there is of the run is in results/transfer-")
    assert folder.name.endswith(".incomplete")
    _, _, err = pdsim_says("run", *QUICK, "--debug")
    assert 'raise RuntimeError("the disk is full")' in err


def test_a_run_with_failures_ends_with_status_one(pdsim_says, monkeypatch):
    whole = experiments.transfer.run
    failed = {"failures": ["rank1: PeerLost: rank0 is gone"]}
    monkeypatch.setattr("experiments.transfer.run", lambda *arguments: replace(whole(*arguments), **failed))
    status, out, _ = pdsim_says("run", *QUICK)
    assert status == 1
    assert "failed: rank1: PeerLost: rank0 is gone" in out


def begun(process, folder):
    deadline = time.monotonic() + 60
    while not list(folder.glob("results/*/run.json")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("number", "status", "said"),
    [
        (signal.SIGINT, 130, "interrupted; a run that had begun is marked incomplete"),
        (signal.SIGTERM, 143, "ended by SIGTERM; a run that had begun is marked incomplete"),
    ],
)
def test_a_signal_ends_a_run_while_its_requests_are_drawn(tmp_path, number, status, said):
    words = ("run", "workload=poisson", "workload.count=2e8", "check.plausible=false")
    process = started(*words, cwd=tmp_path)
    begun(process, tmp_path)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    (folder,) = (tmp_path / "results").iterdir()
    assert (process.returncode, out, err) == (status, "", f"pdsim: {said}\n")
    assert json.loads((folder / "run.json").read_text())["status"] == "interrupted"


def test_ctrl_c_is_one_line_while_processes_search(tmp_path):
    words = ("run", "experiment=capacity", "experiment.processes=2", "hw=8xh20", "workload=poisson", "--quiet")
    process = started(*words, cwd=tmp_path, start_new_session=True)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 60
    while len(children.read_text().split()) < 3:  # with the one that tracks resources
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.002)
    time.sleep(0.5)  # now the workers have their first task
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=30)
    said = "pdsim: interrupted; a run that had begun is marked incomplete\n"
    assert (process.returncode, out, err) == (130, "", said)


SLOW_TO_IMPORT = """\
import sys, time
sys.stderr.write("importing\\n")
sys.stderr.flush()
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("command", "module"),
    [("run", "json"), ("run", "hydra"), ("explain", "msgspec")],  # of the command line itself, and of the commands
)
def test_ctrl_c_during_imports_is_one_line(tmp_path, command, module):
    (tmp_path / f"{module}.py").write_text(SLOW_TO_IMPORT)
    process = started(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"})
    assert process.stderr.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "pdsim: interrupted before anything had begun\n")


INTERRUPTED = """\
import os, signal, sys
from pdsim.cli.process import beginning, begun, ended
beginning()
begun()
try:
    exec("os.kill(os.getpid(), signal.SIGINT)\\nfor _ in range(10**6): pass")
except KeyboardInterrupt:
    ended()
    os.kill(os.getpid(), signal.SIGINT)
    sys.exit(130)
"""


def test_ctrl_c_anywhere_leaves_the_status(tmp_path):
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    command = [sys.executable, "-m", "interrupted"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, "")


SWALLOWING = """\
import os, signal
try:
    os.kill(os.getpid(), signal.NAME)
    for _ in range(10**6):
        pass
except BaseException:
    pass
"""

IMPORTING = """\
import sys, time
from pdsim.cli.process import beginning, begun, terminable
beginning()
begun()
terminable()
try:
    import swallowing
    time.sleep(60)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_is_not_lost_in_an_import(tmp_path, name, status):
    (tmp_path / "swallowing.py").write_text(SWALLOWING.replace("NAME", name))
    done = subprocess.run([sys.executable, "-c", IMPORTING], cwd=tmp_path, timeout=30, check=False)
    assert done.returncode == status


def test_nothing_heavy_is_imported_by_a_simulation():
    status, _, err = answer("run", *QUICK, "--quiet", python=("-X", "importtime"))
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in err.splitlines() if "|" in line}
    assert status == 0
    assert not imported & {"torch", "matplotlib", "scipy", "pandas", "mooncake", "nixl_cu13", "zmq"}


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_is_no_error(tmp_path):
    for words in (("list",), ("run", *QUICK), ("run", "--cfg", "job")):
        process = started(*words, cwd=tmp_path)
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=30) == 0


def test_a_closed_output_is_no_error(tmp_path):
    program = f"exec {sys.executable} -m pdsim run {' '.join(QUICK)} output=kept >&-"
    done = subprocess.run(["sh", "-c", program], cwd=tmp_path, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr, len(list((tmp_path / "kept").iterdir()))) == (0, b"", 1)


# --- real engines


@pytest.mark.mooncake
def test_the_same_experiment_runs_on_a_real_engine(pdsim_says):
    pytest.importorskip("mooncake.engine", reason="needs mooncake-transfer-engine", exc_type=ImportError)
    status, _, err = pdsim_says("run", *QUICK, "target=real", "hw=loopback", "output=kept")
    assert err.startswith("transfer on loopback ")
    (folder,) = Path("kept").iterdir()
    run = json.loads(pdsim_says("show", str(folder), "--json")[1])
    assert (status, run["status"], run["target"]) == (0, "ok", "real")
    assert run["engine"][0].startswith("mooncake 0.")


@pytest.mark.parametrize(
    ("beginning", "offered"),
    [
        ("hw=2xh", ["hw=2xh200"]),
        ("hw=8xh20,8xh10", ["hw=8xh20,8xh100"]),
        ("backend=nixl_sh", ["backend=nixl_shm"]),
        ("hw.nic.r", ["hw.nic.rate=", "hw.nic.rails="]),
        ("workl", ["workload=", "workload."]),
        ("target=r", ["target=real"]),
        ("nothing", []),
    ],
)
def test_overrides_are_completed(beginning, offered):
    assert values(beginning) == offered


def test_every_command_is_completed_with_its_options():
    (below,) = (action for action in parser()._actions if hasattr(action, "choices") and action.choices)
    assert set(below.choices) == set(COMMANDS) == set(_DO)
    assert "--slo" in below.choices["best"]._option_string_actions
    assert {"--zip", "--seeds", "--search"} <= set(below.choices["sweep"]._option_string_actions)


def test_the_shell_is_answered(tmp_path):
    line, answer = "pdsim run hw=8xh10", tmp_path / "answer"
    asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_STDOUT_FILENAME": str(answer), "_ARGCOMPLETE_IFS": "\n"}
    asked |= {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_COMP_WORDBREAKS": " =:"}
    done = subprocess.run([sys.executable, "-m", "pdsim"], env={**os.environ, **asked}, timeout=60, check=False)
    assert (done.returncode, answer.read_text().split()) == (0, ["8xh100"])


def test_what_the_shell_evaluates_is_a_script(pdsim_says):
    subprocess.run(["bash", "-n"], input=pdsim_says("completion")[1], text=True, check=True, timeout=30)


def test_help_explains_commands_and_keys(pdsim_says):
    assert pdsim_says("help", "run")[1] == pdsim_says("run", "--help")[1]
    tpot = ["slo.tpot: time, > 0 (default: 50 ms)", "  most time per token after the first"]
    assert pdsim_says("help", "slo")[1].splitlines()[2:] == tpot
    assert pdsim_says("help", "hw.nic.rate", "hw=8xh200")[1].splitlines()[2:] == [
        "  now: 49.6 GB/s (hw=8xh200)",
        "  source: published: MORI-IO write fit on ConnectX-7 400G, MORI-IO-BENCHMARK.md 624002c",
        "  write: hw.nic.rate=50GB/s",
    ]
    now = ["  now: 25 GB/s (hw.nic.rate=200Gbps)", "  source: assumed: set on the command line"]
    assert pdsim_says("help", "hw.nic.rate=200Gbps")[1].splitlines()[2:4] == now
    assert pdsim_says("help", "cache.eviction")[1].endswith(
        "  now: block (the default)\n  write: cache.eviction=radix\n"
    )
    status, _, err = pdsim_says("help", "kv.pol")
    assert status == 2
    assert err.startswith("pdsim: no command and no key 'kv.pol'; did you mean kv.pool?")
    assert "did you mean engine.lease?" in pdsim_says("help", "kv.lease")[2]
    assert "did you mean parallel.prefill.tp or parallel.decode.tp?" in pdsim_says("help", "tp")[2]


@pytest.mark.parametrize("variables", [{}, {"NO_COLOR": "1"}])
def test_a_terminal_has_colours_unless_told_otherwise(tmp_path, variables):
    ours, theirs = pty.openpty()
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    command = [sys.executable, "-m", "pdsim", "run", *QUICK, "experiment.size=64MiB"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=theirs, env=kept | variables | {"TERM": "xterm"}) as process:
        os.close(theirs)
        said = b""
        with suppress(OSError):  # the terminal's other end is closed
            while chunk := os.read(ours, 65536):
                said += chunk
        assert process.wait(timeout=60) == 0
    os.close(ours)
    assert (b"\x1b[33m" in said) is not bool(variables)  # a warning is yellow
