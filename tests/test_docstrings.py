"""Examples in docstrings show what the code gives."""

import doctest
import importlib

import pytest

MODULES = (
    *("pdsim.hardware.costs", "pdsim.core.errors", "pdsim.hardware.machine", "pdsim.core.units"),
    *("pdsim.calibration.definition", "pdsim.calibration.files", "pdsim.calibration.fit"),
    *(
        "pdsim.cli.main",
        "pdsim.cli.options",
        "pdsim.config.compose",
        "pdsim.results.report.movement",
        "pdsim.results.report.request_figures",
    ),
    *("pdsim.results.terminal", "pdsim.results.drawing", "pdsim.sweep.collect"),
    *("experiments.faults.causes", "experiments.reports.claims"),
    *("experiments.reports.figures", "experiments.serve.tables"),
    *("pdsim.calibration.noise_floor", "pdsim.calibration.sample_grid"),
    *("pdsim.config", "pdsim.config.typed", "pdsim.sweep.best", "pdsim.sweep.points"),
    *("backends.base.device", "backends.emulation.link.packet_forwarder"),
    *("backends.live.formats", "backends.live.metrics"),
    *(
        "pdsim.serving.decode_steps",
        "pdsim.serving.deployment",
        "pdsim.serving.policies",
        "pdsim.serving.prefix_cache",
    ),
    *("pdsim.serving.requests", "pdsim.serving.workload"),
    *(
        "experiments.allgather.gather_rows",
        "experiments.transfer.transfer_points",
        "experiments.transfer.rank_places",
    ),
    "pdsim.validation.verdicts",
    *("pdsim.kv.allgather", "pdsim.kv.layout", "pdsim.kv.pages", "pdsim.kv.prefix_pages"),
    *("pdsim.kv.pull", "pdsim.kv.staging.ring"),
    *("pdsim.kv.mapping", "pdsim.kv.plan", "pdsim.kv.state", "pdsim.kv.rooms"),
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_give_what_they_show(name):
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted > 0
    assert found.failed == 0
