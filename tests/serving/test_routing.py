"""Two instances are drawn, and the less loaded one is taken."""

from __future__ import annotations

from collections import Counter

from pdsim.serving.routing import PowerOfTwo
from pdsim.serving.seams import router_policy
from pdsim.serving.settings import Side
from tests.support.serving import configured, serve, values


def test_the_most_loaded_of_all_is_never_taken_and_the_others_as_often_as_pairs_say():
    policy = router_policy("power_of_two")
    able = ["a", "b", "c", "d"]
    counts = Counter(policy.choose(able, {"a": 0, "b": 1, "c": 2, "d": 3}) for _ in range(6000))
    assert counts["d"] == 0
    for name, pairs in (("a", 3), ("b", 2), ("c", 1)):  # of six pairs
        assert abs(counts[name] - 1000 * pairs) < 150


def test_one_instance_is_taken_as_it_is_and_two_runs_are_alike():
    assert PowerOfTwo().choose(["a"], {"a": 9}) == "a"
    able, load = ["a", "b", "c"], {"a": 1, "b": 1, "c": 1}
    one, other = PowerOfTwo(), PowerOfTwo()
    assert [one.choose(able, load) for _ in range(50)] == [other.choose(able, load) for _ in range(50)]


def test_a_job_is_served_by_it():
    found = serve(configured(Side(tp=1, instances=3), options={"router": "power_of_two"}))
    assert values(found)["requests_ok"] == 40
