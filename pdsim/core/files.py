# SPDX-License-Identifier: Apache-2.0
"""Files of somebody else are regular, bounded, and print nothing but text; those that are written here are whole.

The former are opened here: by `regular` to be read line by line, by `whole`, `text` and `given` at once, by
`yaml_text` as YAML, by `table` as CSV.  A file that is refused is an `OSError`, as one that cannot be read is.
`whole_file` and `write_table` write.  `data` is where a checkout keeps its committed measurements.
"""

import csv
import errno
import gzip
import io
import os
import re
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import IO, Any

from pdsim.core.errors import ConfigError

_WHOLE = 256 << 20
"""Bytes of a file that is read at once."""

_YAML, _VALUES, _DEEP = 256 << 10, 20_000, 60
"""Bytes of a YAML file, its values with aliases written out, and its levels.  The largest of pdsim has 20 KiB."""

_HIDDEN = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_].*?(?:\x07|\x1b\\|$)|[ -/]*[0-~])?"  # what a terminal takes for a command
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f]|[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]",  # controls, and order of text
    re.DOTALL,
)


def regular(path: str, flags: int) -> int:
    """Open *path* for `open`, as its *opener*.  Raise an `OSError` for a pipe, which may wait, or a device."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def whole(path: Path, most: int = _WHOLE) -> bytes:
    """Return the bytes of *path*, unpacked if its name ends in ``.gz``.

    Raise an `OSError` if it has more than *most*, is not a regular file, or cannot be unpacked.
    """
    with open(path, "rb", opener=regular) as file:
        too_large = OSError(errno.EFBIG, f"larger than {most >> 10} KiB", str(path))
        if os.fstat(file.fileno()).st_size > most:
            raise too_large
        if path.suffix != ".gz":
            return file.read()
        try:
            content = gzip.GzipFile(fileobj=file).read(most + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise OSError(errno.EINVAL, f"not a gzip file ({error})", str(path)) from error
        if len(content) > most:
            raise too_large
        return content


def text(path: Path, most: int = _WHOLE) -> str:
    """Return the text of *path*, UTF-8 with any line endings and with or without a byte order mark.

    Raise as `whole`, and a `UnicodeDecodeError`.
    """
    return whole(path, most).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")


def given(path: Path, way_out: str, key: str = "") -> str:
    """Return the text of *path*, which a user named; raise a `ConfigError` that ends in *way_out* if it has none.

    *key* is what the path was given with, such as ``workload.trace=``.
    """
    try:
        return text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}{path}: {getattr(error, 'strerror', None) or error}; {way_out}") from error


def table(path: Path, way_out: str) -> tuple[dict[str, str], list[dict[str, str]]]:
    """Return what the comments of the CSV file *path* say, ``# key: value``, and its rows by column.

    Raise a `ConfigError` that ends in *way_out* if it cannot be read, or has no rows.
    """
    lines = given(path, way_out).splitlines()
    try:
        rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    except csv.Error as error:
        raise ConfigError(f"{path}: {error}; {way_out}") from error
    if not rows:
        raise ConfigError(f"{path} has no rows; {way_out}")
    comments = (line[1:].partition(": ") for line in lines if line.startswith("#"))
    return {key.strip(): value.strip() for key, colon, value in comments if colon}, rows


@contextmanager
def whole_file(path: Path, option: str = "-o") -> Iterator[IO[bytes]]:
    """Yield a file to write to, which is renamed to *path* once all of it is written.

    Raise a `ConfigError` that names *option*, which the path was given with, if it cannot be written.

    >>> from tempfile import mkdtemp
    >>> page = Path(mkdtemp(), "page.html")
    >>> with whole_file(page) as file:
    ...     written, there = file.write(b"a page"), page.exists()
    >>> there, page.read_bytes()
    (False, b'a page')
    """
    straight = path.exists() and not path.is_file()  # /dev/stdout
    part = path if straight else path.with_name(f"{path.name}.{os.getpid()}.part")
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


def write_table(
    path: Path,
    columns: Sequence[str],
    rows: Iterable[Iterable[Any]],
    about: Mapping[str, object] | None = None,
    option: str = "--to",
) -> None:
    """Write the CSV file *path* as `table` reads it: *about* as comments, then *columns* and *rows*.

    Raise as `whole_file`.
    """
    text = io.StringIO()
    text.writelines(f"# {key}: {value}\n" for key, value in (about or {}).items())
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    with whole_file(path, option) as file:
        file.write(text.getvalue().encode())


def yaml_text(path: Path) -> str:
    """Return the text of the YAML file *path*.  Raise as `bounded_yaml`; a file that is too large is one, too."""
    try:
        return bounded_yaml(text(path, _YAML), str(path))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name another file") from error


@lru_cache(1)  # what ends a run reads its configuration several times
def bounded_yaml(content: str, name: str) -> str:
    """Return *content*, YAML that is called *name*, if it is small also with its aliases written out.

    Raise a `ConfigError` if it is not, or lies deeper than parsers go; and PyYAML's error if it is not YAML.
    """
    import yaml  # type: ignore[import-untyped]  # comes with OmegaConf, its stubs do not

    sizes: dict[str | None, float] = {}  # values by anchor
    nodes: list[tuple[str | None, float]] = [(None, 0)]  # from the document inwards: anchor, and values so far
    for event in yaml.parse(content, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.CollectionStartEvent):
            sizes[event.anchor] = inf  # should it contain itself
            nodes.append((event.anchor, 1))
        elif isinstance(event, yaml.CollectionEndEvent | yaml.NodeEvent):
            anchor, size = nodes.pop() if isinstance(event, yaml.CollectionEndEvent) else (event.anchor, 1)
            sizes[anchor] = size = sizes.get(anchor, 1) if isinstance(event, yaml.AliasEvent) else size
            nodes[-1] = nodes[-1][0], nodes[-1][1] + size
        if nodes[-1][1] > _VALUES or len(nodes) > _DEEP:
            what = f"has more than {_VALUES} values, aliases written out" if len(nodes) <= _DEEP else "lies too deep"
            raise ConfigError(f"{name} {what}; shorten it, or name another file")
    return content


def printable(text: str) -> str:
    r"""Return *text* without what a terminal obeys: escape sequences, controls but tab and newline, bidi marks.

    >>> printable("\x1b[31mred\x1b[0m \u202etxt\r")
    'red txt'
    """
    return _HIDDEN.sub("", text) if not text.isprintable() else text


def shown(word: str) -> str:
    r"""Return *word* of a command line for a message of one line: as it is, or quoted with its escapes.

    >>> shown("hw=8xh20"), shown("hw=8xh20\n")
    ('hw=8xh20', "'hw=8xh20\\n'")
    """
    return word if word.isprintable() else repr(word)


def data(*parts: str) -> Path:
    """Return the path of *parts* below ``data/`` of the checkout; from a wheel it does not exist."""
    return Path(__file__).resolve().parents[2].joinpath("data", *parts)
