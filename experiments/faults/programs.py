# SPDX-License-Identifier: Apache-2.0
"""Programs of `experiment=faults`.

The router keeps what explains a failure, and asks at the end whether all has recovered.  A decode instance may hold
some first pages of requests, as with a prefix cache.  A rank may send what its peers cannot read.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, cast

from msgspec.structs import replace

from pdsim.kv.messages import (
    ROUTER,
    VERSION,
    KvSpec,
    RegisterPool,
    RegisterRank,
    Stop,
    Submit,
    encode,
    incarnation_name,
    instance_of,
)
from pdsim.serving.decode import DecodeScheduler, decode_rank
from pdsim.serving.deployment import Deployment
from pdsim.serving.handoff.push import PushDecode
from pdsim.serving.router import RoutedRequest, Router
from pdsim.sim.faults import Squeeze
from pdsim.transfer import Program
from pdsim.transfer.job import Rank, RankSpec

LINGER = 5.0
"""Seconds without a request before the probes, and before the ranks are stopped: what is left then is left for
good."""

_LOOK = 0.2
"""Seconds between two looks whether the expected instances are formed."""

_PROBE = 9, 3
"""Input and output tokens of a probe."""


def router(
    rank: Rank,
    *,
    job: Mapping[str, Any],
    requests: Sequence[Sequence[float]],
    leaves: Sequence[Sequence[float]] = (),
    drains: Sequence[tuple[str, float, float]] = (),
    outages: Sequence[tuple[float, float]] = (),
    calm: float,
    linger: float = LINGER,
    expected: Sequence[str] = (),
    patience: float = 0.0,
    hurried: bool = False,
) -> Program:
    """Serve as `pdsim.serving.router.program` does, then probe every pair of instances, and stop the ranks.

    The probes are sent *linger* seconds after the last request has ended and after *calm*, the time of the last
    fault; if then not every one of the *expected* instances is formed, up to *patience* seconds later.  Who is
    *hurried* stops the ranks with the last request, and probes nobody.  The
    value has also ``probes``, rows of prefill instance, decode instance and status; and ``histories``, for each
    request a row for each time that its user sent it: when it ended, how, and a row for each time that it was sent
    out: when, in which room, to which two instances.
    """
    quiet = _QuietRouter(rank, Deployment.from_plain(job), requests, leaves, outages, drains)
    quiet.calm, quiet.linger, quiet.patience, quiet.expected = calm, linger, patience, frozenset(expected)
    quiet.hurried = hurried
    return (yield from quiet.run())


class _QuietRouter(Router):
    calm, linger, patience = 0.0, LINGER, 0.0
    expected: frozenset[str] = frozenset()
    hurried = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._probes: tuple[RoutedRequest, ...] | None = None
        self._resting = False
        self._histories: tuple[list[Any], ...] = tuple([[0.0, "", []]] for _ in range(self.count))

    def report(self) -> dict[str, Any]:
        probes = [[instance_of(p.prefill), instance_of(p.decode), p.status] for p in self._probes or ()]
        return super().report() | {"probes": probes, "histories": list(self._histories)}

    def _send_out(self, request: RoutedRequest, prefill: str, decode: str) -> None:
        super()._send_out(request, prefill, decode)
        if self._probes is None:
            row = [self.clock.now, request.room, instance_of(prefill), instance_of(decode)]
            self._histories[request.number][-1][2].append(row)

    def _close(self, request: RoutedRequest, status: str) -> None:
        before = request.asked_again
        if self._probes is None:
            self._histories[request.number][-1][:2] = self.clock.now, status
        super()._close(request, status)
        if request.asked_again > before and self._probes is None:
            self._histories[request.number].append([0.0, "", []])

    def _stop_if_done(self) -> None:
        if self.hurried:
            super()._stop_if_done()
            return
        if self._resting or self._rooms or not self.arrivals.over:
            return
        self._resting = True
        if self._probes is None:
            start = max(self.clock.now, self.calm) + self.linger
            self.clock.call_at(start, self._probe_formed, start + self.patience)
        else:
            self.clock.call_at(
                self.clock.now + self.linger, lambda _: super(_QuietRouter, self)._stop_if_done(), None
            )

    def _probe_formed(self, until: float) -> None:
        if self.clock.now >= until or all(map(self.registry.formed, self.expected)):
            self._probe()
        else:
            self.clock.call_at(min(self.clock.now + _LOOK, until), self._probe_formed, until)

    def _probe(self) -> None:
        self._resting = False
        first = self.count
        pairs = [(prefill, decode) for prefill in self.job.prefills for decode in self.job.decodes]
        self._probes = tuple(RoutedRequest(0.0, *_PROBE, number=first + number) for number in range(len(pairs)))
        self.count += len(pairs)
        for probe, (prefill, decode) in zip(self._probes, pairs, strict=True):
            # none is left, and no request has had a room of that number
            probe.tries, probe.asked_again = (self.job.retries + 1) * (self.job.asks + 1), self.job.asks
            probe.room = 1 + probe.number + probe.tries * self.count
            if self.registry.formed(prefill) and self.registry.formed(decode):
                self._rooms[probe.room] = probe
                self._send_out(probe, self.registry.current(prefill), self.registry.current(decode))
            else:
                probe.prefill, probe.decode, probe.status = prefill, decode, "PeerLost: one of them is not there"
        self._stop_if_done()


def decode(
    rank: Rank, *, instance: str, index: int, job: Mapping[str, Any], holds: bool = True, rows: Sequence[int] = ()
) -> Program:
    """Run one rank of a decode instance whose scheduler holds some first pages of a request already, if it *holds*.

    So would one with a prefix cache.  Such pages are not sent, and the checkers must know that.  With *rows* it says
    that its metadata has these sizes.
    """
    deployment = Deployment.from_plain(job)
    engine = decode_rank(rank, deployment, instance, index)
    if holds and isinstance(engine.scheduler, DecodeScheduler):
        engine.scheduler.pages.held = partial(_held, deployment)
    if rows:
        pool: Any = cast("PushDecode", engine.mover).kv.pool
        register = pool.register
        pool.register = lambda *names: replace(register(*names), metadata_rows=tuple(rows))
    return (yield from engine.run())


def _held(job: Deployment, request: Submit) -> int:
    pages = job.page_count(request.input)
    # a page that the input fills in part is always sent
    return min(request.room % pages, (request.input - 1) // job.page_size)


def misspeaking(rank: Rank, *, program: str, at: float, to: str, word: int, **arguments: Any) -> Program:
    """Run *program*, and send *to* a rank one of some words *at* a time, or attach one to a write, if it runs then.

    It refuses this rank: it cannot read the word, or that is not for it, or of a rank unlike its own.
    """
    module, _, name = program.partition(":")
    if rank.clock.now < at and word % 4:
        words = _words(Deployment.from_plain(arguments["job"]), arguments["instance"], arguments["index"], to)
        rank.clock.call_at(at, lambda _: rank.channel.send(to, words[word % len(words)]), None)
    elif rank.clock.now < at:
        rank.clock.call_at(at, _attach, rank.endpoint)
    return (yield from getattr(import_module(module), name)(rank, **arguments))


def _attach(endpoint: Any) -> None:
    # To the next write that has a notification: another message than is attached to writes.
    write = endpoint.write

    def attaching(peer: Any, batch: Any, notify: bytes = b"", **how: Any) -> Any:
        if notify:
            endpoint.write, notify = write, encode(Stop())
        return write(peer, batch, notify, **how)

    endpoint.write = attaching


def _words(job: Deployment, instance: str, index: int, to: str) -> list[bytes]:
    unread = [b"\x63what", b"", bytes([VERSION]) + b"what"]
    spec = KvSpec(job.page_size, job.kv_dtype)
    if to == ROUTER:
        unlike = replace(spec, page_size=1 + spec.page_size)
        places = [(instance, 99, spec), ("decode99", 0, spec), (instance, index, unlike)]
        ranks = [RegisterRank(name, number, 1 << 62, its) for name, number, its in places]
        return [*unread, *map(encode, (Stop(), *ranks))]
    layout = job.prefill_layout(index) if instance in job.prefills else job.decode_layout(index)
    other = incarnation_name(instance_of(to), 1), b"what", incarnation_name(instance, 1)
    larger = dataclasses.replace(layout, page_size=2 * layout.page_size)
    pools = [(99, layout), (index, larger), (index, layout)]
    return [*unread, *map(encode, (Stop(), *(RegisterPool(*other, *its) for its in pools)))]


def short_of_memory(rank: Rank, *, runs: str, leaves: int, **arguments: Any) -> Program:
    """Run the prefill program *runs* on a device whose other users leave it so many bytes beside its pool."""
    module, _, name = runs.partition(":")
    device, job = rank.device, Deployment.from_plain(arguments["job"])
    own = job.prefill_layout(arguments["index"]).size
    device.allocate(device.capacity - device.used - own - leaves)
    return (yield from getattr(import_module(module), name)(rank, **arguments))


def other_rows(spec: RankSpec) -> RankSpec:
    """Return *spec*, if of decode, of another release: metadata cannot be pushed there, and comes as a message."""
    if not instance_of(spec.name).startswith("decode"):
        return spec
    arguments = dict(spec.arguments) | {"rows": [16], "holds": spec.program.startswith("experiments")}
    return dataclasses.replace(spec, program="experiments.faults.programs:decode", arguments=arguments)


def holding(spec: RankSpec) -> RankSpec:
    """Return *spec*, if of decode, which holds some first pages of requests."""
    decode = instance_of(spec.name).startswith("decode")
    return dataclasses.replace(spec, program="experiments.faults.programs:decode") if decode else spec


def short(spec: RankSpec, leaves: int) -> RankSpec:
    """Return *spec* with so much less memory that it *leaves* so many bytes."""
    arguments = dict(spec.arguments) | {"runs": spec.program, "leaves": leaves}
    return dataclasses.replace(spec, program="experiments.faults.programs:short_of_memory", arguments=arguments)


def beside(squeeze: Squeeze, specs: Sequence[RankSpec]) -> Squeeze:
    """Return *squeeze* of *specs* on two nodes: on the way from the GPU of a rank to a network card.

    The link names the number of the rank.
    """
    place = specs[1 + int(squeeze.link.partition("gpu")[2].partition("/")[0])].place
    return squeeze._replace(link=f"node{place.node}/gpu{place.gpu}/pcie.{squeeze.link.rpartition('.')[2]}")
