# SPDX-License-Identifier: Apache-2.0
"""What modules that mypyc compiles (`hatch_build.py`) say to it; in pure Python it says nothing.

`mypyc_attr` is mypyc's own decorator, for which pdsim needs no package at run time.  With
``allow_interpreted_subclasses=True`` a compiled class may be derived from in Python, whose methods are then called
in its place.  A compiled class has one compiled base, and its ``super()`` is that base, whatever is derived from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["mypyc_attr"]

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr
else:

    def mypyc_attr(**_):
        """Return a decorator that leaves a class as it is."""
        return lambda cls: cls
