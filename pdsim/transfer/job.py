# SPDX-License-Identifier: Apache-2.0
"""A job: the ranks that are started, what each of them is given, and how they ended.

A `Target` runs a job, on the model (`pdsim.sim.model`) or on real engines (`backends.jobs.launcher`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pdsim.core.clock import Clock
from pdsim.core.errors import BackendUnavailable, ConfigError
from pdsim.hardware.costs import Engine
from pdsim.transfer import Channel, Device, Endpoint, Recorder, TransferRecord
from pdsim.transfer.group import Group

SampleRow = tuple[str, str, float, float]
"""Kind, name, seconds since the start of the job, and a share from 0 to 1."""


@dataclass
class Rank:
    """What a program gets: its name, its clock, and the parts that it may use.

    A program is a generator function of a `Rank` and plain arguments.  It yields events of this rank's clock,
    device, endpoint, channel and groups, and what it returns is the rank's result::

        def program(rank, receiver):
            rank.channel.send(receiver, b"hello")
            message = yield rank.channel.receive()
            return {"sender": message.sender, "seconds": rank.clock.now}

    Objects of one rank are not used by another one: on a real engine each is in a process of its own.  The target
    closes groups, channel and endpoint when the program has ended, however it ended.
    """

    name: str
    clock: Clock
    device: Device
    endpoint: Endpoint
    channel: Channel
    recorder: Recorder
    peers: tuple[str, ...]  # the names of all other ranks
    groups: Callable[[tuple[str, ...]], Group] | None = None  # how the target makes them
    counted: tuple[Callable[[], int], int] | None = None  # what `counts` was given

    def gauge(self, kind: str, name: str, read: Callable[[], float]) -> None:
        """As `Recorder.gauge`."""
        self.recorder.gauge(kind, name, read)

    def counts(self, read: Callable[[], int], of: int) -> None:
        """Show as progress that ``read()`` of *of* pieces of the job's work are done."""
        self.counted = read, of

    def group(self, names: Sequence[str]) -> Group:
        """Return the group of the ranks *names*, this one among them; for the same names the same group.

        All of them call this; it does not wait for the others.  Raise a `ValueError` for a name that occurs twice,
        is no rank or is not there for this rank, and `BackendUnavailable` where there are no collectives.
        """
        wanted, known = tuple(names), (self.name, *self.peers)
        for name in wanted:
            if name not in known or wanted.count(name) > 1:
                raise ValueError(f"names={wanted}: {name!r} must occur once and be one of {', '.join(known)}")
        if self.name not in wanted:
            raise ValueError(f"names={wanted} do not name this rank, {self.name!r}; only members ask for a group")
        if self.groups is None:
            raise BackendUnavailable("this target has no collectives; choose some, such as collective=nccl")
        return self.groups(wanted)


@dataclass(frozen=True)
class Place:
    """Where a rank runs: a node, and a GPU of it or, with ``gpu=None``, its host.  Both count from 0.

    Ranks may share a place; they then share its memory and its copies.
    """

    node: int = 0
    gpu: int | None = None


@dataclass(frozen=True)
class RankSpec:
    """A rank to be started: *program* is ``"package.module:function"``, called with a `Rank` and *arguments*.

    *arguments* and the program's return value are plain data (what JSON can hold).  *name* is unique in the job.
    On a real engine *posting* threads post its transfers and wait for each; with 0 the one that asks for them does,
    None is what is quickest for the engine.
    """

    name: str
    program: str
    place: Place = Place()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    posting: int | None = None


@dataclass(frozen=True)
class RankResult:
    """How a rank ended: with its program's *value*, or with an *error* ``"PeerLost: decode0 is gone"``."""

    name: str
    value: Any = None
    error: str = ""
    engine: str = ""  # what moved its bytes, as the engine reports itself
    transfers: Sequence[TransferRecord] = ()  # in the order in which they ended
    refused: int = 0  # messages and connections, see `pdsim.transfer.Channel`


@dataclass(frozen=True)
class Outcome:
    """How a job ended: every rank's result, and what the target reports of itself."""

    ranks: Mapping[str, RankResult]
    seconds: float  # from start to the end of the last rank, on the job's clock
    links: Mapping[str, float] = field(default_factory=dict)  # mean use of each link that the target knows, 0 to 1
    pools: Mapping[str, float] = field(default_factory=dict)  # peak use of each device's pools, 0 to 1
    events: int = 0  # SimPy events processed
    samples: Sequence[SampleRow] = ()  # of links, memories and `Rank.gauge`, where the target keeps any


class Target(Protocol):
    """Runs jobs, one after the other: on the model, or on a real engine with one process per rank."""

    def run(
        self, ranks: Sequence[RankSpec], kill: Mapping[str, float] = ..., restart: Mapping[str, float] = ...
    ) -> Outcome:
        """Run *ranks* until all have ended.

        *kill* ends ranks by force, and *restart* starts again ranks that have ended by then; both are name to
        seconds after the start.  Results are of last incarnations.
        """

    def using(self, engine: Engine) -> Target:
        """Return the same machine with another *engine*, whose ranks fail if it does not work here."""


def ranks_named(ranks: Sequence[str], **times: Mapping[str, float]) -> None:
    """Raise a `ConfigError` unless *ranks* have unique names and *times* are of these, from the start on.

    *times* are like those of `Target.run`: ``kill={"a": 0.5}``.
    """
    for name in ranks:
        if ranks.count(name) > 1:
            raise ConfigError(f"{ranks.count(name)} ranks are named {name!r}; give each a name of its own")
    for what, moments in times.items():
        for name, at in moments.items():
            if name not in ranks:
                raise ConfigError(f"{what} names {name!r}, which is not a rank; there are {', '.join(ranks)}")
            if not at >= 0:
                raise ConfigError(f"{what}[{name!r}]={at} must be >= 0 seconds after the start")
