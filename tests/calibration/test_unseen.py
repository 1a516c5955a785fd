"""What nothing was fitted to: links of known rate, published KV tables, another host."""

from statistics import median

import numpy as np
import pytest

from pdsim.calibration import samples
from pdsim.config.compose import compose
from pdsim.core.files import data
from tools import known_link as link
from tools.kv_tables import H20, H800, PAGE, calls, configuration, phases, served, table
from tools.tables import rows

RESULTS = rows(data("benchmarks", "known_link_validate.csv"))


def link_samples(backend):
    return rows(data("calibration", f"{backend}-link.csv"))


def fitted(backend):
    short = [row for row in link_samples(backend) if float(row["gap"]) < link.LONG]
    return [(row, seconds, float(row["seconds"])) for row, seconds in link.pairs(short) if row["blocks"] == "1"]


def unseen(backend):
    own = [{"blocks": "1", "gap": "0", **row} for row in RESULTS if row["backend"] == backend]
    return [(row, seconds, float(row["measured"])) for row, seconds in link.pairs(own)]


@pytest.mark.parametrize("backend", link.BACKENDS)
@pytest.mark.parametrize("points", [fitted, pytest.param(unseen, marks=pytest.mark.slow)])
def test_tcp_over_known_links_is_within_five_per_cent(backend, points):
    every = [(int(row["size"]) >= link.LARGE, seconds, measured) for row, seconds, measured in points(backend)]
    relative = [abs(seconds / measured - 1.0) for large, seconds, measured in every if large]
    absolute = [abs(seconds - measured) for large, seconds, measured in every if not large]
    assert min(len(relative), len(absolute)) >= 8
    assert (median(relative) <= 0.05, median(absolute) <= 0.3e-3) == (True, True)


@pytest.mark.parametrize(("of", "measured", "longer"), [(H20, phases, 0), (H800, calls, PAGE)], ids=["h20", "h800"])
def test_published_kv_transfers_are_met(of, measured, longer, tmp_path):
    tokens, published = table(of[0])
    config = configuration(of[1], [count + longer for count in tokens], tmp_path)
    errors = abs(measured(served(config)) / published - 1.0)
    assert errors.mean() < 0.15
    assert errors.max() < 0.30


@pytest.mark.parametrize(("backend", "middle", "p95"), [("mooncake_nvlink", 0.025, 0.05), ("nixl", 0.06, 0.13)])
def test_calibrations_meet_a_host_that_they_have_not_seen(backend, middle, p95):
    every = samples.read(data("calibration", f"{backend}-2xh200-host2.csv")).rows
    model = compose(["hw=2xh200", f"backend={backend}", "experiment=transfer", "experiment.ranks=2"]).backend.intra
    alone = [row for row in every if row.concurrency == 1]
    times = [model.isolated_time(row.blocks, row.blocks * row.size, read=row.operation == "read") for row in alone]
    errors = np.abs(np.array(times) / [row.seconds for row in alone] - 1.0)
    assert len(errors) > 100
    assert np.median(errors) < middle
    assert np.percentile(errors, 95.0) < p95
