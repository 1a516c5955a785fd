# SPDX-License-Identifier: Apache-2.0
"""Forward packets between namespaces: ``python packet_forwarder.py ORDER``, started by the emulated link only.

Nodes stand in a chain, and between two neighbours there is a hop for each direction.  A packet of *n* bytes starts
when those before it have left, leaves after ``n / rate`` and arrives *delay* later.  None is dropped: at *backlog*
bytes under way the devices that feed a hop are left unread.  A hop is *slow* for a while, *stalled* (it goes on
where it was) or *cut* (what is on the wire then is lost, as is what is sent).

Nothing but the standard library is imported, so that the process is up at once.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from math import inf
from typing import Any

HEADER = 10  # bytes in front of each packet of a TUN device: they say that its checksum is still to be made
BURST = 64  # packets that are read from a device before those that are due are looked at again
ASKED = b"late"  # the supervisor's question; the answer counts packets, late ones, and the largest delay
LATE = 1e-3  # seconds after its time from which on a packet counts as late
_PR_SET_PDEATHSIG, _PR_SET_TIMERSLACK = 1, 29


class Hop:
    """One direction between two neighbours, of *rate* bytes/s; calls come in ascending order of monotonic time."""

    def __init__(self, rate: float, delay: float, backlog: float) -> None:
        self.flight: deque[tuple[float, bytes]] = deque()  # when each arrives, in order
        self.held = 0  # bytes in it
        self._rate = rate
        self._delay = delay
        self._most = backlog + rate * delay
        self._free = 0.0  # when all before have left
        self._slow: list[tuple[float, float, float]] = []  # from, to, share of the rate; in order
        self._cut: list[tuple[float, float]] = []

    @property
    def full(self) -> bool:
        """Whether it takes no more for now."""
        return self.held >= self._most

    def plan(self, changes: Sequence[tuple[str, float, float, float]]) -> None:
        """Take the kind, the start, the end and the share of the rate of each change, in order."""
        shares = {"stall": 0.0}
        self._slow = [(a, b, shares.get(kind, share)) for kind, a, b, share in changes if kind != "cut"]
        self._cut = [(a, b) for kind, a, b, _ in changes if kind == "cut"]

    def take(self, packet: bytes, at: float) -> None:
        """Carry *packet*, which is there at time *at*.

        The header of the TUN device does not count.  A packet that is on the wire during a cut is lost.
        """
        start = max(at, self._free)
        self._free = end = self.leaves(start, len(packet) - HEADER)
        arrives = end + self._delay
        if not self._cut or not any(start < last and arrives > first for first, last in self._cut):
            self.flight.append((arrives, packet))
            self.held += len(packet)

    def leaves(self, start: float, nbytes: float) -> float:
        """Return when *nbytes* that start at *start* have left.

        *nbytes* move at the rate of the hop, at a share of it during a slow change, and not at all during a stall.

        >>> hop = Hop(rate=100.0, delay=0.0, backlog=0.0)
        >>> hop.plan([("slow", 1.0, 3.0, 0.5), ("stall", 4.0, 5.0, 0.0)])
        >>> hop.leaves(0.0, 150.0), hop.leaves(3.5, 100.0)  # 1 s and 1 s at half; 0.5 s, 1 s of nothing, 0.5 s
        (2.0, 5.5)
        """
        for first, last, share in self._slow:
            if last <= start:
                continue
            before = max(0.0, first - start) * self._rate
            if nbytes <= before:
                break
            nbytes, start = nbytes - before, max(first, start)
            rate = self._rate * share
            if nbytes <= (last - start) * rate:
                return start + nbytes / rate
            nbytes, start = nbytes - (last - start) * rate, last
        return start + nbytes / self._rate

    def due(self, now: float) -> list[tuple[float, bytes]]:
        flight, due = self.flight, []
        while flight and flight[0][0] <= now:
            due.append(flight.popleft())
            self.held -= len(due[-1][1])
        return due


class ForwarderChain:
    """All nodes, and the hops up and down between them; node *i* has the address that ends in *i + 1*."""

    def __init__(self, tuns: Sequence[int], up: Sequence[Hop], down: Sequence[Hop]) -> None:
        self._tuns = tuns
        self._up, self._down = up, down
        self._to = [*enumerate(up, 1), *enumerate(down)]  # where each hop ends
        self.packets = self.late = 0  # passed on by a hop, and later than `LATE` of them
        self.worst = 0.0  # seconds

    def deliver(self) -> float:
        """Pass on the packets that are due; return the time of the next."""
        after = inf
        for node, hop in self._to:
            flight = hop.flight
            if flight and flight[0][0] <= time.monotonic():
                for at, packet in hop.due(time.monotonic()):
                    self._note(time.monotonic() - at)
                    self._send(node, packet, at)
            if flight:
                after = min(after, flight[0][0])
        return after

    def _note(self, late: float) -> None:
        self.packets += 1
        if late > LATE:
            self.late += 1
            self.worst = max(self.worst, late)

    def readable(self) -> list[int]:
        """Return the devices that may be read: every hop in a direction that they feed has room."""
        up, down = (any(hop.full for hop in hops) for hops in (self._up, self._down))
        last = len(self._tuns) - 1
        return [tun for node, tun in enumerate(self._tuns) if not (up and node < last) and not (down and node > 0)]

    def read(self, tun: int) -> None:
        node = self._tuns.index(tun)
        with contextlib.suppress(BlockingIOError):
            for _ in range(BURST):
                packet = os.read(tun, 1 << 16)
                if packet[HEADER] >> 4 == 4:  # what IPv6 says by itself goes nowhere
                    self._send(node, packet, time.monotonic(), fresh=True)

    def _send(self, node: int, packet: bytes, at: float, *, fresh: bool = False) -> None:
        # A packet that a device sends to its own address, *fresh*, goes nowhere.
        to = packet[HEADER + 19] - 1  # the last byte of the destination
        if to > node and node < len(self._up):
            self._up[node].take(packet, at)
        elif to < node and to >= 0:
            self._down[node - 1].take(packet, at)
        elif not fresh:
            with contextlib.suppress(OSError):  # the far device is down
                os.write(self._tuns[node], packet)


def main() -> None:
    """Carry packets until the supervisor closes its end of the connection, or dies."""
    order: dict[str, Any] = json.loads(sys.argv[1])
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # ns; by default sleeps are 50 us longer
    with contextlib.suppress(OSError):  # the wire must not wait for those who use it
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the supervisor
    control = socket.socket(fileno=order["control"])
    up, down = ([Hop(rate, order["delay"], order["backlog"]) for rate in order[way]] for way in ("up", "down"))
    control.sendall(b"up")
    _carry(control, ForwarderChain(order["tuns"], up, down), [*zip(up, down, strict=True)], order["changes"])


def _carry(
    control: socket.socket, chain: ForwarderChain, hops: Sequence[tuple[Hop, Hop]], changes: Sequence[Any]
) -> None:
    while True:
        after = chain.deliver()
        wait = None if after == inf else max(0.0, after - time.monotonic())
        ready, _, _ = select.select([control.fileno(), *chain.readable()], (), (), wait)
        for source in ready:
            if source != control.fileno():
                chain.read(source)
                continue
            said = control.recv(64)
            if not said:
                return
            if said == ASKED:
                control.sendall(json.dumps([chain.packets, chain.late, chain.worst]).encode())
                continue
            origin = float(said)
            for number, both in enumerate(hops):
                own = [(kind, origin + a, origin + b, share) for at, kind, a, b, share in changes if at == number]
                for hop in both:
                    hop.plan(sorted(own, key=lambda change: change[1]))


if __name__ == "__main__":
    main()
