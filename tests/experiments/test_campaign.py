"""`benchmarks.campaign`: what it runs, in which order, and what it does with what fails or does not end."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from benchmarks import campaign
from benchmarks.campaign import Step, execute, main, plan


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, str]:
    """Return the commands of the steps by name."""
    assert main([*words, "--list"]) == 0
    return dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())


def python(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_the_predictions_are_tested_before_anything_else_is_measured(tmp_path: Path):
    names = [step.name for step in plan("8xh200", ["nvlink", "nixl"], tmp_path)]
    assert names == [
        "doctor", "validate nvlink", "validate nixl", "calibrate nvlink", "calibrate nixl", "crossing nvlink",
        "crossing nixl", "allgather", "seed symmetric_allgather", "seed nixl_staging", "again nvlink", "again nixl",
    ]  # fmt: skip


def test_committed_predictions_of_the_machine_are_the_ones_that_are_tested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(campaign, "STORED", tmp_path)
    (tmp_path / "nvlink-8xh200").mkdir()
    known = tmp_path / "nvlink-8xh200" / "expectations.json"
    known.touch()
    steps = {step.name: step.words for step in plan("8xh200", ["nvlink", "nixl"], tmp_path)}
    assert f"experiment.expected={known}" in steps["validate nvlink"]
    assert not any(word.startswith("experiment.expected") for word in steps["validate nixl"])
    anew = {step.name: step.words for step in plan("8xh200", ["nvlink"], tmp_path, anew=True)}
    assert not any(word.startswith("experiment.expected") for word in anew["validate nvlink"])
    (tmp_path / "nvlink-8xh200" / "measurements.json").touch()
    measured = {step.name: step.words for step in plan("8xh200", ["nvlink"], tmp_path)}
    assert not any(word.startswith("experiment.expected") for word in measured["validate nvlink"])


def test_what_the_machine_has_too_few_gpus_for_is_not_run(tmp_path: Path):
    steps = {step.name: step.words for step in plan("2xh200", ["nvlink"], tmp_path)}
    assert "crossing nvlink" not in steps
    assert "experiment.ranks=[2]" in steps["allgather"]
    four, hosts = (
        {step.name: step.words for step in plan(hw, ["nvlink"], tmp_path)} for hw in ("4xh200", "loopback")
    )
    assert "crossing nvlink" in four
    assert "experiment.ranks=[2,4]" in four["allgather"]
    assert "experiment.ranks=[2,4,8]" in hosts["allgather"]


def test_all_gathers_are_validated_once_for_they_are_not_the_engines(tmp_path: Path):
    steps = {step.name: step.words for step in plan("2xh200", ["nvlink", "nixl"], tmp_path)}
    assert not any("classes" in word for word in steps["validate nvlink"])
    assert "experiment.classes=[pair,read,contention,handoff,metadata,serve]" in steps["validate nixl"]


def test_words_are_for_all_steps_or_for_one(capsys: pytest.CaptureFixture[str]):
    found = listed(capsys, "hw=loopback", "backend=nixl_shm", "kv.pool=32MiB", "validate:experiment.ranks=8")
    assert all("kv.pool=32MiB" in command for name, command in found.items() if name != "doctor")
    assert [name for name, command in found.items() if "experiment.ranks=8" in command] == ["validate nixl_shm"]


def test_words_and_options_come_in_any_order(capsys: pytest.CaptureFixture[str]):
    found = listed(capsys, "hw=loopback", "--steps", "validate", "backend=nixl_shm", "--limit", "600", "seed=3")
    assert list(found) == ["validate nixl_shm"]
    assert "seed=3" in found["validate nixl_shm"]


def test_steps_can_be_chosen(capsys: pytest.CaptureFixture[str]):
    assert list(listed(capsys, "hw=8xh200", "--steps", "calibrate,allgather")) == [
        "calibrate nvlink", "calibrate mooncake_nvlink", "calibrate nixl", "allgather",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["backend=nixl"], "hw is missing; add hw=NAME"),
        (["hw=loopback", "--steps", "validate,speed"], "--steps speed: there are doctor, validate"),
    ],
)
def test_what_cannot_be_is_refused(capsys: pytest.CaptureFixture[str], words: list[str], message: str):
    with pytest.raises(SystemExit):
        main(words)
    assert message in capsys.readouterr().err


def test_nothing_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "kept").touch()
    with pytest.raises(SystemExit):
        main(["hw=loopback", "--to", str(tmp_path)])
    assert "is not empty" in capsys.readouterr().err


@pytest.mark.parametrize(("status", "said"), [(0, "ok"), (1, "failed"), (2, "refused"), (7, "ended with 7")])
def test_a_step_says_how_it_ended(tmp_path: Path, status: int, said: str):
    found, _ = execute(python(f"print('seen'); raise SystemExit({status})"), tmp_path / "log", 30.0)
    assert found == said
    assert (tmp_path / "log").read_text() == "seen\n"


def test_a_step_beyond_its_deadline_is_told_to_end_and_may_put_things_away(tmp_path: Path):
    text = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('put away', flush=True), sys.exit(0)))\n"
        "print('begun', flush=True)\ntime.sleep(60)"
    )
    found, _ = execute(python(text), tmp_path / "log", 3.0)
    assert found == "stopped after 3 s"
    assert (tmp_path / "log").read_text() == "begun\nput away\n"


def test_what_a_step_started_ends_with_it(tmp_path: Path):
    path = tmp_path / "alive"
    child = f"import time, pathlib\nwhile True: pathlib.Path({str(path)!r}).touch(); time.sleep(0.05)"
    text = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}])\n"
    text += f"import pathlib\nwhile not pathlib.Path({str(path)!r}).exists(): time.sleep(0.05)"
    execute(python(text), tmp_path / "log", 30.0)
    path.unlink(missing_ok=True)
    time.sleep(0.3)
    assert not path.exists()


def test_a_step_that_fails_does_not_keep_the_next_from_running(tmp_path: Path):
    steps = [Step("calibrate x", ("calibrate", "nonsense"), 60.0), Step("doctor", ("--version",), 60.0)]
    done = campaign.campaign(steps, tmp_path, "loopback")
    assert [one.status for one in done] == ["refused", "ok"]
    kept = json.loads((tmp_path / "campaign.json").read_text())
    assert [one["status"] for one in kept["steps"]] == ["refused", "ok"]
    assert "KEY=VALUE" in (tmp_path / "00-calibrate-x.log").read_text()


def test_no_step_begins_when_no_time_is_left(tmp_path: Path):
    (done,) = campaign.campaign([Step("doctor", ("doctor",), 60.0)], tmp_path, "loopback", limit=0.0)
    assert done.status == "not begun: no time is left"


def test_what_needs_a_validation_and_a_calibration_is_not_begun_without(tmp_path: Path):
    step = list(plan("loopback", ["nixl_shm"], tmp_path))[-1]
    (done,) = campaign.campaign([step], tmp_path, "loopback")
    assert done.status == "not begun: what it needs is missing"


def test_the_validation_is_compared_again_with_the_model_that_was_calibrated_here(tmp_path: Path):
    step = list(plan("loopback", ["nixl_shm"], tmp_path))[-1]
    run = tmp_path / "runs" / "validate-loopback-nixl_shm-real-1"
    for path in (run / "measurements.json", tmp_path / "calibration" / "nixl_shm-loopback-campaign.yaml"):
        path.parent.mkdir(parents=True)
        path.touch()
    words = campaign.ready(step, tmp_path, "loopback")
    assert words is not None
    assert {f"experiment.stored={run}", "calibration=nixl_shm-loopback-campaign"} <= set(words)
