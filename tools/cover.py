# SPDX-License-Identifier: Apache-2.0
"""Record which test runs which line of `pdsim/`, and choose the tests for a line.

What a fixture of a wider scope runs counts for every test that uses the fixture.  Tests that fail or are skipped do
not count.  Times are CPU seconds under coverage, so that a busy machine does not change a choice.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coverage
import pytest

from tools.mutants import ROOT, Site


def record(tests: list[str], path: Path) -> None:
    """Run all tests once, and write to *path* which test runs which line."""
    plugin = CoverPlugin()
    plugin.coverage.start()
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-o", "timeout=600", "--hypothesis-profile=ci"]
    pytest.main([*options, "--continue-on-collection-errors", *tests], plugins=[plugin])
    plugin.coverage.stop()
    plugin.save(path)


class Cover:
    """Which tests run which line, and how long each takes."""

    def __init__(self, path: Path):
        content = json.loads(path.read_text())
        self.seconds: dict[str, float] = content["tests"]
        self._names = list(self.seconds)
        self._lines: dict[str, dict[str, list[int]]] = content["lines"]

    def tests(self, site: Site) -> set[str]:
        """Return the tests that run a line of *site*."""
        lines = self._lines.get(site.file, {})
        return {self._names[number] for line in site.lines for number in lines.get(str(line), ())}

    def chosen(self, site: Site, budget: float, first: str = "") -> list[str]:
        """Return the tests to run: *first*, then the closest and quickest, as long as they fit; by file."""
        stem, room = Path(site.file).stem, Path(site.file).parts[1]

        def order(test: str) -> tuple[bool, bool, bool, float]:
            path = test.partition("::")[0]
            return _bare(test) != _bare(first), stem not in path, f"/{room}/" not in path, self.seconds[test]

        left = budget
        files: dict[str, list[str]] = defaultdict(list)
        for test in sorted(self.tests(site), key=order):
            if files and self.seconds[test] > left:
                continue
            left -= self.seconds[test]
            files[test.partition("::")[0]].append(test)
        return [test for tests in files.values() for test in tests]


class CoverPlugin:
    """A pytest plugin: a context of coverage for each test, and one for each fixture that tests share."""

    def __init__(self) -> None:
        self.coverage = coverage.Coverage(data_file=None, source=[str(ROOT / "pdsim")], config_file=False)
        self._contexts = ["start"]
        self._users: dict[str, set[str]] = defaultdict(set)
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()

    def _enter(self, context: str) -> None:
        self._contexts.append(context)
        self.coverage.switch_context(context)

    def _leave(self) -> None:
        self._contexts.pop()
        self.coverage.switch_context(self._contexts[-1])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Measure a test."""
        for name in getattr(item, "fixturenames", ()):
            self._users[name].add(item.nodeid)
        start = time.process_time()
        self._enter(item.nodeid)
        try:
            return (yield)
        finally:
            self._leave()
            self.seconds[item.nodeid] = time.process_time() - start

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        """Measure what several tests share for all of them."""
        if fixturedef.scope == "function":
            return (yield)
        self._enter(f"fixture {fixturedef.argname} {fixturedef.baseid}")
        try:
            return (yield)
        finally:
            self._leave()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember tests that fail or are skipped."""
        if report.outcome != "passed":
            self.failed.add(report.nodeid)

    def tests(self, context: str) -> set[str]:
        """Return the tests of *context*."""
        if context.startswith("fixture "):
            _, name, base = context.split(" ", 2)
            return {test for test in self._users[name] if test.startswith(base)} - self.failed
        return {context} & self.seconds.keys() - self.failed

    def save(self, path: Path) -> None:
        """Write what `Cover` reads."""
        passed = {test: round(s, 3) for test, s in self.seconds.items() if test not in self.failed}
        number = {test: index for index, test in enumerate(passed)}
        data, lines = self.coverage.get_data(), {}
        for file in data.measured_files():
            contexts = {c: {number[t] for t in self.tests(c)} for c in {*_contexts(data, file)}}
            lines[Path(file).relative_to(ROOT).as_posix()] = {
                line: sorted(set().union(*(contexts[c] for c in names)))
                for line, names in data.contexts_by_lineno(file).items()
            }
        path.write_text(json.dumps({"tests": passed, "lines": lines}, separators=(",", ":")))


def _contexts(data: Any, file: str) -> Iterator[str]:
    for names in data.contexts_by_lineno(file).values():
        yield from names


def _bare(test: str) -> str:
    return test.partition("::")[2]  # its file may have moved
