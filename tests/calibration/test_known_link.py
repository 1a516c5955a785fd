"""The calibrations of the known link: the model, with them, against the medians of what was measured there."""

from statistics import median

import pytest

from pdsim.core.repository import data
from tools import known_link as link

SAMPLES = data("calibration")
RESULTS = data("benchmarks", "known_link_validate.csv")


def fitted(backend):
    rows = [row for row in link.read(SAMPLES / f"{backend}-link.csv") if float(row["gap"]) < link.LONG]
    found = [(row, seconds, float(row["seconds"])) for row, seconds in link.pairs(rows)]
    return [(int(row["size"]), seconds, measured) for row, seconds, measured in found if row["blocks"] == "1"]


def unseen(backend):
    rows = [row for row in link.read(RESULTS) if row["backend"] == backend]
    rows = [{"blocks": "1", "gap": "0", **row} for row in rows]
    return [(int(row["size"]), seconds, float(row["measured"])) for row, seconds in link.pairs(rows)]


@pytest.mark.parametrize("backend", link.BACKENDS)
@pytest.mark.parametrize("points", [fitted, pytest.param(unseen, marks=pytest.mark.slow)])
def test_large_messages_are_within_five_per_cent_and_small_ones_within_300_us_in_the_median(backend, points):
    compared = points(backend)
    large = [abs(seconds / measured - 1.0) for size, seconds, measured in compared if size >= link.LARGE]
    small = [abs(seconds - measured) for size, seconds, measured in compared if size < link.LARGE]
    assert min(len(large), len(small)) >= 8
    assert median(large) <= 0.05
    assert median(small) <= 0.3e-3


def test_no_link_of_the_validation_was_fitted_and_all_of_it_was_predicted_before_it_was_measured():
    names = {row["link"] for backend in link.BACKENDS for row in link.read(SAMPLES / f"{backend}-link.csv")}
    rows = link.read(RESULTS)
    assert len({row["link"] for row in rows}) >= 4
    assert not names & {row["link"] for row in rows}
    assert all(row["written"] < row["began"] for row in rows)
