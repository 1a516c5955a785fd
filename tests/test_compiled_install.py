# SPDX-License-Identifier: Apache-2.0
"""`PDSIM_COMPILE=1 pip install .` where it cannot work: one line says what is missing."""

import sys
from pathlib import Path

import pytest
from hatchling.bridge.app import Application

import pdsim.core.clock

sys.path.append(str(Path(__file__).resolve().parents[1]))
import hatch_build
from benchmarks import compiled

ROOT = Path(__file__).resolve().parents[1]


def begin_a_wheel(folder):
    hook = hatch_build.CompileHook(str(folder), {}, None, None, str(folder), "wheel", Application())
    hook.initialize("standard", {"force_include": {}})


def test_a_missing_compiler_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PDSIM_COMPILE", "1")
    monkeypatch.setenv("CC", "no-such-cc -pthread")
    with pytest.raises(SystemExit) as ended:
        begin_a_wheel(tmp_path)
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 1
    assert "there is no C compiler 'no-such-cc'" in line
    assert "or leave PDSIM_COMPILE out" in line


def test_missing_headers_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", sys.executable)  # something that there is
    monkeypatch.setattr(hatch_build.sysconfig, "get_path", lambda _: str(tmp_path))
    assert hatch_build.lacking().startswith(f"{tmp_path / 'Python.h'} is missing: install Python's headers")


def test_nothing_is_compiled_unless_it_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.delenv("PDSIM_COMPILE", raising=False)
    monkeypatch.setenv("CC", "no-such-cc")
    begin_a_wheel(tmp_path)
    assert not list(tmp_path.iterdir())


def test_doctor_says_whether_this_pdsim_is_compiled(pdsim_says):
    kind = "in pure Python" if pdsim.core.clock.__file__.endswith(".py") else "compiled"
    assert f"\nthe model (target=model): works, {kind}, and needs nothing more\n" in pdsim_says("doctor")[1]


def test_what_ci_tests_of_the_compiled_wheel_is_there():
    assert [path for path in compiled.TESTS if not (ROOT / path).exists()] == []
