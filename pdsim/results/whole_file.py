# SPDX-License-Identifier: Apache-2.0
"""Files that are there as a whole or not at all: pages, figures, timelines and profiles.

A full disk, Ctrl-C and SIGKILL leave what was there before under the file's name.  Runs have their own way
(`pdsim.results.store`): a folder that is marked incomplete until its last file is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from pdsim.core.errors import ConfigError

__all__ = ["whole_file"]


@contextmanager
def whole_file(path: Path, option: str = "-o") -> Iterator[IO[bytes]]:
    """Yield a file to write to, which is called *path* only when all of it is written.

    Raise a `ConfigError` that names *option*, which the path was given with, if it cannot be written.

    >>> from tempfile import mkdtemp
    >>> page = Path(mkdtemp(), "page.html")
    >>> with whole_file(page) as file:
    ...     written, there = file.write(b"a page"), page.exists()
    >>> there, page.read_bytes()
    (False, b'a page')
    """
    straight = path.exists() and not path.is_file()
    part = path if straight else path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            yield file
        if not straight:
            part.replace(path)
    except BaseException as error:
        if not straight and part.is_file():
            part.unlink()
        if isinstance(error, OSError):
            raise ConfigError(f"{path}: {error.strerror}; name a file that can be written with {option}") from error
        raise
