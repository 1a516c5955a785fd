# SPDX-License-Identifier: Apache-2.0
"""What an engine adds to `backends.base.endpoint.RealEndpoint`: seven methods, and what it declares of itself.

An engine is a library that registers memory, reaches a peer and moves blocks.  Everything that is
the same for all of them is the endpoint's: deadlines, quarantine, withdrawal, notifications over
the control channel, lost peers, records.  So the methods here are short, and none of them waits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from backends.base.device import RealBuffer
from backends.base.transfers import Entry, PeerState, PostedTransfer

__all__ = ["EngineHooks"]


class EngineHooks(ABC):
    """The engine's part of an `Endpoint`.

    `backends.base.endpoint.RealEndpoint` calls these, on the clock's thread, in this order:
    `start_engine` once; `pin` and `unpin` for each region; `engine_address` whenever an address is
    asked for; `connect_engine` for each address of a peer; `post` for each transfer; `stop_engine`
    once.

    The engine reports the end of a transfer by one of three methods of the endpoint: `complete`;
    `fail` or, for an error that may be the peer's death, `engine_failed`; and `quiesce` when a
    failed transfer is proven to move nothing.  It finds out by polling as a source of the clock
    (`pdsim.core.clock.WallClock.watch`) or from a thread that calls `WallClock.call`.

    Attributes:
        kind: Names what can talk to each other: endpoints of different kinds cannot connect.
        options: Those of `Engine.options` that are no environment variables; `pdsim doctor` and the
            checks of a run know them by this.
        variants: A `backends.capabilities.Variant` for each backend that this class serves.
    """

    kind = ""  # endpoints of different kinds cannot connect
    options: tuple[str, ...] = ()  # of `Engine.options`, those that are no environment variables
    variants: ClassVar[tuple[Any, ...]] = ()  # `Variant`s, or records of an engine's own that extend it

    @abstractmethod
    def start_engine(self) -> str:
        """Start the engine; return what it is, as it reports itself.

        Raise `BackendUnavailable` if it cannot work.
        """

    @abstractmethod
    def pin(self, buffer: RealBuffer) -> Any:
        """Register *buffer* with the engine; return the engine's handle.  Raise a `RegistrationError`.

        The handle is kept in `Entry.handle`, and opaque to everybody else.
        """

    @abstractmethod
    def unpin(self, entry: Entry) -> None:
        """Undo `pin`, with nothing of this rank's moving over *entry* any more.

        A peer may not have heard yet that the region is gone; the memory itself stays held until
        all have returned it.
        """

    @abstractmethod
    def engine_address(self) -> bytes:
        """Return what the engine's side of a peer needs to know of this one.

        Opaque bytes for `connect_engine` of the same kind.  Asked for anew with each address, since
        some engines describe the regions that are registered by then.
        """

    @abstractmethod
    def connect_engine(self, description: bytes) -> Any:
        """Return the engine's handle of the peer that *description* describes, whether it was met before or not.

        It is kept in `PeerState.handle`.  Raise a `ValueError` for bytes that are no description,
        and a `TransferError` if the peer cannot be reached.
        """

    @abstractmethod
    def post(self, transfer: PostedTransfer) -> None:
        """Hand *transfer* to the engine.  Raise a `TransferError` if it was not taken and nothing moves.

        Set `prepared` and `posted` of the transfer, in seconds on the clock, where the engine's
        call has stages; keep what it takes to recognise the transfer in `handle`.  Must not block:
        the clock's thread serves all transfers.
        """

    @abstractmethod
    def stop_engine(self, idle: bool) -> None:
        """Stop the engine.  Unless *idle*, transfers are moving and what they use must be left alone."""

    def forget_region(self, peer: PeerState, region: str) -> None:  # noqa: B027 most engines keep nothing of it
        """Give up what the engine keeps of *region*, which *peer* has withdrawn and nothing of ours moves in."""
