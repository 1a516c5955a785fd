"""The calibrations of the known link: the model, with them, against what was measured there (shortest times)."""

from pathlib import Path
from statistics import median

import pytest

import benchmarks.known_link as link
import conf

SAMPLES = Path(conf.__file__).parent / "calibration"
RESULTS = Path(link.__file__).parent / "results" / "known_link.csv"


def errors(path, backend):
    """Return the relative errors of large messages, and the absolute ones of small ones in seconds."""
    rows = [row for row in link.read(path) if row["backend"] == backend and float(row["gap"]) == link.SHORT]
    found = [
        (int(row["size"]), seconds, float(row["low"])) for row, seconds in link.pairs(rows) if row["blocks"] == "1"
    ]
    large = [abs(seconds / low - 1.0) for size, seconds, low in found if size >= link.LARGE]
    small = [abs(seconds - low) for size, seconds, low in found if size < link.LARGE]
    assert min(len(large), len(small)) >= 8
    return large, small


@pytest.mark.parametrize("backend", link.BACKENDS)
@pytest.mark.parametrize("seen", [True, False], ids=["fitted", "not seen by the fit"])
def test_large_messages_are_within_five_per_cent_and_small_ones_within_300_us_in_the_median(backend, seen):
    large, small = errors(SAMPLES / f"{backend}-link.csv" if seen else RESULTS, backend)
    assert median(large) <= 0.05
    assert median(small) <= 0.3e-3 if not seen else median(small) <= 1e-3


def test_no_link_of_the_validation_was_fitted():
    fitted = {key[1:] for backend in link.BACKENDS for key, _ in link.links(link.read(SAMPLES / f"{backend}-link.csv"))}
    checked = {key[1:] for key, _ in link.links(link.read(RESULTS))}
    assert len(checked) >= 4
    assert not fitted & checked
