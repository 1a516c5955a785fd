"""The implementations of the waist that the suite runs against; a new one is added here, and is done when it passes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from backends.emulation.guest.machine import PATIENCE as GUEST_PATIENCE
from pdsim.costs import Collective, CollectiveModel, Engine, EngineModel
from pdsim.hardware import Gpu, Host, Interconnect, Machine, Nic
from pdsim.job import Outcome, Place, RankSpec, Target
from tests.conformance import programs
from tests.conformance.programs.tools import PATIENCE
from tests.rdma.verbs import VERBS
from tests.rdma.verbs import target as in_guest

MODELS = ("model-timing", "model-tracked")
REAL = ("mooncake_tcp", "nixl_tcp", "nixl_shm")
GPU = ("mooncake_nvlink", "nixl", "nvlink", "nvlink_kernel", "mooncake_tcp_gpu", "nixl_tcp_gpu")
"""On GPU memory: rank *i* is on GPU *i* modulo how many there are, so with one GPU all share it."""

ONE_SIDED = ("nixl_shm", "mooncake_nvlink", "nvlink", "nvlink_kernel", *VERBS)
"""Engines whose transfers the peer's process has no part in, so that they end though it is stopped."""
GATHERING = ("gloo", "nccl", "symm_mem")
MEMBERS = 4
"""Ranks of the largest job of groups."""

MACHINE = Machine(
    name="conformance",
    vendor="nvidia",
    nodes=1,
    gpus=8,
    gpu=Gpu(name="small", memory=1 << 30, memory_rate=1e12, compute=1e14, pcie=50e9),
    interconnect=Interconnect(kind="switch", rate=10e9, latency=1e-6),
    nic=Nic(count=0, rate=0.0),
    host=Host(memory=1 << 34, memory_rate=1e11, tcp_rate=5e9, tcp_latency=20e-6),
)
ENGINE_MODEL = EngineModel(path="nvlink", call=5e-6, descriptor=1e-6, overlap=False, latency=5e-6, rate=8e9)

GATHER = CollectiveModel(path="nvlink", pattern="ring", latency=10e-6, step=2e-6, rate=8e9)
COLLECTIVE = Collective(
    name="conformance",
    implementation="gloo",
    plain=GATHER,
    symmetric=GATHER,
    grow_latency=1e-3,
    grow_rate=1e11,
    timeout=60.0,
)

Job = Callable[..., Outcome]


def engine(name: str) -> Engine:
    """Return the engine *name* with its own defaults; the model's costs are those of no engine in particular."""
    kind, options = name.partition("_")[0], {}
    if name == "nvlink_kernel":
        name, options = "nvlink", {"copy": "kernel"}
    return Engine(
        name=name.removesuffix("_gpu").removesuffix("_verbs"),
        implementation=kind,
        vendors=("nvidia", "cpu"),
        intra=ENGINE_MODEL,
        inter=ENGINE_MODEL,
        options=options,
    )


def place(name: str, index: int) -> Place:
    """Return where rank *index* of a job on target *name* runs."""
    if name in (*REAL, *VERBS) or name == "gloo":
        return Place(0)
    if name in GPU:
        from backends.diagnosis import gpu_count

        return Place(0, index % (gpu_count() or 1))
    return Place(0, index)


def make_target(name: str) -> Target:
    """Return the target called *name*, or skip the test if its library is not installed."""
    if name in MODELS:
        from pdsim.fabric.job import Model

        return Model(MACHINE, engine("conformance"), memory=name.removeprefix("model-"), seed=1, collective=COLLECTIVE)
    if name in GATHERING:
        return _gathering(name)
    from backends.diagnosis import devices
    from backends.jobs.launcher import Processes
    from backends.registry import diagnose

    diagnosis = diagnose(engine(name).name)
    if diagnosis.works and name in GPU:
        diagnosis = devices()[0]
    if not diagnosis.works:
        if os.environ.get("PDSIM_REQUIRE_ENGINES") and name in REAL:
            pytest.fail(f"{name}: {diagnosis.reason}")
        pytest.skip(f"{name}: {diagnosis.reason}")
    return Processes(engine(name), deadline=90, device_capacity=1 << 30, gpu_capacity=1 << 30)


def _gathering(name: str) -> Target:
    pytest.importorskip("torch", reason="groups of real ranks need PyTorch")
    from backends.diagnosis import gpu_count

    if name != "gloo" and gpu_count() < MEMBERS:
        pytest.skip(f"{name}: a rank of a group takes a GPU, {MEMBERS} in all, and this machine has {gpu_count()}")
    # any endpoint does, for a group makes no use of it
    target = make_target("mooncake_tcp" if name == "gloo" else "nvlink")
    target.collective = replace(COLLECTIVE, name=name, implementation=name)  # type: ignore[attr-defined]
    return target


def make_job(name: str, request: pytest.FixtureRequest) -> Job:
    """Return a function that runs programs by rank name, checks that none failed, and returns the outcome.

    Times of its *kill* are those of a machine with idle cores.
    """
    outcomes: dict[Any, Outcome] = request.getfixturevalue("outcomes")
    patience = GUEST_PATIENCE if name in VERBS else PATIENCE

    def target() -> Target:
        if name not in VERBS:
            return make_target(name)
        return in_guest(request.getfixturevalue("verbs"), engine(name))

    def run(
        ranks: Mapping[str, tuple[Callable[..., Any], Mapping[str, Any]]],
        kill: Mapping[str, float] | None = None,
        failing: Sequence[str] = (),
    ) -> Outcome:
        specs = [
            RankSpec(rank, f"{programs.__name__}:{program.__name__}", place(name, index), arguments)
            for index, (rank, (program, arguments)) in enumerate(ranks.items())
        ]
        # several tests may look at one and the same job: it is run once
        key = (name, tuple((spec.name, spec.program, str(spec.arguments)) for spec in specs), str(kill))
        if key not in outcomes:
            outcomes[key] = target().run(specs, {rank: at * patience for rank, at in (kill or {}).items()})
        outcome = outcomes[key]
        assert list(outcome.ranks) == list(ranks)
        errors = {rank: result.error for rank, result in outcome.ranks.items() if result.error}
        assert sorted(errors) == sorted({*(kill or {}), *failing}), errors
        return outcome

    return run


def _params(*names: str) -> list[Any]:
    marks = {name: [getattr(pytest.mark, name.split("_")[0])] for name in (*REAL, *GPU)}
    marks |= {name: [pytest.mark.rdma, pytest.mark.timeout(600)] for name in VERBS}
    return [pytest.param(name, marks=marks.get(name, [])) for name in names]


without_verbs = pytest.mark.parametrize("job", _params(*MODELS, *REAL, *GPU), indirect=True)
"""For tests of what has nothing to do with an engine's transfers."""


@pytest.fixture(scope="session")
def outcomes() -> dict[Any, Outcome]:
    """The jobs that have been run."""
    return {}


@pytest.fixture(params=_params(*MODELS, *REAL, *GPU, *VERBS))
def job(request: pytest.FixtureRequest) -> Job:
    """Runs a job on each implementation in turn."""
    return make_job(request.param, request)


@pytest.fixture(params=_params(*REAL, *GPU, *VERBS))
def real(request: pytest.FixtureRequest) -> tuple[str, Job]:
    """The same for real engines only, with the engine's name."""
    return request.param, make_job(request.param, request)


@pytest.fixture(params=[*MODELS, *GATHERING])
def gathering(request: pytest.FixtureRequest) -> Job:
    """Runs a job on each implementation of groups in turn."""
    return make_job(request.param, request)
