"""Files of strangers are read within bounds or refused in a line, and print nothing that a terminal obeys."""

import gzip
import io
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pdsim.calibration import samples
from pdsim.config.compose import compose
from pdsim.core import files
from pdsim.core.errors import ConfigError
from pdsim.recipes.commands import servers
from pdsim.results import compare, terminal
from pdsim.run import run
from pdsim.serving.settings import Workload
from pdsim.serving.workload import load
from pdsim.sweep import collect

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]\n" for n in range(8)
)
LINE = '{"timestamp": %d, "input_length": 10, "output_length": 5}\n'


pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    words = ["hw=8xh20", "workload.count=3", f"output={tmp_path_factory.mktemp('kept')}"]
    return run(compose(words), words, quiet=True)[1]


@pytest.fixture
def copy(kept, tmp_path):
    return shutil.copytree(kept, tmp_path / "copy")


def test_a_packed_file_is_unpacked_within_bounds(tmp_path):
    file = tmp_path / "rows.csv.gz"
    file.write_bytes(gzip.compress(b"a,b\n1,2\n"))
    assert files.table(file, "")[1] == [{"a": "1", "b": "2"}]
    with pytest.raises(OSError, match="larger than 1 KiB"):
        files.whole(_packed(file, gzip.compress(bytes(1025))), 1024)
    for broken in (b"a,b\n", gzip.compress(b"a,b\n")[:-9]):
        with pytest.raises(ConfigError, match=r"rows.csv.gz: not a gzip file \(.*\); name another"):
            files.table(_packed(file, broken), "name another")


def _packed(file, content):
    file.write_bytes(content)
    return file


@pytest.mark.parametrize("name", ["/dev/zero", "pipe"])
def test_a_device_or_a_pipe_is_no_trace(tmp_path, name):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=f"{name} cannot be read: not a regular file; name a file that can$"):
        load(Workload(trace=str(tmp_path / name)), 0, 1000)


@pytest.mark.parametrize(
    ("command", "said_of"),
    [
        (("observe", "pipe"), "pipe: not a regular file; name"),
        (("calibrate", "--from", "pipe", "hw=2xh200", "backend=nixl"), "pipe: not a regular file; name"),
        (("run", "experiment=transfer", "experiment.points=pipe"), "points=pipe: not a regular file; name"),
        (("run", "experiment=scorecard", "experiment.files=[pipe]"), "pipe: not a regular file; name"),
    ],
)
def test_every_reader_refuses_a_pipe_in_a_line(pdsim_refuses, command, said_of):
    os.mkfifo("pipe")
    (line,) = pdsim_refuses(*command).splitlines()
    assert said_of in line


def test_traces_and_files_beyond_their_bounds_are_refused(tmp_path):
    (tmp_path / "trace").write_text(LINE % 0 + "{" + 10_000_000 * " " + "}\n")
    with pytest.raises(ConfigError, match=r"trace:2: a line of more than 1024 KiB; correct or delete the line$"):
        load(Workload(trace=str(tmp_path / "trace")), 0, 1000)
    week = 7 * 86_400_000
    (tmp_path / "trace").write_text(LINE % 0 + LINE % week)
    assert [request.arrival for request in load(Workload(trace=str(tmp_path / "trace")), 0, 1000)] == [0, 604800]
    (tmp_path / "trace").write_text(LINE % 0 + LINE % week + LINE % (160 * week))
    with pytest.raises(ConfigError, match=r"trace:3: 26712 h after the request before, more than 7 days;"):
        load(Workload(trace=str(tmp_path / "trace")), 0, 1000)
    (tmp_path / "trace").write_text("".join(LINE % (n * week) for n in range(54)))
    with pytest.raises(ConfigError, match=r"trace:54: 8904 h after the first request, more than 366 days;"):
        load(Workload(trace=str(tmp_path / "trace")), 0, 1000)
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="larger than 262144 KiB"):
        files.text(tmp_path / "sparse")
    path = tmp_path / "deep.jsonl"
    path.write_text('{"hash_ids": ' + "[" * 100_000 + "\n")
    with pytest.raises(ConfigError, match=r"deep\.jsonl:1: "):
        load(Workload(trace=str(path)), 0, 1000)


@pytest.mark.parametrize(
    ("content", "said_of"),
    [
        (BOMB, "has more than 20000 values, aliases written out; shorten it, or name another file"),
        ("a: &x [*x]", "has more than 20000 values"),
        ("a: " + 100 * "[" + 100 * "]", "lies too deep"),
        ("# " + 300_000 * "x", "larger than 256 KiB"),
    ],
)
def test_configuration_files_are_bounded_wherever_they_lie(pdsim_refuses, copy, tmp_path, content, said_of):
    for place in ("hw", "engine/below"):
        (tmp_path / "own" / place).mkdir(parents=True)
        (tmp_path / "own" / place / "x.yaml").write_text(content)
    (tmp_path / "own" / "engine" / "y.yaml").write_text("defaults: [below/x]\n")
    (copy / "config.yaml").write_text(content)
    commands = [("run", "--config-dir", "own", word) for word in ("hw=x", "engine=y")]
    for words in [*commands, ("compare", copy, copy), ("report", copy)]:
        (line,) = pdsim_refuses(*words).splitlines()
        assert said_of in line


def test_aliases_are_read_up_to_a_bound(tmp_path):
    (tmp_path / "few.yaml").write_text("a: &a {x: 1}\nb: *a\nc: {<<: *a, y: [*a, *a]}\n")
    assert files.yaml_text(tmp_path / "few.yaml") == (tmp_path / "few.yaml").read_text()
    with pytest.raises(ConfigError, match="the recipe has more than 20000 values"):
        servers(BOMB)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["run.json", "summary.json", "config.yaml"])
@pytest.mark.parametrize("content", [b"\xff\xfe", b"[" * 100_000, b"{a: &x [*x]}", b"3", b"a: !!python/object:x {}"])
def test_files_of_results_that_are_none(kept, copy, name, content):
    (copy / name).write_bytes(content)
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        compare.tables([copy, kept])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda summary: summary.pop("links"), "not what pdsim writes: .*links"),
        (lambda summary: summary.pop("metrics"), "not what pdsim writes: .*metrics"),
        (lambda summary: summary["links"].update(a="much"), ""),
        (lambda summary: summary["links"].update(a=10**400), ""),
    ],
)
def test_a_summary_with_other_parts_is_refused(copy, change, message):
    summary = json.loads((copy / "summary.json").read_bytes())
    change(summary)
    (copy / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(ConfigError, match=rf"summary\.json.*{message}"):
        terminal.show(copy, io.StringIO())


@pytest.mark.parametrize("content", [b"", b"PAR1"])
def test_the_table_of_a_sweep_that_is_none(tmp_path, content):
    (tmp_path / "points.parquet").write_bytes(content)
    with pytest.raises(ConfigError, match=r"points\.parquet is not a table"):
        collect.show(tmp_path)


@pytest.mark.parametrize(
    ("change", "said_of"),
    [
        (lambda table: pa.concat_tables([table] * 40_000), "rows, more than 100000 of a run in so many bytes"),
        (
            lambda table: table.set_column(1, "arrival", [["now"] * len(table)]),
            "has a column arrival of string, not d",
        ),
    ],
)
def test_tables_of_results_are_bounded_and_typed(pdsim_refuses, copy, change, said_of):
    path = copy / "requests.parquet"
    pq.write_table(change(pq.read_table(path)), path, compression="zstd")
    for words in (("report", copy), ("timeline", copy), ("export", copy, "--format", "aiperf")):
        assert said_of in pdsim_refuses(*words)


HOSTILE = "\x1b[2J\x1b]0;title\x07\x9b31m\u202egnp.exe\u2066\r\x08"


def test_nothing_of_a_run_moves_the_cursor_or_turns_text(pdsim_prints, pdsim_refuses, copy):
    summary, about = (json.loads((copy / name).read_text()) for name in ("summary.json", "run.json"))
    summary["notes"] += [f"warning: {HOSTILE}"]
    summary["failures"] = [HOSTILE]
    summary["metrics"] |= {HOSTILE: {"value": 1.0, "definition": HOSTILE, "tabled": False}}
    (copy / "summary.json").write_text(json.dumps(summary))
    (copy / "run.json").write_text(json.dumps(about | {"experiment": HOSTILE, "error": HOSTILE, "pdsim": HOSTILE}))
    for words in (("show", copy), ("show", "-v", copy), ("show", "--json", copy), ("compare", copy, copy)):
        text = pdsim_prints(*words)
        assert "gnp.exe" in text
        assert re.findall(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]", text) == []
    pdsim_prints("report", copy, "-o", "page.html")
    assert re.search("[\x1b\x9b\u202e\u2066]", Path("page.html").read_text()) is None
    config = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(config.replace("  name: llama-3.1-70b", '  name: "llama\\e[2J\\u202e"'))
    assert re.search("[\x1b\u202e]", pdsim_prints("recipe", "--to", "sglang", copy)) is None
    assert re.search("[\x1b\u202e]", pdsim_prints("run", "--cfg", "job", 'model.name="l\u202e"')) is None
    (copy / "run.json").write_text(json.dumps(about | {"evidence": HOSTILE}))
    assert re.search("[\x1b\x9b\u202e]", pdsim_refuses("show", copy)) is None


def test_a_worker_ends_quietly_when_its_parent_has_given_up():
    program = (
        "import os, multiprocessing as m; from pdsim.sweep.executors import _work; ours, theirs = m.Pipe();"
        "ours.send(3); ours.close(); _work(theirs, abs, os.getppid())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_a_full_disk_ends_a_sweep_in_one_line(tmp_path):
    words = ("sweep", "experiment=transfer", "experiment.patterns=[pair]", "seed=0,1,2,3", "executor.workers=2")
    done = subprocess.run(
        [sys.executable, "-m", "pdsim", *words, "output=out"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},  # compiled modules would be cut short, too
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (400, 400)),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    last = done.stderr.splitlines()[-1]
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert last == "pdsim: File too large; make room, or name a folder elsewhere"


def test_a_comment_of_samples_may_say_nothing(tmp_path):
    path = tmp_path / "samples.csv"
    path.write_text("# source: \n# : \n# kind: measured\npattern,blocks,size,seconds\npair,1,4096,1e-5\n")
    assert samples.read(path).about == {"source": "", "": "", "kind": "measured"}
