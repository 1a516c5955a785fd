# SPDX-License-Identifier: Apache-2.0
"""Errors of the model and of real engines: a `PdsimError`, of a transfer a `TransferError`; words for messages."""

import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

__all__ = [
    "BackendUnavailable", "ConfigError", "InvalidBatch", "MessageError", "NeverPaused", "OutOfMemory", "PdsimError",
    "PeerLost", "RegistrationError", "RunWarning", "SendQueueFull", "TransferError", "TransferFailed",
    "TransferTimeout", "dataclasses_in", "instead", "near", "within",
]  # fmt: skip


class RunWarning(RuntimeWarning):
    """A note for readers of a run's numbers; `pdsim.run` keeps it among the notes of the result."""


class PdsimError(Exception):
    """Base of every error that pdsim raises on purpose."""


class ConfigError(PdsimError):
    """A configuration that cannot be run: a line for each mistake, with the value, the rule and the way out."""


class MessageError(PdsimError):
    """Bytes that are not a message of the schema; the receiver drops the sender's connection."""


class NeverPaused(PdsimError):
    """An event was deferred until the end of a pause, on a clock whose ranks are never paused; it is as before."""


class TransferError(PdsimError):
    """Base of what the transfer interface raises, or fails a `Transfer` with."""


class BackendUnavailable(TransferError):
    """The engine cannot work on this machine.  The message names what is missing and how to get it."""


class RegistrationError(TransferError):
    """Memory could not be registered, is not registered, or may not be given up yet."""


class OutOfMemory(TransferError):
    """A device, or one of its pools, has no room; what is freed but still in quarantine counts as used."""


class InvalidBatch(TransferError):
    """Descriptors that break the rules of `Batch`.  Raised before anything is posted."""


class SendQueueFull(TransferError):
    """The engine refused to post: too many descriptors are outstanding to that peer.  Nothing was posted."""


class PeerLost(TransferError):
    """The peer's process or engine is gone.  What it had not acknowledged may or may not have landed."""


class TransferTimeout(TransferError):
    """The deadline passed.  Bytes may still land: wait for `Transfer.settled` before memory is reused."""


class TransferFailed(TransferError):
    """The engine reported another failure, in its own words.  Also raised for an address that is none."""


def near(word: str, known: Iterable[str], template: str = "{}", alike: float = 0.6) -> str:
    """Return a question about those of *known* that go on where *word* ends, or about the one most *alike*, if any.

    *template* says how a name is typed:

    >>> near("8xh2O", ["8xh20", "loopback"], "hw={}")
    'did you mean hw=8xh20? '
    """
    import difflib  # here, for most processes refuse nothing

    names = list(known)
    longer = [each for each in names if each.startswith(f"{word}_")]  # workload.input of input_mean
    nearest = longer if word not in names and longer else difflib.get_close_matches(word, names, 1, alike)
    return f"did you mean {' or '.join(map(template.format, nearest))}? " if nearest else ""


def instead(word: str, known: Iterable[str], template: str = "{}") -> str:
    """Return what to write instead of *word*: the closest of *known*, as `near` asks for it, and all of them.

    >>> instead("nixel", ["mori", "nixl"])
    'did you mean nixl? There are mori, nixl'
    >>> instead("tcp", ["mori", "nixl"])
    'there are mori, nixl'
    """
    every = list(known)
    hint = near(word, every, template)
    return f"{hint}{'There' if hint else 'there'} are {', '.join(every)}"


def within(name: str, cls: type, without: Sequence[str] = ()) -> str:
    """Return a question about the fields called *name* in the dataclasses within *cls*, or nothing if there is none.

    Fields called as one of *without* are left out.
    """

    def walk(cls: type, at: str) -> Iterator[str]:
        hints = typing.get_type_hints(cls, include_extras=True)
        for field in fields(cls):
            if field.name not in without:
                if field.name == name:
                    yield at + name
                for inner in dataclasses_in(hints[field.name]):
                    yield from walk(inner, f"{at}{field.name}.")

    found = sorted(dict.fromkeys(walk(cls, "")), key=lambda each: each.count("."))  # the least nested first
    return f"did you mean {' or '.join(found[:4])}? " if found else ""


def dataclasses_in(kind: Any) -> list[type]:
    """Return the dataclasses that the annotation *kind* names."""
    if isinstance(kind, type) and is_dataclass(kind):
        return [kind]
    return [each for argument in typing.get_args(kind) for each in dataclasses_in(argument)]
