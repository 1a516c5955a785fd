# SPDX-License-Identifier: Apache-2.0
"""Equal ranks once: which ranks of a job need not be run, because others do the same at the same times.

Programs that claim to be alike (`RankSpec.like`) are so on the model if their hardware is: the ranks that stand for
others form one column, their copies as many columns more, and no column shares a link with another or with the ranks
that stand for themselves.  Then every time of a copy is that of its original, bit for bit, and so is what its links
carry.  `plan` says what can be folded, `Columns` what each rank stands for.

Unknown here: what ranks do.  A message from a column to the others counts once for each rank that its sender stands
for (`pdsim.sim.channel`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdsim.sim.topology import Route

if TYPE_CHECKING:
    from pdsim.hardware.costs import Engine
    from pdsim.sim.flows.network import Link
    from pdsim.sim.topology import Site, Topology
    from pdsim.transfer.job import RankSpec

__all__ = ["Columns", "plan"]

QUEUES = "/queues"
"""How the name of the link of a send queue ends, after ``source>target``; see `pdsim.sim.engine`."""

WIDTHS = ((1, 0), (2, 1), (2, 0), (4, 3), (4, 0))
"""How many ranks of each set a column may have, and how many stand for themselves before the first column."""


@dataclass(frozen=True)
class Columns:
    """What is folded: *copies* of each rank that runs for others, in the same order for each of them.

    *links* maps every link of a copy to the one that stands for it.  *crossings* are what turned out not to be alike
    while the job ran: then it has to be run again with all ranks.
    """

    copies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    links: Mapping[Link, Link] = field(default_factory=dict)
    sets: Mapping[str, str] = field(default_factory=dict)  # by original: the first of those that say they are alike
    crossings: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Return whether anything is folded."""
        return bool(self.copies)

    @property
    def originals(self) -> dict[str, str]:
        """By copy, the rank that runs for it."""
        return {copy: name for name, copies in self.copies.items() for copy in copies}

    def meet(self, name: str, other: str) -> None:
        """Take note that these two ranks move bytes between them: they must be in one column, or in none."""
        if (name in self.copies) != (other in self.copies):
            self.crossings.append(f"{name} and {other}")

    def unfold(self, links: Iterable[Link]) -> Iterator[tuple[str, Link]]:
        """Yield name and stand-in of all links that the job would have with every rank, in the order of making.

        *links* are those that it has.  Those of send queues are made as ranks connect, which ranks that are alike do
        one after the other.
        """
        block: list[tuple[str, str, Link]] = []
        for link in links:
            source, _, target = link.name.removesuffix(QUEUES).partition(">")
            if source in self.copies and link.name.endswith(QUEUES):
                if block and self._set(*block[0][:2]) != self._set(source, target):
                    yield from self._expand(block)
                    block = []
                block.append((source, target, link))
                continue
            yield from self._expand(block)
            block = []
            yield link.name, self.links.get(link, link)
        yield from self._expand(block)

    def _set(self, source: str, target: str) -> tuple[str, str]:
        return self.sets[source], self.sets[target]

    def _expand(self, block: Sequence[tuple[str, str, Link]]) -> Iterator[tuple[str, Link]]:
        columns = [{name: name for name in self.copies}, *map(self.names, range(self.count))]
        for names in columns if block else ():
            for source, target, link in block:
                yield f"{names[source]}>{names[target]}{QUEUES}", link

    @property
    def count(self) -> int:
        """How many columns of copies there are."""
        return max(map(len, self.copies.values()), default=0)

    def names(self, number: int) -> dict[str, str]:
        """Return the names of the *number*-th column of copies by those of the originals."""
        return {name: copies[number] for name, copies in self.copies.items()}


def plan(specs: Sequence[RankSpec], topology: Topology, engine: Engine) -> Columns:
    """Return what of *specs* can be folded on the hardware of *topology*; nothing unless all of it is exact.

    A column has one or more ranks of each set that say that they are alike: two, say, where two GPUs share a card.
    Names must be equally long (they are part of messages), every rank of a column on a GPU that no other rank uses,
    and the ways between the ranks of one column those between the ranks of the other: as many links with the same
    capacities, in the same order, of which no two columns have one in common.
    """
    alike: dict[str, list[RankSpec]] = {}
    by_name = {spec.name: spec for spec in specs}
    for spec in specs:
        if spec.like and (by_name[spec.like].like or specs.index(by_name[spec.like]) > specs.index(spec)):
            return Columns()
        if spec.like:
            alike.setdefault(spec.like, [by_name[spec.like]]).append(spec)
    if not alike or len({len(members) for members in alike.values()}) > 1 or topology.chain is not None:
        return Columns()
    if not _apart([spec for members in alike.values() for spec in members], specs):
        return Columns()
    count = len(next(iter(alike.values())))
    for width, first in WIDTHS:
        if count - first >= 2 * width and (count - first) % width == 0:
            starts = range(first, count, width)
            columns = [[spec for members in alike.values() for spec in members[at : at + width]] for at in starts]
            links = _exact(columns, specs, topology, engine)
            if links is not None:
                names = ([spec.name for spec in column] for column in columns)
                copies = {original: tuple(others) for original, *others in zip(*names, strict=True)}
                return Columns(copies, links, {spec.name: spec.like or spec.name for spec in columns[0]})
    return Columns()


def _exact(
    columns: Sequence[Sequence[RankSpec]], specs: Sequence[RankSpec], topology: Topology, engine: Engine
) -> dict[Link, Link] | None:
    """Return which link of the first of *columns* stands for each link of the others; None if that is not exact."""
    sites = [[topology.site(spec.place) for spec in column] for column in columns]
    for column, places in zip(columns, sites, strict=True):
        lengths = [(len(spec.name), len(site.name)) for spec, site in zip(column, places, strict=True)]
        if lengths != [(len(spec.name), len(site.name)) for spec, site in zip(columns[0], sites[0], strict=True)]:
            return None
    inside = {spec.name for column in columns for spec in column}
    others = [topology.site(spec.place) for spec in specs if spec.place.gpu is not None and spec.name not in inside]
    found = _alike([list(_routes(places, topology, engine)) for places in sites])
    taken = {link for route in _routes(others, topology, engine) for link in route.links}
    return None if found is None or taken & {*found, *found.values()} else found


def _apart(members: Sequence[RankSpec], specs: Sequence[RankSpec]) -> bool:
    """Return whether each of *members* is on a GPU that no other rank of *specs* uses."""
    places = [spec.place for spec in specs]
    return all(spec.place.gpu is not None and places.count(spec.place) == 1 for spec in members)


def _routes(sites: Sequence[Site], topology: Topology, engine: Engine) -> Iterator[Route]:
    """Yield the memory of each of *sites*, and the ways that *engine* has between each two of them."""
    for site in sites:
        yield Route((topology.memory(site),), 0.0)
        for other in sites:
            model = engine.intra if site.node == other.node else engine.inter
            if other is not site and model is not None:
                yield topology.route(model.path, site, other)


def _alike(columns: Sequence[Sequence[Route]]) -> dict[Link, Link] | None:
    """Return the link of the first of *columns* for each of the others; None unless they are alike and apart."""
    found: dict[Link, Link] = {}
    first = columns[0]
    mine = {link for route in first for link in route.links}
    for column in columns[1:]:
        images: dict[Link, Link] = {}
        if len(column) != len(first):
            return None
        for route, other in zip(first, column, strict=True):
            if len(route.links) != len(other.links) or route.latency != other.latency:
                return None
            for link, copy in zip(route.links, other.links, strict=True):
                if link.nominal != copy.nominal or images.setdefault(copy, link) is not link:
                    return None
        if (
            len(set(images.values())) != len(images)
            or not mine.isdisjoint(images)
            or not images.keys().isdisjoint(found)
        ):
            return None
        found |= images
    return found
