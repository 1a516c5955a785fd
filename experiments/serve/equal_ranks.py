# SPDX-License-Identifier: Apache-2.0
"""Simulate two columns of equal ranks for all of them, where that changes no result.

Rank *k* of every instance is in column *k*; ranks that share a network card are in one.  Tensor-parallel ranks write
to ranks of their column only, so columns that share no link do the same at the same times, but for the first, whose
ranks lead.  `outcome` runs that one and the next; the others are copies of the second under other names.  The job
differs in nothing but `Grid.omitted`: messages, pages, the bytes of each rank and all times are those of the whole.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby
from math import isfinite
from typing import NamedTuple

from pdsim.hardware.costs import Jitter
from pdsim.hardware.machine import Machine
from pdsim.kv.messages import index_of, instance_of
from pdsim.serving.autoscale import Autoscale
from pdsim.serving.deployment import Deployment
from pdsim.sim.hosts import JobClock
from pdsim.sim.model import Model
from pdsim.sim.network import Network
from pdsim.sim.topology import Topology
from pdsim.transfer.job import Outcome, Place, RankResult, RankSpec
from pdsim.transfer.log import joined, logs

QUEUES = "/queues"
"""How the name of the link of a send queue ends, after ``source>target``."""


class Columns(NamedTuple):
    """So many columns, each of *prefill* and *decode* ranks of every instance."""

    number: int
    prefill: int
    decode: int

    def of(self, rank: str) -> int:
        """Return the column of *rank*; -1 for the router, which is in none."""
        side = self.prefill if rank.startswith("prefill") else self.decode if rank.startswith("decode") else 0
        return index_of(rank) // side if side else -1

    def moved(self, rank: str, columns: int) -> str:
        """Return the name of what *rank* is so many *columns* further on."""
        side = self.prefill if rank.startswith("prefill") else self.decode
        instance, _, index = rank.rpartition(".")
        return f"{instance}.{int(index) + columns * side}"


def outcome(model: Model, what: Deployment, ranks: Sequence[RankSpec]) -> Outcome:
    """Return what *model* makes of the *ranks* of *what*; equal ones are simulated once where that is the same."""
    columns = equal(model, what, ranks)
    if columns is None:
        return model.run(ranks)
    sides = {"prefill": columns.prefill, "decode": columns.decode}
    omitted = {
        side: replace(getattr(what, side), omitted=(columns.number - 2) * each) for side, each in sides.items()
    }
    plain = replace(what, **omitted).plain()
    kept = [replace(spec, arguments={**spec.arguments, "job": plain}) for spec in ranks if columns.of(spec.name) < 2]
    few = model.run(kept)
    if any(rank.error for rank in few.ranks.values()):  # whose text names ranks
        return model.run(ranks)
    return _whole(few, model.machine, ranks, columns)


def equal(model: Model, what: Deployment, ranks: Sequence[RankSpec]) -> Columns | None:
    """Return the columns of *ranks* that do the same; None for fewer than four, or if something tells them apart.

    That is memory with contents, faults, jitter, an observer or samples, which look at each rank; stages and
    collectives; and what shares the host's links: tiers, tokens on their way to experts, retracted KV that has to
    wait for another's.
    """
    alone = model.memory == "timing" and not (model.faults or model.observer or model.samples or model.outages)
    alone = alone and model.jitter in (None, Jitter()) and not isfinite(model.limit)
    plain = what.prefill.pp == what.prefill.cp == what.decode.pp == 1 and not (what.colocated or what.gather)
    plain = plain and not (what.cache.tiered or what.prefill_time.exchange or what.decode_time.exchange)
    plain = plain and what.autoscale == Autoscale() and _retracts_alone(model, what, ranks)
    places = [spec.place for spec in ranks if spec.place.gpu is not None]
    if not (alone and plain) or len(set(places)) < len(places) or len(places) < len(ranks) - 1:
        return None
    least = min(what.prefill.tp, what.decode.tp)
    for width in (1, 2, 4):
        if (number := least // width) in (4, 8, 16, 32):  # so that what their host carries is exact
            columns = Columns(number, *(side.tp // least * width for side in (what.prefill, what.decode)))
            if _apart(model, ranks, columns):
                return columns
    return None


def _retracts_alone(model: Model, what: Deployment, ranks: Sequence[RankSpec]) -> bool:
    # Whether every rank could move KV to host memory at the same time, with an instance's all on one host.
    if what.engine.preemption != "retract":
        return True
    nodes = [(instance_of(spec.name), spec.place.node) for spec in ranks if spec.name.startswith("decode")]
    most = max(Counter(node for _, node in nodes).values())
    together = len(set(nodes)) == len(what.decodes)
    return together and most * what.engine.retract_rate <= model.machine.host.memory_rate


def _apart(model: Model, ranks: Sequence[RankSpec], columns: Columns) -> bool:
    # Whether no two columns share a link: memory and ports belong to a GPU, cards to one or several.
    places: list[tuple[set[Place], set[Place]]] = [(set(), set()) for _ in range(columns.number)]
    for spec in ranks:
        if (column := columns.of(spec.name)) >= 0:
            places[column][spec.name.startswith("decode")].add(spec.place)
    nodes = [tuple({place.node for place in side} for side in each) for each in places]
    inside = any(one & other for one, other in nodes)
    across = any(len(one | other) > 1 for one, other in nodes)
    ways = {way.path for way, used in ((model.engine.intra, inside), (model.engine.inter, across)) if used and way}
    if not ways <= {"nvlink", "rdma"}:
        return False
    nic = model.machine.nic
    if "rdma" in ways and (nic.devices or not nic.gpudirect):
        return False
    cards = [{_card(model.machine, place) for side in each for place in side} for each in places]
    return "rdma" not in ways or sum(map(len, cards)) == len(set().union(*cards))


def _card(machine: Machine, place: Place) -> tuple[int, int]:
    assert place.gpu is not None
    return place.node, place.gpu * (machine.nic.count // machine.nic.rails) // machine.gpus


def _whole(few: Outcome, machine: Machine, ranks: Sequence[RankSpec], columns: Columns) -> Outcome:
    # The outcome of all *ranks*, from that of the *few* that ran.
    specs = {spec.name: spec for spec in ranks}
    links = {
        name: share * columns.number / 2 if name.endswith("/host/memory") else share
        for name, share in few.links.items()
    }
    pools = dict(few.pools)
    for names in _further(few.ranks, columns):
        sites: dict[str, str] = {}
        for name, copy in names.items():
            one, other = specs[name].place, specs[copy].place
            sites[f"node{one.node}/gpu{one.gpu}"] = f"node{other.node}/gpu{other.gpu}"
            if machine.nic.count:
                sites["node{}/nic{}".format(*_card(machine, one))] = "node{}/nic{}".format(*_card(machine, other))
        for shares, of in ((few.links, links), (few.pools, pools)):
            for name, share in shares.items():
                if (moved := _moved(name, names, sites)) != name:
                    of[moved] = share
    order = [link.name for link in Topology(machine, Network(JobClock())).network.links]
    order += [copy for block in _blocks(few.links, columns) for copy in block]
    order = [name for name in order if name in links]
    gpus = dict.fromkeys(f"node{spec.place.node}/gpu{spec.place.gpu}" for spec in ranks)
    at = {site: number for number, site in enumerate(gpus)}
    return replace(
        few,
        ranks=completed(few.ranks, ranks, columns),
        links={name: links[name] for name in order},
        pools=dict(sorted(pools.items(), key=lambda item: at.get(item[0].rpartition("/")[0], -1))),
    )


def completed(
    few: Mapping[str, RankResult], ranks: Sequence[RankSpec], columns: Columns
) -> Mapping[str, RankResult]:
    """Return the results of all *ranks* in order, from the *few* of two *columns*; unchanged if all ran."""
    if any(columns.of(name) > 1 for name in few):
        return few
    every = dict(few)
    for names in _further(few, columns):
        for name, copy in names.items():
            transfers = joined(log.renamed(names) for log in logs(few[name].transfers))
            every[copy] = replace(few[name], name=copy, transfers=transfers)
    return {spec.name: every[spec.name] for spec in ranks if spec.name in every}


def _further(ranks: Iterable[str], columns: Columns) -> Iterator[dict[str, str]]:
    # The names of the second column's ranks in each of those that are not run.
    second = [name for name in ranks if columns.of(name) == 1]
    for further in range(1, columns.number - 1):
        yield {name: columns.moved(name, further) for name in second}


_SITE = re.compile(r"node\d+/(gpu|nic)\d+")


def _moved(name: str, names: Mapping[str, str], sites: Mapping[str, str]) -> str:
    # The name of a link or a pool of the second column, as another has it.
    if name.endswith(QUEUES):
        return ">".join(names.get(rank, rank) for rank in name.removesuffix(QUEUES).split(">")) + QUEUES
    here = _SITE.match(name)
    if here is None:
        return name
    moved = sites.get(here[0], here[0]) + name[here.end() :]
    mesh = re.search(r"\.(gpu\d+)$", name)
    if mesh is None:
        return moved
    other = f"{here[0].partition('/')[0]}/{mesh[1]}"
    return moved.removesuffix(mesh[1]) + sites.get(other, other).partition("/")[2]


def _blocks(links: Mapping[str, float], columns: Columns) -> Iterator[list[str]]:
    # Queues are made as ranks connect: those of all columns of two instances one after the other.
    pairs = [name.removesuffix(QUEUES).split(">") for name in links if name.endswith(QUEUES)]
    for _, block in groupby(pairs, lambda pair: [*map(instance_of, pair)]):
        own = list(block)
        yield [f"{source}>{target}{QUEUES}" for source, target in own]
        second = [pair for pair in own if columns.of(pair[0]) == 1]
        for names in _further(chain.from_iterable(second), columns):
            yield [f"{names[source]}>{names[target]}{QUEUES}" for source, target in second]
