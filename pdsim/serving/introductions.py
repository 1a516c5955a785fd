# SPDX-License-Identifier: Apache-2.0
"""How a rank comes to be connected to the peers that it moves bytes to or from, in whatever order they are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pdsim.core.errors import PeerLost, TransferFailed
from pdsim.kv.messages import Gone, MessageError, Ready, Register
from pdsim.serving.deployment import ROUTER, epoch_of, instance_of
from pdsim.serving.rank_process import EngineProcess

__all__ = ["Introductions", "ReadyCount"]


class PeerTable(Protocol):
    """The ranks of the other side that a rank is connected to, by the life of their instance."""

    def __contains__(self, life: str) -> bool:
        """Return whether this rank was told to meet *life*."""

    def meet(self, life: str) -> None:
        """Take note of *life*, also if this rank has nothing to do with it."""

    def drop(self, life: str) -> None:
        """Forget the ranks of *life*."""

    def connect(self, message: Register) -> None:
        """Connect to the rank that sent *message*, or raise what `Endpoint.connect` does or a `MessageError`."""


class Introductions:
    """Connects *process*, the poster's side of a handoff, to those ranks of *peers* that make themselves known.

    The router says which lives to `meet`, and their ranks send a `Register` each; either may come first.  *ready* is
    called with a life when it is met and after each connection to it, and finds out whether that was the last.
    """

    def __init__(self, process: EngineProcess, peers: PeerTable, ready: Callable[[str], None]) -> None:
        self._process = process
        self._peers = peers
        self._ready = ready
        self._early: dict[str, Register] = {}  # by sender: came before this rank was told to meet that life
        process.handlers |= {Register: self._register}

    def meet(self, life: str) -> None:
        """Connect to the ranks of *life* that have made themselves known, and to others as they do."""
        self._peers.meet(life)
        early, self._early = self._early, {}
        for sender, register in early.items():
            self._register(sender, register)
        self._ready(life)

    def drop(self, life: str) -> None:
        """Forget the ranks of *life*, and what they have said."""
        self._peers.drop(life)
        self._early = {name: register for name, register in self._early.items() if register.instance != life}

    def _register(self, sender: str, message: Register) -> None:
        """Connect to a rank that makes itself known.

        Before this rank is told to meet its life, the newest of what it says is kept until then. A rank that is gone
        is reported to the router; one that says nonsense is refused.
        """
        if message.peer != self._process.life or message.instance not in self._peers:
            kept = self._early.get(sender)  # one of each rank, and of no life that is over for long
            if kept is None or _lives(kept) <= _lives(message):  # those of two lives may come in any order
                self._early[sender] = message
            return
        try:
            self._peers.connect(message)
        except PeerLost as error:
            self._process.send(ROUTER, Gone(message.instance, f"PeerLost: {error}"))
        except (MessageError, TransferFailed) as error:  # another kind of pool, or no address at all
            self._process.refuse(sender, str(error))
        else:
            self._ready(message.instance)


def _lives(message: Register) -> tuple[int, int]:
    """Return which life of its sender's instance *message* is of, and which of the other side's it means."""
    return epoch_of(message.instance), epoch_of(message.peer)


class ReadyCount:
    """Which of a leader's *ranks* are connected to each life of the other side, and which lives are over.

    A rank may say so twice, or before its leader was told of that life; each counts once.  A life is a `Ready`'s
    pair of names, so nothing said in an earlier life of either side counts in a later one.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._ready: dict[tuple[str, str], set[int]] = {}  # by `Ready.life` and `Ready.peer`
        self._last_lost: dict[str, int] = {}  # by instance: the last epoch that is known to be over

    def count(self, rank: int, message: Ready) -> bool:
        """Count *rank*; return whether all are connected now."""
        ranks = self._ready.setdefault((message.life, message.peer), set())
        ranks.add(rank)
        return len(ranks) == self._ranks

    def lose(self, life: str) -> None:
        """Take note that *life*, of the other side, is over, and forget who was connected to it."""
        instance = instance_of(life)
        self._last_lost[instance] = max(epoch_of(life), self._last_lost.get(instance, 0))
        self._ready = {lives: ranks for lives, ranks in self._ready.items() if life not in lives}

    def lost(self, life: str) -> bool:
        """Return whether *life*, or a later one of its instance, was lost."""
        return epoch_of(life) <= self._last_lost.get(instance_of(life), -1)

    def keep(self, life: str) -> None:
        """Forget what was counted in other lives of this instance than *life*."""
        self._ready = {lives: ranks for lives, ranks in self._ready.items() if life in lives}
