# SPDX-License-Identifier: Apache-2.0
"""Guard clauses that more than one module needs: each names the field, the rule and what it got.

*owner* is the group that the fields belong to, as the user writes it: ``positive("hw.nic", rate=0)`` raises
``ValueError("hw.nic.rate must be > 0, got 0")``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence

from pdsim.core.errors import ConfigError

__all__ = ["instead", "near", "not_negative", "one_of", "positive", "ranks_named"]


def positive(owner: str, **values: float) -> None:
    """Raise a `ValueError` unless all *values* are > 0; NaN is not.

    >>> positive("hw.nic", rate=0)
    Traceback (most recent call last):
    ValueError: hw.nic.rate must be > 0, got 0
    """
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{owner}.{name} must be > 0, got {value}")


def not_negative(owner: str, **values: float) -> None:
    """Raise a `ValueError` unless all *values* are >= 0; NaN is not.

    >>> not_negative("hw.host", wake=-1.0)
    Traceback (most recent call last):
    ValueError: hw.host.wake must be >= 0, got -1.0
    """
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"{owner}.{name} must be >= 0, got {value}")


def one_of(owner: str, allowed: tuple[str, ...], **values: str) -> None:
    """Raise a `ValueError` unless all *values* are among *allowed*, compared as whole names.

    >>> one_of("engine", ("wait", "refuse"), full="drop")
    Traceback (most recent call last):
    ValueError: engine.full must be one of wait, refuse, got 'drop'
    """
    for name, value in values.items():
        if value not in allowed:  # a tuple of whole names: "nvlink" is not found in "intra_node_nvlink"
            choices = ", ".join(choice or "''" for choice in allowed)
            raise ValueError(f"{owner}.{name} must be one of {choices}, got {value!r}")


def ranks_named(ranks: Sequence[str], **times: Mapping[str, float]) -> None:
    """Raise a `ConfigError` unless *ranks* have names of their own, and *times* are theirs and not before the start.

    *times* are called as a user of `pdsim.transfer.Target.run` does: ``kill={"a": 0.5}``, in seconds after the
    start.
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


def near(word: str, known: Iterable[str], template: str = "{}") -> str:
    """Return a question about the one of *known* that is closest to *word*, or nothing if none is close.

    *template* says how a name is typed:

    >>> near("8xh2O", ["8xh20", "loopback"], "hw={}")
    'did you mean hw=8xh20? '
    """
    found = difflib.get_close_matches(word, list(known), 1)
    return f"did you mean {template.format(found[0])}? " if found else ""


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
