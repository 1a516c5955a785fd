"""Instances that start and drain while requests are served: who decides, when they serve, and what that saves."""

from dataclasses import replace
from typing import Any

import pytest

from pdsim.models.llm import Side
from pdsim.serving.autoscale import Autoscale, FleetView, saturation, schedule, thresholds, within
from pdsim.serving.failures import FailureRate, Failures
from pdsim.serving.fleet import Fleet, running_seconds
from pdsim.serving.settings import Workload
from tests.support.serving import configured, rows, serve, values

TWO = Side(tp=1, instances=2)
CALM = Workload(arrivals="poisson", count=200, rate=20.0, input_mean=300, output_mean=12)


def test_thresholds_change_one_instance_and_wait_for_starts():
    assert thresholds(FleetView(0.0, [6.0, 5.0], [0.95])) == (3, 2)
    assert thresholds(FleetView(0.0, [0.1, 0.2], [0.4, 0.5])) == (1, 1)
    assert thresholds(FleetView(0.0, [5.0, 5.0], [0.9, 0.9])) == (2, 2)
    assert thresholds(FleetView(0.0, [0.2], [0.5]), queue_up=0.1, kv_down=0.6) == (2, 0)
    assert thresholds(FleetView(0.0, [9.0], [1.0], (1, 2))) == (2, 3)
    assert thresholds(FleetView(0.0, [0.0, 0.0], [1.0], (1, 0))) == (3, 2)


def test_saturation_keeps_spare_load_and_drains_what_others_can_take():
    assert saturation(FleetView(0.0, [2.5, 2.5], [0.75])) == (3, 2)  # spare 2.5 < 3 and 0.05 < 0.1
    assert saturation(FleetView(0.0, [1.0, 1.0], [0.35, 0.35])) == (1, 1)  # 5 - 2 >= 3, 0.8 - 0.7 >= 0.1
    assert saturation(FleetView(0.0, [1.0, 1.5], [0.36, 0.36])) == (2, 2)
    assert saturation(FleetView(0.0, [7.0], [0.9, 0.1])) == (2, 2)  # no instance below its limit; one, which is calm
    assert saturation(FleetView(0.0, [7.0], [0.9], (1, 1))) == (2, 2)


def test_a_schedule_repeats_every_day_and_begins_the_night_before():
    steps = [[6.0, 3, 2], [20.0, 1, 1]]
    hours = {0.0: (1, 1), 5.9: (1, 1), 6.0: (3, 2), 19.9: (3, 2), 20.0: (1, 1), 30.0: (3, 2)}
    found = {at: schedule(FleetView(at, [], []), steps=steps, day=24.0) for at in hours}
    assert found == hours


def test_a_fleet_starts_drains_and_takes_back_what_still_drains():
    fleet = Fleet((("prefill0", "prefill1", "prefill2"), ("decode0",)), set())
    load = {"prefill0": 5, "prefill1": 1, "prefill2": 3, "decode0": 0}
    assert fleet.scale((1, 0), 1, load, 1.0) == []
    assert (fleet.draining, fleet.resting) == (["prefill1", "prefill2"], {"prefill1", "prefill2"})
    fleet.rest(lambda name: name == "prefill2", 2.0)
    assert fleet.scale((3, 1), 1, load, 3.0) == ["prefill1"]
    assert fleet.resting == {"prefill1"}
    fleet.serve("prefill1", 9.0)
    assert (fleet.resting, fleet.draining, fleet.starting) == (set(), [], [])
    assert fleet.changes == [
        (1.0, "prefill1", "draining"), (1.0, "prefill2", "draining"), (2.0, "prefill1", "off"),
        (3.0, "prefill2", "serving"), (3.0, "prefill1", "starting"), (9.0, "prefill1", "serving"),
    ]  # fmt: skip
    assert running_seconds(fleet.changes, ("prefill0", "prefill1", "prefill2"), 10.0) == (29.0, 2, 3)


def scaled(autoscale: Autoscale, workload: Workload = CALM, **changes: Any) -> Any:
    return serve(configured(TWO, TWO, workload=workload, autoscale=autoscale, **changes))


def test_the_last_that_serves_stays_while_another_starts():
    load = {"prefill0": 0.0, "prefill1": 0.0, "decode0": 0.0}
    fleet = Fleet((("prefill0", "prefill1"), ("decode0",)), {"prefill1"})
    assert fleet.scale((2, 1), 1, load, 0.0) == ["prefill1"]
    assert fleet.scale((1, 1), 1, load, 1.0) == fleet.draining == []
    fleet.serve("prefill1", 2.0)
    assert fleet.scale((1, 1), 1, load, 3.0) == []
    assert fleet.draining == ["prefill1"]


NIGHT = Autoscale(policy="schedule", options={"steps": [[0, 1, 1], [3.0, 2, 2]]}, every=1.0, start=2.0)


def test_a_started_instance_serves_after_its_delay_only():
    served = scaled(NIGHT)
    assert served.failures == []
    table = rows(served)
    for side, first in (("prefill", "prefill0"), ("decode", "decode0")):
        other = [row["arrival"] for row in table if row[side] != first]
        assert other
        assert min(other) >= 5.0  # drained at 0, started at 3, serves at 5
    found = values(served)
    # an instance of either side is off from 0 to 3 s, of four in all
    assert found["gpu_hours_fixed"] - found["gpu_hours"] == pytest.approx(2 * 3.0 / 3600, abs=1e-12)
    assert found["gpu_hours_fixed"] == pytest.approx(4 * found["makespan_s"] / 3600)


def test_what_drains_finishes_its_requests_and_gets_no_more():
    served = scaled(replace(NIGHT, options={"steps": [[0, 2, 2], [4.0, 1, 1]], "day": 100.0}))
    assert served.failures == []
    table = rows(served)
    for side in ("prefill", "decode"):
        by_name = {name: [row for row in table if row[side] == name] for name in {row[side] for row in table}}
        drained = min(by_name, key=lambda name: max(row["arrival"] for row in by_name[name]))
        assert 3.0 < max(row["arrival"] for row in by_name[drained]) < 4.0
    assert {row["status"] for row in table} == {"ok"}


def watched(monkeypatch: pytest.MonkeyPatch, count: int, drains: bool) -> tuple[list[FleetView], Any]:
    """Return what a policy sees of *count* equal requests, and the run; it *drains* one pair when all decode."""
    views: list[FleetView] = []

    def policy(view: FleetView) -> tuple[int, int]:
        views.append(view)
        decoding = [each for each in views if sum(each.decode) == max(sum(one.decode) for one in views) > 0]
        return (1, 1) if drains and len(decoding) > 5 else (2, 2)

    monkeypatch.setattr("pdsim.serving.fleet.policy_of", lambda _: policy)
    equal = replace(CALM, count=count, rate=1e6, input_mean=300, input_cv=0.0, output_mean=40, output_cv=0.0)
    return views, scaled(Autoscale(policy="spy", every=0.004, sample=0.001, start=0.0), equal)


def test_a_policy_sees_mean_loads_since_its_last_decision(monkeypatch):
    views, served = watched(monkeypatch, 1, drains=False)
    assert [view.time for view in views[:4]] == pytest.approx([0.0, 0.004, 0.008, 0.012])
    (row,) = rows(served)
    pages = served.outcome.ranks[f"{row['decode']}.0"].value["pages"]
    full = [view for view in views if max(view.decode) == pytest.approx(340 / (16 * pages))]
    assert len(full) > 5
    assert all(len(view.prefill) == 2 and not any(view.prefill) for view in views)  # the only one is computed
    assert max(max(view.decode) for view in views) == pytest.approx(340 / (16 * pages))


def test_prefill_is_off_when_its_kv_is_transferred(monkeypatch):
    _, served = watched(monkeypatch, 2, drains=True)
    times = {(name, what): at for at, name, what in served.outcome.ranks["router"].value["scaled"]}
    assert times["prefill1", "off"] == times["prefill1", "draining"]
    assert times["decode1", "off"] > times["decode1", "draining"]


def test_thresholds_run_fewer_instances_when_nobody_waits():
    served = scaled(Autoscale(policy="thresholds", every=2.0, sample=0.5))
    found = values(served)
    assert found["requests_ok"] == 200
    assert found["gpu_hours"] < 0.7 * found["gpu_hours_fixed"]
    assert any(note.startswith("autoscale: ") for note in served.notes)


def test_all_instances_always_serve_without_a_policy():
    assert "gpu_hours" not in values(serve(configured()))
    kept = scaled(replace(NIGHT, options={"steps": [[0, 2, 2]]}))
    fixed = scaled(Autoscale())
    assert [row["e2e"] for row in rows(kept)] == [row["e2e"] for row in rows(fixed)]
    assert values(kept)["gpu_hours"] == values(kept)["gpu_hours_fixed"]


def test_instances_that_fail_and_drain_end_no_other_request():
    served = scaled(
        replace(NIGHT, options={"steps": [[0, 1, 1], [1.0, 2, 2], [6.0, 1, 1]]}, start=0.5),
        failures=Failures(gpu=FailureRate(every=2.0, repair=0.4)),
        options={"deadline": 0.3, "client_retries": 20, "client_wait": 0.05},
    )
    assert values(served)["failures"] > 1
    assert {row["status"] for row in rows(served)} == {"ok"}


def test_gpus_go_from_one_side_to_the_other():
    fleet = Fleet((("prefill0", "prefill1"), ("decode0", "decode1")), set(), (1, 1), 3)
    load = dict.fromkeys(("prefill0", "prefill1", "decode0", "decode1"), 0)
    assert fleet.scale((2, 1), 1, load, 0.0) == []
    assert fleet.rest(lambda _: False, 0.0)
    assert fleet.scale((1, 2), 1, load, 5.0) == []  # prefill1 still drains
    assert not fleet.rest(lambda _: True, 6.0)
    assert fleet.rest(lambda _: False, 7.0)
    assert fleet.scale((1, 2), 1, load, 7.0, "switching") == ["decode1"]
    assert fleet.changes[-2:] == [(7.0, "prefill1", "off"), (7.0, "decode1", "switching")]


def test_both_sides_lose_in_proportion_above_the_gpus():
    assert within((4, 4), 1, (2, 2), 8) == (2, 2)
    assert within((9, 1), 1, (1, 1), 4) == (3, 1)
    assert within((1, 9), 2, (1, 2), 9) == (2, 3)
    assert within((0, 7), 1, (1, 1), 0) == (1, 7)


ROLES = replace(NIGHT, options={"steps": [[0, 1, 2], [3.0, 2, 1]]}, start=60.0, gpus=3, switch=2.0)


def test_a_switched_instance_serves_after_the_drain_and_the_switch():
    served = scaled(ROLES)
    times = {(name, what): at for at, name, what in served.outcome.ranks["router"].value["scaled"]}
    (off,) = [at for (name, what), at in times.items() if what == "off" and name != "prefill1"]
    assert times["prefill1", "switching"] == off >= 3.0
    assert times["prefill1", "serving"] == off + 2.0
    assert min(row["arrival"] for row in rows(served) if row["prefill"] == "prefill1") >= off + 2.0
    assert {row["status"] for row in rows(served)} == {"ok"}
    found = values(served)
    assert found["gpu_hours"] <= found["gpu_hours_fixed"] == pytest.approx(3 * found["makespan_s"] / 3600)
