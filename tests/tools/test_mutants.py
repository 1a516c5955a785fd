"""Mutants are small, and are found again after the source changes."""

import ast

import pytest

from tools.mutants import locate, sites

SOURCE = '''
class Pool:
    def take(self, count):
        """Take 3 pages."""
        if count > len(self._free) or not count:
            raise ValueError(f"{count + 1} pages")
        pages = self._free[1:]
        self._used.add(count)
        self._waiting.release(count)
        log.info("taken")
        return pages
'''


def mutants(source=SOURCE, file="pdsim/kv/pool.py"):
    return sites(file, source)[1]


def test_each_operator_changes_its_statement():
    assert [(m.operator, m.statement, m.replacement) for m in mutants()] == [
        ("condition", "if count > len(self._free) or not count:", "count > len(self._free) and (not count)"),
        ("condition", "if count > len(self._free) or not count:", "count >= len(self._free)"),
        ("off by one", "if count > len(self._free) or not count:", "len(self._free) + 1"),
        ("off by one", "pages = self._free[1:]", "2"),
        ("drop call", "self._used.add(count)", "pass"),
        (
            "reorder",
            "self._used.add(count) ; self._waiting.release(count)",
            "self._waiting.release(count) ; self._used.add(count)",
        ),
        ("skip release", "self._waiting.release(count)", "pass"),
    ]


@pytest.mark.parametrize("number", range(7))
def test_a_mutant_differs_from_the_source_in_its_statement(number):
    tree, every = sites("pool.py", SOURCE)
    every[number].apply()
    before, after = ast.unparse(ast.parse(SOURCE)).splitlines(), ast.unparse(tree).splitlines()
    changed = [line for line in before if line not in after] or sorted(before)
    assert len(before) == len(after)
    assert len(changed) == (len(before) if every[number].operator == "reorder" else 1)


@pytest.mark.parametrize(
    ("old", "new", "how"),
    [
        ("", "", "same"),
        ("class Pool", "class Store", "function"),
        ("self._", "self.memory.", "bare function"),
        ("def take", "def reserve", "text"),
        (
            "count)\n        self._waiting.release(count)",
            "count)\n        self._waiting.release(count, now)",
            "like",
        ),
        ("        self._waiting.release(count)\n", "", "gone"),
    ],
)
def test_a_mutant_is_found_in_a_later_source(old, new, how):
    site, tier = locate(mutants()[-1].mutant(), mutants(SOURCE.replace(old, new) if old else SOURCE, "moved.py"))
    assert (tier, site is None) == (how, how == "gone")
