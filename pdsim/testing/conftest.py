# SPDX-License-Identifier: Apache-2.0
"""Runs each test of the suite on each implementation in turn."""

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

import pytest

from backends.emulation.guest.machine import PATIENCE as GUEST_PATIENCE
from pdsim.core import plugins
from pdsim.testing import cases
from pdsim.testing.cases import MODELS, Case
from pdsim.testing.programs.tools import PATIENCE
from pdsim.transfer.job import Outcome, RankResult, RankSpec, Target

Job = Callable[..., Outcome]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give tests of `job`, `real` and `gathering` what there is, or what ``--backend`` and ``--collective`` name."""
    backend, collective = metafunc.config.getoption("backend"), metafunc.config.getoption("collective")
    outside = metafunc.definition.get_closest_marker("not_in_guest") is not None
    if "job" in metafunc.fixturenames:
        chosen = [] if collective else [case for case in _chosen(backend) if not (outside and case.guest)]
        if "real" in metafunc.fixturenames:
            chosen = [case for case in chosen if case.memory != "model"]
        params = [pytest.param(case, id=case.name, marks=_marks(case)) for case in chosen]
        metafunc.parametrize("job", params, indirect=True)
    if "gathering" in metafunc.fixturenames:
        known = (*MODELS, *plugins.names(plugins.COLLECTIVES))
        if collective and collective not in known:
            raise pytest.UsageError(f"--collective={collective} is not installed; there are {', '.join(known)}")
        every = [collective] if collective else MODELS if backend == "model" else () if backend else known
        metafunc.parametrize("gathering", every, indirect=True)


def _chosen(backend: str | None) -> list[Case]:
    every = cases.cases()
    if not backend:
        return list(every)
    if backend == "model":
        return [case for case in every if case.memory == "model"]
    if chosen := [case for case in every if backend in (case.backend, case.implementation)]:
        return chosen
    if backend in plugins.names(plugins.BACKENDS):
        plugins.resolve(plugins.BACKENDS, backend)  # raises: it cannot be imported, or it would be among them
    known = ", ".join(dict.fromkeys(case.backend for case in every if case.memory != "model"))
    raise pytest.UsageError(f"--backend={backend} is not installed; there are model, {known}")


def _marks(case: Case) -> list[pytest.MarkDecorator]:
    if case.memory == "model":
        return []
    if case.guest:
        return [pytest.mark.rdma, pytest.mark.timeout(600)]
    return [getattr(pytest.mark, case.implementation)]


def _make_job(case: Case, target: Callable[[], Target], request: pytest.FixtureRequest, name: str = "") -> Job:
    # Times of its *kill* are those of a machine with idle cores.  A rank that is killed must end with an error, as
    # must those named *failing*; any other error fails the test.
    outcomes: dict[Any, Outcome] = request.getfixturevalue("outcomes")
    patience = GUEST_PATIENCE if case.guest else PATIENCE

    def run(
        ranks: Mapping[str, tuple[Callable[..., Any], Mapping[str, Any]]],
        kill: Mapping[str, float] | None = None,
        failing: Sequence[str] = (),
    ) -> Outcome:
        specs = [
            RankSpec(rank, f"{program.__module__}:{program.__name__}", case.place(index), arguments)
            for index, (rank, (program, arguments)) in enumerate(ranks.items())
        ]
        # several tests may look at one and the same job: it is run once
        key = (name or case.name, tuple((spec.name, spec.program, str(spec.arguments)) for spec in specs), str(kill))
        if key not in outcomes:
            outcomes[key] = target().run(specs, {rank: at * patience for rank, at in (kill or {}).items()})
        outcome = outcomes[key]
        assert list(outcome.ranks) == list(ranks)
        errors = {rank: result.error for rank, result in outcome.ranks.items() if result.error}
        assert sorted(errors) == sorted({*(kill or {}), *failing}), errors
        return outcome

    return run


@pytest.fixture(scope="session")
def outcomes() -> dict[Any, Outcome]:
    """Return the jobs that have been run."""
    return {}


@pytest.fixture
def job(request: pytest.FixtureRequest) -> Job:
    """Return what runs a job, on each implementation in turn."""
    case: Case = request.param
    asked = case.memory == "host" and bool(request.config.getoption("backend"))

    def target() -> Target:
        if case.guest:
            return cases.guest_target(request.getfixturevalue("rdma_guest"), case.engine)
        return cases.make_target(case.name, required=asked)

    return _make_job(case, target, request)


@pytest.fixture
def pair(job: Job) -> Callable[..., tuple[RankResult, RankResult]]:
    """Return what runs two programs, each with those of the arguments that it takes, and returns their results.

    The first is the rank "writer", whose *to* is "target"; the second is that, and its *by* is "writer".
    """

    def run(first: Any, second: Any, *, kill: Any = None, failing: Sequence[str] = (), **both: Any) -> Any:
        both |= {"to": "target", "by": "writer"}
        ranks = {}
        for name, program in (("writer", first), ("target", second)):
            ranks[name] = program, {key: both[key] for key in signature(program).parameters if key in both}
        return tuple(job(ranks, kill=kill, failing=failing).ranks.values())

    return run


@pytest.fixture
def alone(job: Job) -> Callable[..., Any]:
    """Return what runs a program as the only rank of a job, and returns its value."""
    return lambda program, **arguments: job({"lonely": (program, arguments)}).ranks["lonely"].value


@pytest.fixture
def real(request: pytest.FixtureRequest, pair: Any) -> tuple[Case, Any]:
    """Return the case and `pair`, of real engines only."""
    return request.node.callspec.params["job"], pair


@pytest.fixture
def gathering(request: pytest.FixtureRequest) -> Job:
    """Return what runs a job, on each implementation of groups in turn."""
    case, target = cases.gathering_target(request.param)
    return _make_job(case, lambda: target, request, name=request.param)
