# SPDX-License-Identifier: Apache-2.0
"""Read Python source with `ast`, and count what says how easy a project is to enter.

Knows nothing about pdsim: packages are given by their folders, rooms and what they may import by tables.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

__all__ = ["GENERIC", "Import", "Module", "Room", "Source", "read"]

DOCUMENTED = ("_replace", "_fields", "_field_defaults", "_asdict", "_make", "_exit")
"""Names that begin with an underscore and are public: those of named tuples, and `os._exit`."""

GENERIC = ("__init__", "__main__", "conftest")
"""Names of files that say where they are, not what they hold."""


@dataclass(frozen=True)
class Room:
    """Modules, and the other rooms that they may import.

    *modules* are names with all that is below them, or after ``=`` one module alone; the longest
    name that fits a module counts.  *may* names rooms.
    """

    modules: tuple[str, ...]
    may: tuple[str, ...] = ()


@dataclass(frozen=True)
class Import:
    """That module *source* imports module *target*, both of the project."""

    source: str
    target: str
    line: int
    at_start: bool  # when the module is imported: neither within a function nor for type checkers only


@dataclass(frozen=True)
class Module:
    """One file."""

    name: str  # dotted
    path: Path
    text: str
    tree: ast.Module

    @property
    def package(self) -> str:
        """The dotted name of the package that it is in, itself if it is one."""
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]

    @cached_property
    def lines(self) -> list[str]:
        """Return its lines."""
        return self.text.splitlines()

    @cached_property
    def docstrings(self) -> list[tuple[int, int]]:
        """First and last line of the docstring of each module, class and function."""
        found = []
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                first = node.body[0] if node.body else None
                if (
                    isinstance(first, ast.Expr)
                    and isinstance(first.value, ast.Constant)
                    and isinstance(first.value.value, str)
                ):
                    found.append((first.lineno, first.end_lineno or first.lineno))
        return found

    @property
    def docstring_lines(self) -> int:
        """Number of lines of docstrings, blank ones within them included."""
        return sum(last - first + 1 for first, last in self.docstrings)

    @property
    def code_lines(self) -> int:
        """Number of lines that are neither blank, nor comments alone, nor of docstrings."""
        inside = {line for first, last in self.docstrings for line in range(first, last + 1)}
        return sum(
            bool(line.strip()) and not line.lstrip().startswith("#") and i not in inside
            for i, line in enumerate(self.lines, 1)
        )

    @cached_property
    def defined(self) -> frozenset[str]:
        """Private names that the module defines: functions, classes, variables, fields, attributes that it sets."""
        return frozenset(name for name in _defined(self.tree) if _private(name))

    def imported(self) -> Iterator[tuple[str, str | None, int, bool]]:
        """Yield (module, name or None, line, whether at start) of each import, relative ones resolved."""
        for node, at_start in _imports(self.tree.body, at_start=True):
            if isinstance(node, ast.Import):
                yield from ((alias.name, None, node.lineno, at_start) for alias in node.names)
            else:
                parts = self.package.split(".")
                base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
                module = ".".join(part for part in (base, node.module) if part)
                yield from ((module, alias.name, node.lineno, at_start) for alias in node.names)


def _private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name.strip("_") != ""


def _defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _own(node.value):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value  # as in __slots__


def _own(node: ast.AST) -> bool:
    """Whether *node* is the object, or the class, whose method this is."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in ("super", "type")
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _attributes(module: Module) -> Iterator[ast.Attribute]:
    """Yield each private attribute of anything but ``self``, ``cls``, ``super()`` and ``type()``."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and _private(node.attr) and not _own(node.value):
            yield node


def _imports(body: Iterable[ast.AST], *, at_start: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for node in body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node, at_start
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from _imports(ast.iter_child_nodes(node), at_start=False)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _imports(node.body, at_start=False)
            yield from _imports(node.orelse, at_start=at_start)
        else:
            yield from _imports(ast.iter_child_nodes(node), at_start=at_start)


def read(root: Path, packages: Sequence[str], without: Sequence[str] = ()) -> Source:
    """Read all modules of *packages*, folders in *root*; parts of a path that are *without* are left out.

    Raises:
        FileNotFoundError: a package is not there.
    """
    modules = {}
    for package in packages:
        if not (root / package).is_dir():
            raise FileNotFoundError(f"{root} has no package {package}; say where its source is")
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            if not set(parts) & set(without):
                name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                text = path.read_text()
                modules[name] = Module(name, path, text, ast.parse(text))
    return Source(modules)


class Source:
    """The modules of a project, by name, and what is counted of them.  Lists are sorted."""

    def __init__(self, modules: Mapping[str, Module]) -> None:
        self.modules = modules

    @cached_property
    def imports(self) -> list[Import]:
        """Every import of one module of the project by another, once for each pair and kind."""
        found: dict[tuple[str, str, bool], Import] = {}
        for module in self.modules.values():
            for target, name, line, at_start in module.imported():
                inner = f"{target}.{name}"
                hit = inner if inner in self.modules else target
                if hit in self.modules and hit != module.name:
                    found.setdefault((module.name, hit, at_start), Import(module.name, hit, line, at_start))
        return sorted(found.values(), key=lambda i: (i.source, i.target, i.line))

    def circles(self, *, lazy: bool = False) -> list[list[str]]:
        """Return the groups of modules that import each other, at their start or, *lazy*, ever."""
        graph: dict[str, set[str]] = defaultdict(set)
        for edge in self.imports:
            if edge.at_start or lazy:
                graph[edge.source].add(edge.target)
        reach = {name: _reached(name, graph) for name in self.modules}
        groups = {tuple(sorted(o for o in reach[n] if n in reach[o])) for n in self.modules if n in reach[n]}
        return sorted(list(group) for group in groups)

    def arrows_up(self, rooms: Mapping[str, Room]) -> list[Import]:
        """Return the imports that *rooms* does not allow, once for each pair of modules.

        Raises:
            ValueError: a module is in no room.
        """
        homes = {name: _home(name, rooms) for name in self.modules}
        pairs: dict[tuple[str, str], Import] = {}
        for edge in self.imports:
            home, other = homes[edge.source], homes[edge.target]
            if home != other and other not in rooms[home].may:
                pairs.setdefault((edge.source, edge.target), edge)
        return [pairs[key] for key in sorted(pairs)]

    def private_of_others(self) -> dict[str, list[str]]:
        """Return, by module, ``line: x._name`` of each private attribute of all but ``self``, ``cls`` or super."""
        found = {
            module.name: sorted((node.lineno, ast.unparse(node)) for node in _attributes(module))
            for module in self.modules.values()
        }
        return {name: [f"{line}: {text}" for line, text in hits] for name, hits in found.items() if hits}

    def foreign_private(self) -> dict[str, list[str]]:
        """Return those of `private_of_others` that no module of the same package defines, and imports of such names.

        Whose name it is, is told by the name alone: one that the package defines, too, is not counted.
        """
        defined: dict[str, set[str]] = defaultdict(set)
        for module in self.modules.values():
            defined[module.package] |= module.defined
        found: dict[str, list[str]] = {}
        for module in self.modules.values():
            known = defined[module.package]
            hits = [
                (node.lineno, ast.unparse(node))
                for node in _attributes(module)
                if node.attr not in {*known, *DOCUMENTED}
            ]
            hits += [
                (line, f"{target}.{name}")
                for target, name, line, _ in module.imported()
                if name is not None
                and _private(name)
                and name not in known
                and f"{target}.{name}" not in self.modules
            ]
            if hits:
                found[module.name] = [f"{line}: {text}" for line, text in sorted(hits)]
        return found

    def one_importer(self) -> list[str]:
        """Return the modules that exactly one other module imports."""
        importers: dict[str, set[str]] = defaultdict(set)
        for edge in self.imports:
            importers[edge.target].add(edge.source)
        return sorted(name for name, sources in importers.items() if len(sources) == 1)

    def class_names(self) -> dict[str, list[str]]:
        """Return the names of classes at the top of several modules, with the modules."""
        where: dict[str, list[str]] = defaultdict(list)
        for module in self.modules.values():
            for node in module.tree.body:
                if isinstance(node, ast.ClassDef):
                    where[node.name].append(module.name)
        return {name: found for name, found in sorted(where.items()) if len(found) > 1}

    def module_names(self) -> list[str]:
        """Return the names of files that occur more than once."""
        names = Counter(m.path.stem for m in self.modules.values() if m.path.stem not in GENERIC)
        return sorted(name for name, count in names.items() if count > 1)

    def heavy(self, libraries: Sequence[str]) -> list[str]:
        """Return ``module:line library`` of each of *libraries* that a module imports at its start."""
        return sorted(
            f"{module.name}:{line} {target}"
            for module in self.modules.values()
            for target, _, line, at_start in module.imported()
            if at_start and target.split(".")[0] in libraries
        )

    def long_lines(self, most: int) -> list[str]:
        """Return ``module:line`` of each line of more than *most* characters."""
        return [
            f"{m.name}:{i}" for m in self.modules.values() for i, line in enumerate(m.lines, 1) if len(line) > most
        ]

    def files(self) -> dict[str, int]:
        """Return the lines of each file."""
        return {name: len(module.lines) for name, module in self.modules.items()}

    def methods(self) -> dict[str, int]:
        """Return the methods of each class, by ``module.Class``."""
        return {
            f"{module.name}.{node.name}": sum(
                isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)) for n in node.body
            )
            for module in self.modules.values()
            for node in ast.walk(module.tree)
            if isinstance(node, ast.ClassDef)
        }


def _reached(start: str, graph: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    todo = list(graph.get(start, ()))
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo.extend(graph.get(name, ()))
    return seen


def _home(name: str, rooms: Mapping[str, Room]) -> str:
    fitting = {
        prefix: room
        for room, content in rooms.items()
        for prefix in content.modules
        if f"={name}" == prefix or f"{name}.".startswith(f"{prefix}.")
    }
    if not fitting:
        raise ValueError(f"{name} is in none of the rooms {', '.join(rooms)}; name it in benchmarks/house.py")
    return fitting[max(fitting, key=len)]
