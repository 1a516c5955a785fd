"""Imports point down the table of rooms, nothing runs in circles, heavy libraries load late, classes stay flat."""

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT, PRODUCT = Path(__file__).resolve().parents[1], ("pdsim", "backends", "experiments")
ROOMS = """
waist: pdsim.core pdsim.hardware pdsim.transfer pdsim.version >
sim: pdsim.sim > waist
kv: pdsim.kv > waist
models: pdsim.models > waist
compute: pdsim.compute > kv models waist
verify: pdsim.verify > serving kv sim waist
serving: pdsim.serving > kv compute models waist
recipes: pdsim.recipes > kv models waist
records: pdsim.results.(record|schema) > waist face
calibration: pdsim.calibration > records compute models waist
config: pdsim.config > calibration serving kv compute models waist
composition: pdsim.config.(compose|pools|rules) > registry live config serving kv compute calibration models waist
results: pdsim.results > records config calibration waist face
validation: pdsim.validation > results records config calibration waist
execution: pdsim.run > registry live sim verify composition results records config waist
sweep: pdsim.sweep > execution face results records config waist
cli: pdsim.cli > recipes face registry live profiling composition ALL
face: pdsim$ pdsim.__main__ > cli composition ALL
registry: backends.(registry|capabilities|diagnosis|host_speed|jobs|emulation) > backends waist
backends: backends > registry waist
profiling: backends.profiling > compute models waist
testing: pdsim.testing > registry kv sim waist
live: backends.live > registry config serving compute models waist
experiments: experiments > live composition ALL
"""  # from the ground up: packages or modules > rooms that they may import
ALL = "sweep execution validation results config calibration records serving verify kv compute models sim waist"
HEAVY = "torch triton zmq mooncake nixl nixl_cu12 nixl_cu13 mori pyarrow plotly matplotlib ray scipy"


@cache
def trees() -> dict[str, ast.Module]:
    paths = [path.relative_to(ROOT) for top in PRODUCT for path in (ROOT / top).rglob("*.py")]
    names = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return {name: ast.parse((ROOT / path).read_text("utf-8")) for name, path in zip(names, paths, strict=True)}


def imported(node: ast.AST, late: bool = True) -> set[str]:
    """Return what *node* imports; *late* counts functions and blocks for type checkers."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
        return {name if name in trees() else str(node.module) for name in names}
    if not late and (isinstance(node, ast.FunctionDef) or "TYPE_CHECKING" in ast.dump(node)[:60]):
        return set()
    return {name for child in ast.iter_child_nodes(node) for name in imported(child, late)}


def test_rooms_import_only_what_the_table_allows_without_circles():
    lines = [line.replace("ALL", ALL).replace(":", " >").split(" >") for line in ROOMS.strip().splitlines()]
    may = {name: {name, *rooms.split()} for name, _, rooms in lines}
    own = [(re.compile(rf"{part}(?=[.]|$)"), name) for name, parts, _ in lines for part in parts.split()]
    home = {each: max((m.end(), name) for part, name in own if (m := part.match(each)))[1] for each in trees()}
    graph = {name: (imported(tree) & trees().keys()) - {name} for name, tree in trees().items()}
    assert [(a, b) for a, others in graph.items() for b in others if home[b] not in may[home[a]]] == []
    TopologicalSorter(graph).prepare()  # raises a CycleError for modules that import each other


def test_pdsim_imports_heavy_libraries_late():
    pdsim = [name for name in trees() if name.startswith("pdsim")]
    found = {(name, other.partition(".")[0]) for name in pdsim for other in imported(trees()[name], late=False)}
    assert [(name, other) for name, other in found if other in HEAVY.split()] == []


def test_classes_are_flat_and_small():
    every = [node for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    bases = {n.name: {ast.unparse(b).partition("[")[0].rpartition(".")[2] for b in n.bases} for n in every}
    own = {node.name: {each.name for each in node.body if isinstance(each, ast.FunctionDef)} for node in every}

    def chains(name: str) -> list[list[str]]:
        return [[name, *up] for base in bases[name] & own.keys() - {name} for up in chains(base)] or [[name]]

    assert [name for name in own if max(map(len, chains(name))) > 3] == []
    assert [name for name in own if len({m for up in chains(name) for each in up for m in own[each]}) > 40] == []


def test_no_file_is_too_long():
    files = [path for top in (*PRODUCT, "benchmarks", "tools", "tests") for path in (ROOT / top).rglob("*.py")]
    assert [path for path in files if len(path.read_text("utf-8").splitlines()) > 700] == []
