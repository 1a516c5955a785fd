"""What an engine adds to `backends.base.endpoint.RealEndpoint`: seven methods, and what it declares of itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from backends.base.device import RealBuffer
from backends.base.endpoint_state import Entry, PeerState, PostedTransfer

__all__ = ["EngineHooks"]


class EngineHooks(ABC):
    """The engine's part of an `Endpoint`.

    `backends.base.endpoint.RealEndpoint` calls these, on the clock's thread, in this order: `start_engine` once;
    `pin` and `unpin` for each region; `engine_address` whenever an address is asked for; `connect_engine` for each
    address of a peer; `post` for each transfer; `stop_engine` once.  The engine reports the end of a transfer to the
    endpoint.
    """

    kind = ""  # endpoints of different kinds cannot connect
    options: tuple[str, ...] = ()  # of `Engine.options`, those that are no environment variables
    variants: ClassVar[tuple[Any, ...]] = ()  # `Variant`s, or records of an engine's own that extend it

    @abstractmethod
    def start_engine(self) -> str:
        """Start the engine; return what it is, as it reports itself.  Raise `BackendUnavailable` if it cannot work."""

    @abstractmethod
    def pin(self, buffer: RealBuffer) -> Any:
        """Register *buffer* with the engine; return the engine's handle.  Raise a `RegistrationError`.

        The handle is kept in `Entry.handle`, and opaque to everybody else.
        """

    @abstractmethod
    def unpin(self, entry: Entry) -> None:
        """Undo `pin`."""

    @abstractmethod
    def engine_address(self) -> bytes:
        """Return what the engine's side of a peer needs to know of this one."""

    @abstractmethod
    def connect_engine(self, description: bytes) -> Any:
        """Return the engine's handle of the peer that *description* describes, whether it was met before or not."""

    @abstractmethod
    def post(self, transfer: PostedTransfer) -> None:
        """Hand *transfer* to the engine.  Raise a `TransferError` if it was not taken and nothing moves."""

    @abstractmethod
    def stop_engine(self, idle: bool) -> None:
        """Stop the engine.  Unless *idle*, transfers are moving and what they use must be left alone."""

    def forget_region(self, peer: PeerState, region: str) -> None:  # noqa: B027 most engines keep nothing of it
        """Give up what the engine keeps of *region*, which *peer* has withdrawn and nothing of ours moves in."""
