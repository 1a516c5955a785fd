"""Shell completion through argcomplete, help of commands and keys, colours of a terminal."""

import os
import pty
import subprocess
import sys
from contextlib import suppress

import pytest

from pdsim.cli.complete import parser, values
from pdsim.cli.help import COMMANDS
from pdsim.cli.main import _DO
from tests.test_cli import QUICK


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
    assert pdsim_says("help", "slo")[1].splitlines()[1:] == ["slo.tpot: time, > 0 (default: 50 ms)"]
    assert pdsim_says("help", "hw.nic.rate", "hw=8xh200")[1].splitlines()[2:] == [
        "  now: 49.6 GB/s (hw=8xh200)",
        "  source: published: MORI-IO write fit on ConnectX-7 400G, MORI-IO-BENCHMARK.md 624002c",
        "  write: hw.nic.rate=50GB/s",
    ]
    assert pdsim_says("help", "hw.nic.rate=200Gbps")[1].splitlines()[2:4] == [
        "  now: 25 GB/s (hw.nic.rate=200Gbps)",
        "  source: assumed: set on the command line",
    ]
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
