"""What a read costs beyond a write is told by reads with writes beside them, and by nothing else."""

from dataclasses import replace

import numpy as np
import pytest

from pdsim.calibration import fit, read_overhead
from pdsim.calibration.forms import Form, points_of
from pdsim.calibration.samples import Sample
from pdsim.hardware.costs import EngineModel

BASE = EngineModel(path="nvlink", call=0.0, descriptor=1e-6, overlap=False, latency=0.0)
SUM = {"call": 11e-6, "descriptor": 2e-6, "rate": 390e9}
CELLS = [(1, 4096 << power) for power in range(0, 16, 2)]
CELLS += [(n, size) for n in (4, 16, 64, 256, 1024) for size in (4096, 65536, 1 << 20)]


def samples(more, noise=0.0, misfit=0.0, **where):
    """Return writes and reads of one engine whose reads cost *more*.

    A *misfit* is of a configuration, so of both.
    """
    random = np.random.default_rng(3)
    found = []
    for n, size in CELLS:
        both = np.exp(random.normal(0.0, misfit))
        for operation, extra in (("write", {}), ("read", more)):
            model = EngineModel(path="nvlink", overlap=False, latency=0.0, **SUM, **extra)
            seconds = (
                model.isolated_time(n, n * size, read=operation == "read") * both * np.exp(random.normal(0.0, noise))
            )
            found.append(
                Sample(blocks=n, size=size, operation=operation, seconds=seconds, low=seconds, high=seconds)
            )
    return found


def told(rows):
    """Return what the reads of *rows* tell, beside a fit of their writes."""
    writes = points_of([row for row in rows if row.operation == "write"])
    return read_overhead.beyond(fit.fit(Form("sum", tuple(SUM)), writes, BASE), rows, BASE)


def chosen(rows):
    """Return the form that `told` takes, without its intervals, which take most of the time."""
    writes = fit.fit(Form("sum", tuple(SUM)), points_of([row for row in rows if row.operation == "write"]), BASE)
    return read_overhead._chosen(writes, read_overhead._as_writes_are(writes, rows), BASE)


def rounded(rows, seed):
    """Return *rows* as another processor may have them: each moved by a relative 1e-12 at most."""
    factors = 1.0 + np.random.default_rng(seed).uniform(-1e-12, 1e-12, len(rows))
    return [replace(row, seconds=row.seconds * float(by)) for row, by in zip(rows, factors, strict=True)]


MORE = [
    {"read": 5e-6},
    {"read_descriptor": 1e-6},
    {"read_rate": 150e9},
    {"read": 5e-6, "read_descriptor": 1e-6},
    {"read": 5e-6, "read_rate": 150e9},
]


@pytest.mark.parametrize("more", MORE, ids=" and ".join)
def test_what_makes_reads_longer_is_found_with_an_interval(more):
    found, spans = told(samples(more, noise=0.02))
    assert found.form.free == tuple(more) == tuple(spans)
    for name, value in more.items():
        assert found.at[name] == pytest.approx(value, rel=0.1)
        assert spans[name][0] < value < spans[name][1]


@pytest.mark.parametrize("more", MORE, ids=" and ".join)
def test_rounding_does_not_choose_what_makes_reads_longer(more):
    rows = samples(more, noise=0.02)
    found = [chosen(rows), *(chosen(rounded(rows, seed)) for seed in range(6))]
    assert {one.form.free for one in found} == {tuple(more)}
    for name in more:
        assert [one.at[name] for one in found] == pytest.approx([found[0].at[name]] * len(found), rel=1e-6)


@pytest.mark.parametrize("more", [{"read": 5e-6}, {"read_descriptor": 1e-6}, {"read_rate": 150e9}], ids=list)
def test_what_is_wrong_of_a_configuration_is_not_taken_for_what_reading_costs(more):
    found, _ = told(samples(more, noise=0.01, misfit=0.1))
    ((name, value),) = more.items()
    assert found.form.free == (name,)
    assert found.at[name] == pytest.approx(value, rel=0.15)


def test_reads_that_cost_what_writes_do_cost_nothing_more():
    found, spans = told(samples({}, noise=0.02, misfit=0.1))
    assert (found.form.free, spans) == ((), {})
    assert [found.at[name] for name in read_overhead.FREE] == [0.0, 0.0, float("inf")]


def test_reads_that_are_faster_cost_nothing_more():
    rows = samples({}, noise=0.01)
    faster = [
        row if row.operation == "write" else Sample(**{**vars(row), "seconds": row.seconds / 1.2}) for row in rows
    ]
    found, _ = told(faster)
    assert found.form.free == ()


def test_reads_without_writes_beside_them_tell_nothing():
    rows = samples({"read": 5e-6})
    other = [row if row.operation == "write" else Sample(**{**vars(row), "blocks": row.blocks + 1}) for row in rows]
    assert told(other) is None
