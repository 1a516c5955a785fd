"""What nothing was fitted to, and what `pdsim refit` fits, which is what ``conf/`` has."""

import re
from itertools import groupby, islice
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from omegaconf import OmegaConf

import conf
from pdsim.calibration import samples
from pdsim.config import build
from pdsim.config.compose import compose
from pdsim.core.files import data
from pdsim.core.units import parse_time
from pdsim.hardware.costs import OptionCosts
from pdsim.sim.model import Model
from pdsim.transfer import Batch
from pdsim.transfer.job import Place, RankSpec
from tools import collective_fit, handoff_fit, option_fit
from tools.kv_tables import H20, H800, PAGE, calls, configuration, phases, served, table
from tools.refit import published
from tools.tables import rows

LONG = 1.5  # seconds between transfers that begin with a window that TCP has shrunk


def write(rank, points):
    """Write every one of *points*: blocks, bytes of one, seconds before each transfer, transfers."""
    region = rank.endpoint.register(rank.device.allocate(32 << 20), "all")
    rank.channel.send("taker", b"")
    _, address = yield rank.channel.receive()
    peer = rank.endpoint.connect(address)
    first = 1.0 - rank.clock.now
    for number, (blocks, size, gap, many) in enumerate(points):
        offset = np.arange(blocks, dtype=np.int64) * size
        batch = Batch(region, peer.regions["all"], offset, offset, np.full(blocks, size))
        for _ in range(many):
            yield rank.clock.timeout(max(0.0, gap + first))
            first = 0.0
            yield rank.endpoint.write(peer, batch, label=str(number))
    rank.channel.send("taker", b"done")


def take(rank):
    rank.endpoint.register(rank.device.allocate(32 << 20), "all")
    writer, _ = yield rank.channel.receive()
    rank.channel.send(writer, rank.endpoint.address())
    yield rank.channel.receive()


def modelled(own):
    """Yield each row of *own*, which are of one backend, with the seconds of the model."""
    for (backend, link), group in groupby(own, lambda row: (row["backend"], row["link"])):
        every = list(group)
        config = compose([f"backend={backend}", "hw=link", *(f"hw.link.{word}" for word in link.split())])
        points = [(int(row["blocks"]), int(row["size"]), float(row["gap"])) for row in every]
        points = [(*point, 1 if point[2] == LONG else 3) for point in points]
        ranks = [
            RankSpec("writer", f"{__name__}:write", Place(0), {"points": points}),
            RankSpec("taker", f"{__name__}:take", Place(1), {}),
        ]
        writes = iter(Model(config.hw, config.backend).run(ranks).ranks["writer"].transfers)
        for row, point in zip(every, points, strict=True):
            seconds = [record.seen - record.submitted for record in islice(writes, point[3])]
            yield row, min(seconds[2:] if point[2] < LONG else seconds)


def fitted(backend):
    short = [row for row in rows(data("calibration", f"{backend}-link.csv")) if float(row["gap"]) < LONG]
    return [(row, seconds, float(row["seconds"])) for row, seconds in modelled(short) if row["blocks"] == "1"]


def unseen(backend):
    own = [row for row in rows(data("benchmarks", "known_link_validate.csv")) if row["backend"] == backend]
    both = modelled([{"blocks": "1", "gap": "0", **row} for row in own])
    return [(row, seconds, float(row["measured"])) for row, seconds in both]


@pytest.mark.parametrize("backend", ["mooncake_tcp", "nixl_tcp"])
@pytest.mark.parametrize("points", [fitted, unseen])
def test_tcp_over_known_links_is_within_five_per_cent(backend, points):
    every = [(int(row["size"]) >= 1 << 20, seconds, measured) for row, seconds, measured in points(backend)]
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
    words = ["hw=2xh200", f"backend={backend}", "host_factor=1", "experiment=transfer", "experiment.ranks=2"]
    model = compose(words).backend.intra  # not the median of other hosts, as by default
    alone = [row for row in every if row.concurrency == 1]
    times = [model.isolated_time(row.blocks, row.blocks * row.size, read=row.operation == "read") for row in alone]
    errors = np.abs(np.array(times) / [row.seconds for row in alone] - 1.0)
    assert len(errors) > 100
    assert np.median(errors) < middle
    assert np.percentile(errors, 95.0) < p95


CONF = Path(conf.__file__).parent


def test_a_published_calibration_is_what_its_samples_give():
    (done,) = published(["efa-read"])
    file = OmegaConf.load(CONF / "calibration" / "efa-read.yaml")
    assert done.calibration.parameters == OmegaConf.to_container(file.parameters)
    assert done.calibration.held_out.mean == pytest.approx(file.held_out.mean, rel=1e-3)


def test_shipped_costs_of_options_are_what_their_samples_give():
    file = OmegaConf.to_container(OmegaConf.load(CONF / "backend" / "nixl.yaml"))
    shipped = [build(OptionCosts, item) for item in file["intra"]["by_option"][1:]]
    base, sets = option_fit.bare(), option_fit.process_sets()
    values = option_fit.fit(base, sets)
    for costs in shipped:
        assert (costs.latency, costs.descriptor, costs.rate) == pytest.approx(tuple(values.values()), rel=5e-3)
    for name, ends in option_fit.spans(base, sets).items():
        parse = float if name == "rate" else parse_time
        assert [parse(end) for end in shipped[1].intervals[name]] == pytest.approx(ends, rel=5e-3, abs=1e-9)
    errors = np.abs(np.concatenate([option_fit.errors(base, one, values, held=True) for one in sets]))
    said, others = (float(number) / 100 for number in re.findall(r"([\d.]+) %", shipped[1].evidence))
    assert np.median(errors) == pytest.approx(said, abs=5e-4)
    of_all = {"mean": errors.mean(), "median": np.median(errors), "p95": np.percentile(errors, 95)}
    assert shipped[1].errors == pytest.approx(of_all, abs=1e-3)
    assert np.median(option_fit.spread(sets)) == pytest.approx(others, abs=5e-4)
    assert said < others


EVERY = collective_fit.points()


@pytest.mark.parametrize("name", ["nccl", "symm_mem"])
def test_shipped_collectives_are_what_their_samples_give(name):
    library = compose(["experiment=allgather", "hw=4xh200", f"collective={name}"]).collective
    for kind in collective_fit.KINDS:
        given = getattr(library, kind)
        mine = [point for point in EVERY if point.kind == kind and (kind == "plain" or point.library == name)]
        fitted = collective_fit.fit(mine, given)
        for key in collective_fit.FITTED:
            assert getattr(given, key) == pytest.approx(getattr(fitted, key), rel=0.01), key
    times = (library.symmetric.after_pause, library.symmetric.grown)
    assert times == pytest.approx(collective_fit.host_times(EVERY), rel=0.01)
    assert library.plain.after_pause == library.symmetric.after_pause


def test_shipped_hosts_and_copies_are_what_the_records_give():
    fitted, shown = handoff_fit.tables()
    numbers = {row[0]: row[1] * 1e-6 for row in fitted.rows}
    hw = handoff_fit.handoff_config(handoff_fit.FITTED[0]).hw
    for name in ("call", "context_switch"):
        assert getattr(hw.gpu.copies, name) == pytest.approx(numbers[f"hw.gpu.copies.{name}"], abs=0.5e-6)
    assert hw.gpu.copies.descriptor == pytest.approx(numbers["hw.gpu.copies.descriptor"], abs=0.05e-9)
    assert hw.host.wake == pytest.approx(numbers["hw.host.wake"], abs=0.5e-6)
    assert hw.gpu.idle_wake == pytest.approx(numbers["hw.gpu.idle_wake"], abs=0.5e-6)
    assert hw.host.idle_wake == pytest.approx(numbers["hw.host.idle_wake"], abs=50e-6)  # moves with the calibration
    assert {row[4] for row in shown.rows} == {"yes", "in part", "no"}
