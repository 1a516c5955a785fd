# SPDX-License-Identifier: Apache-2.0
"""List the small changes of a source file that a test should notice, and find one again in a later state of it.

`sites` yields all changes of a file.  A mutant names its statement by text, not by line, so that `locate` finds it
after files were merged, moved or renamed.  Five operators make them:

- *condition*: a comparison or a test is turned round, moved to its boundary, or has `and` and `or` exchanged
- *drop call*: a statement that calls something does nothing
- *skip release*: the same, of a call that gives something back (free, release, close, settle ...)
- *off by one*: a small number, a length or the end of a range is one too high
- *reorder*: two adjacent statements that call change places

What speaks to people (log lines, texts of errors, `__repr__`) is left alone.
"""

from __future__ import annotations

import ast
import difflib
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OPERATORS = ("condition", "drop call", "off by one", "reorder", "skip release")
RELEASE = re.compile(
    "free|release|close|settle|cancel|discard|remove|clear|abort|withdraw|unregister|quiesce|expire"
)
SPEECH = {"log", "logger", "logging", "warnings", "print"}
SILENT = {"__repr__", "__str__", "__del__"}
SWAPS: dict[type[ast.AST], type[Any]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


@dataclass
class Mutant:
    """A change of one statement, and what became of it."""

    file: str
    function: str  # with the names of its classes
    operator: str
    statement: str  # of a compound statement the first line
    occurrence: int  # among equal statements of the function
    site: int  # among the sites of this operator in the statement
    replacement: str
    near: str  # the statements before and after, without receivers
    outcome: str = ""  # killed, timeout, survived, gone, unreached, error
    by: str = ""  # the test that failed
    how: str = ""  # how `again` found it

    @property
    def room(self) -> str:
        """The folder that holds its file: one of `ROOMS`, or another one that took the statement over."""
        return "/".join(self.file.split("/")[:2])

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells it from all other mutants of one state of the source."""
        return self.file, self.function, self.operator, self.statement, self.occurrence, self.site


@dataclass
class Site(Mutant):
    """A mutant of the source as it is, with the lines of the statement and the change itself."""

    lines: range = range(0)
    apply: Callable[[], None] = field(default=lambda: None, repr=False)

    def mutant(self) -> Mutant:
        """Return what is kept of it."""
        return Mutant(*(getattr(self, name) for name in Mutant.__dataclass_fields__))


@functools.cache
def bare(statement: str) -> str:
    """Return *statement* without receivers of attributes and without leading underscores."""
    try:
        tree = ast.parse(statement + " pass" if statement.endswith(":") else statement)
    except SyntaxError:  # match, for which a pass is not enough
        return statement

    class Strip(ast.NodeTransformer):
        def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
            return ast.Name(node.attr.lstrip("_"))

    return ast.unparse(Strip().visit(tree))


def sites(file: str, source: str) -> tuple[ast.Module, list[Site]]:
    """Return the tree of *source*, and every change of it that an operator makes."""
    tree = ast.parse(source)
    result: list[Site] = []
    for function, node in _functions(tree, ""):
        seen: Counter[str] = Counter()
        for body, index in _places(node.body):
            statement = body[index]
            text = _text(statement)
            around = [body[i] for i in (index - 1, index + 1) if 0 <= i < len(body) and not _is_docstring(body[i])]
            near = " | ".join(bare(_text(other))[:60] for other in around)
            numbers: Counter[str] = Counter()
            for operator, shown, replacement, apply in _changes(body, index):
                whole = shown or text
                result.append(
                    Site(
                        file, function, operator, whole, seen[text], numbers[operator], replacement, near,
                        lines=_lines(statement), apply=apply,
                    )
                )  # fmt: skip
                numbers[operator] += 1
            seen[text] += 1
    return tree, result


def _functions(node: ast.AST, name: str) -> Iterator[tuple[str, Any]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{name}.{child.name}".lstrip(".")
            if not isinstance(child, ast.ClassDef) and child.name not in SILENT:
                yield inner, child
            yield from _functions(child, inner)
        elif isinstance(child, ast.stmt):
            yield from _functions(child, name)


def _places(body: list[ast.stmt]) -> Iterator[tuple[list[ast.stmt], int]]:
    for index, statement in enumerate(body):
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        yield body, index
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            continue
        for name in ("body", "orelse", "finalbody"):
            yield from _places(getattr(statement, name, []))
        for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
            yield from _places(part.body)


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _text(statement: ast.stmt) -> str:
    return ast.unparse(statement).partition("\n")[0]


def _lines(statement: ast.stmt) -> range:
    body = getattr(statement, "body", None) or getattr(statement, "cases", None)
    end = (getattr(body[0], "lineno", 0) or statement.lineno + 1) if body else (statement.end_lineno or 0) + 1
    return range(statement.lineno, max(end, statement.lineno + 1))


def _changes(body: list[ast.stmt], index: int) -> Iterator[tuple[str, str, str, Callable[[], None]]]:
    statement = body[index]
    call = _call(statement)
    if isinstance(statement, ast.Raise | ast.Assert) or _root(call) in SPEECH:
        return
    if isinstance(statement, ast.Expr) and call is not None:
        simple = isinstance(statement.value, ast.Call)
        nothing = ast.Pass() if simple else ast.parse("yield from ()").body[0]
        kind = "skip release" if RELEASE.search(_name(call)) else "drop call"
        yield kind, "", _text(nothing), functools.partial(body.__setitem__, index, nothing)
    if index + 1 < len(body) and call is not None and _acts(statement) and _acts(second := body[index + 1]):
        one, two = _text(statement), _text(second)
        if one != two and _call(second) is not None and _root(_call(second)) not in SPEECH:
            pair = [second, statement]
            swap = functools.partial(body.__setitem__, slice(index, index + 2), pair)
            yield "reorder", f"{one} ; {two}", f"{two} ; {one}", swap
    for parent, name, place, node in _expressions(statement):
        yield from _expression_changes(parent, name, place, node)


def _call(statement: ast.stmt) -> ast.Call | None:
    value = getattr(statement, "value", None)
    if isinstance(value, ast.Yield | ast.YieldFrom | ast.Await):
        value = value.value
    return value if isinstance(value, ast.Call) else None


def _name(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def _root(call: ast.Call | None) -> str:
    return "" if call is None else ast.unparse(call.func).partition(".")[0]


def _acts(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Assign):
        return isinstance(statement.targets[0], ast.Attribute | ast.Subscript)
    return isinstance(statement, ast.Expr)


def _expressions(node: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, ast.expr]]:
    for name, value in ast.iter_fields(node):
        for place, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.comprehension | ast.keyword | ast.withitem):
                yield from _expressions(child)
            elif isinstance(child, ast.expr) and not isinstance(child, ast.JoinedStr) and name != "annotation":
                yield node, name, place, child
                yield from _expressions(child)


def _expression_changes(
    parent: ast.AST, name: str, place: int | None, node: ast.expr
) -> Iterator[tuple[str, str, str, Callable[[], None]]]:
    def put(new: ast.expr) -> Callable[[], None]:
        if place is None:
            return functools.partial(setattr, parent, name, new)
        return functools.partial(getattr(parent, name).__setitem__, place, new)

    new: ast.expr
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        new = ast.Compare(node.left, [SWAPS[type(node.ops[0])]()], node.comparators)
        yield "condition", "", ast.unparse(new), put(new)
    elif isinstance(node, ast.BoolOp):
        new = ast.BoolOp(SWAPS[type(node.op)](), node.values)
        yield "condition", "", ast.unparse(new), put(new)
    elif name == "ifs" or (name == "test" and isinstance(parent, ast.If | ast.IfExp)):
        new = node.operand if isinstance(node, ast.UnaryOp) else ast.UnaryOp(ast.Not(), node)
        yield "condition", "", ast.unparse(new), put(new)
    elif isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) <= 8:
        new = ast.Constant(node.value + 1)
        yield "off by one", "", ast.unparse(new), put(new)
    elif isinstance(node, ast.Call) and _name(node) in ("range", "len") and node.args:
        more = ast.BinOp(node if _name(node) == "len" else node.args[-1], ast.Add(), ast.Constant(1))
        new = more if _name(node) == "len" else ast.Call(node.func, [*node.args[:-1], more], node.keywords)
        yield "off by one", "", ast.unparse(new), put(new)


def everything(rooms: tuple[str, ...]) -> list[Site]:
    """Return the sites of all files of *rooms*."""
    files = sorted(path for room in rooms for path in (ROOT / room).rglob("*.py"))
    return [site for p in files for site in sites(p.relative_to(ROOT).as_posix(), p.read_text(encoding="utf-8"))[1]]


def locate(mutant: Mutant, candidates: list[Site]) -> tuple[Site | None, str]:
    """Return the site of *mutant* among the *candidates*, and how it was found; None if its statement is gone."""
    last = mutant.function.rpartition(".")[2].lstrip("_")
    text, plain = mutant.statement, bare(mutant.statement)
    same = [s for s in candidates if s.operator == mutant.operator and s.site == mutant.site]
    named = [s for s in same if s.function.rpartition(".")[2].lstrip("_") == last]
    housed = [s for s in same if s.room == mutant.room]
    tiers: dict[str, Callable[[], list[Site]]] = {
        "same": lambda: [s for s in named if s.function == mutant.function and s.statement == text],
        "function": lambda: _alike(mutant, [s for s in named if s.statement == text], 0.3),
        "bare function": lambda: _alike(mutant, [s for s in named if bare(s.statement) == plain], 0.3),
        "text": lambda: _alike(mutant, [s for s in same if s.statement == text]),
        "bare": lambda: _alike(mutant, [s for s in same if bare(s.statement) == plain] + _calls(plain, housed)),
        "like": lambda: [s for s in named if _ratio(bare(s.statement), plain) >= 0.75],
        "call": lambda: _alike(mutant, _calls(plain, named), 0.3),
        "like text": lambda: [s for s in same if len(plain) > 40 and _ratio(bare(s.statement), plain) >= 0.85],
    }

    def likeness(site: Site) -> tuple[bool, bool, float, bool]:
        likely = _ratio(site.near, mutant.near) + _ratio(bare(site.statement), plain)
        file, function = site.file == mutant.file, site.function == mutant.function
        return file, function, likely, site.occurrence == mutant.occurrence

    for how, places in tiers.items():
        if options := places():
            exact = [s for s in options if s.key == mutant.key]
            return (exact or [max(options, key=likeness)])[0], how
    return None, "gone"


def _calls(statement: str, options: list[Site]) -> list[Site]:
    options = [s for s in options if s.operator in ("drop call", "skip release")]
    return [s for s in options if bare(s.statement).partition("(")[0] == statement.partition("(")[0]]


def _ratio(one: str, two: str) -> float:
    return difflib.SequenceMatcher(None, one, two).ratio()


def _alike(mutant: Mutant, options: list[Site], least: float = 0.5) -> list[Site]:
    if len(options) == 1 and len(bare(mutant.statement)) > 40:
        return options
    return [s for s in options if _ratio(s.near, mutant.near) >= least]
