# SPDX-License-Identifier: Apache-2.0
"""The implementations of the waist that the suite runs against, and a target for each.

Real ones are the `Variant`s that installed endpoint classes declare: nothing is added here for a new backend.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from backends import registry
from backends.capabilities import Variant
from backends.diagnosis import devices, gpu_count
from pdsim.core import plugins
from pdsim.core.errors import BackendUnavailable
from pdsim.hardware.costs import Collective, CollectiveModel, Engine, EngineModel
from pdsim.hardware.machine import Gpu, Host, Interconnect, Machine, Nic
from pdsim.transfer.job import Place, Target

if TYPE_CHECKING:
    from backends.emulation.guest.engines import GuestTarget
    from backends.emulation.guest.machine import Guest
    from backends.jobs.spawn import WarmStart

MODELS = ("model-timing", "model-tracked")
"""The model, without and with the contents of memory."""

MEMBERS = 4
"""Ranks of the largest job of groups."""

IMPORTED = (
    *("zmq.utils.monitor", "zmq.utils.z85", "backends.engines.mooncake", "backends.engines.nixl"),
    *(f"pdsim.testing.programs.{name}" for name in ("gathering", "living", "losing", "moving", "refusals")),
    *("pdsim.serving.router", "pdsim.serving.prefill", "pdsim.serving.decode"),
)
"""Modules of ranks on host memory, imported before they fork; none imports an engine's library."""

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


@dataclass(frozen=True)
class Case:
    """One implementation, on one kind of memory.

    Tests look at *memory*, *one_sided* and *proves_quiescence*, where the contract leaves engines a choice.
    """

    name: str  # of the test's parameter, such as ``nixl_tcp`` or ``mooncake_tcp_gpu``
    backend: str = "conformance"  # whose defaults the engine has
    implementation: str = "conformance"  # the entry point of its endpoint class
    memory: str = "model"  # "model", "host" or "gpu"
    guest: bool = False  # it runs in the emulated machine with an RDMA device
    one_sided: bool = False  # a stopped target leaves writes to it undisturbed
    proves_quiescence: bool = True  # `Endpoint.quiesced` proves the end of a dead process
    options: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def engine(self) -> Engine:
        """The backend with its own defaults; the model's costs are those of no engine in particular."""
        return Engine(
            name=self.backend,
            implementation=self.implementation,
            vendors=("nvidia", "cpu"),
            intra=ENGINE_MODEL,
            inter=ENGINE_MODEL,
            options=self.options,
        )

    def place(self, index: int) -> Place:
        """Return where rank *index* of a job runs: on a GPU, or on the host."""
        if self.memory == "host":
            return Place(0)
        return Place(0, index % (gpu_count() or 1) if self.memory == "gpu" else index)


@cache
def cases() -> tuple[Case, ...]:
    """Return the models, and all that installed endpoint classes declare that can be imported.

    A backend that moves host and GPU memory has two, ``NAME`` and ``NAME_gpu``; one in the RDMA guest
    ``NAME_verbs``.
    """
    every = [Case(name) for name in MODELS]
    for implementation in registry.names():
        try:
            variants = registry.variants(implementation)
        except BackendUnavailable:
            continue
        every += [case for variant in variants if not variant.same_as for case in _of(implementation, variant)]
    return tuple(every)


def _of(implementation: str, variant: Variant) -> Iterator[Case]:
    name, proves = variant.backend, variant.proves_quiescence
    common = Case(name, name, implementation, "host", one_sided=variant.one_sided, proves_quiescence=proves)
    if variant.guest:
        yield replace(common, name=f"{name}_verbs", guest=True)
        return
    for memory in variant.memory:
        name = f"{variant.backend}_gpu" if memory == "gpu" and len(variant.memory) > 1 else variant.backend
        yield replace(common, name=name, memory=memory)
        for suffix, options in variant.tried_with.items():
            yield replace(common, name=f"{name}_{suffix}", memory=memory, options=options)


def named(name: str) -> Case:
    """Return the case called *name*, or the first of the backend of that name, which may be an alias."""
    for attribute in ("name", "backend"):
        for case in cases():
            if getattr(case, attribute) == name:
                return case
    return Case(name, name, registry.implementation_of(name))


def engine(name: str) -> Engine:
    """Return the engine of the case or the backend called *name*."""
    return named(name).engine


def make_target(name: str, *, required: bool = False) -> Target:
    """Return the target of the case called *name*, or skip the test, with reason and remedy, if it cannot work.

    With *required*, or the environment variable ``PDSIM_REQUIRE_ENGINES``, one that moves host memory must work.
    """
    case = named(name)
    if case.memory == "model":
        from pdsim.sim.model import Model

        return Model(MACHINE, case.engine, memory=name.removeprefix("model-"), seed=1, collective=COLLECTIVE)
    from backends.jobs.launcher import Processes
    from backends.jobs.spawn import spawn

    diagnosis = registry.diagnose(case.backend)
    if diagnosis.works and case.memory == "gpu":
        diagnosis = devices()[0]
    if not diagnosis.works:
        everywhere = case.backend in registry.on_hosts() and case.memory == "host"
        if required or (os.environ.get("PDSIM_REQUIRE_ENGINES") and everywhere):
            pytest.fail(f"{name}: {diagnosis.reason}; {diagnosis.remedy}")
        pytest.skip(f"{name}: {diagnosis.reason}")
    start = _warm_start() if case.memory == "host" else spawn
    return Processes(case.engine, deadline=90, device_capacity=1 << 30, gpu_capacity=1 << 30, spawn=start)


@cache
def _warm_start() -> WarmStart:
    from backends.jobs.spawn import WarmStart

    return WarmStart(IMPORTED)


def gathering_target(name: str) -> tuple[Case, Target]:
    """Return a target whose groups gather with *name*, a model or a collective, and the case of its endpoints."""
    if name in MODELS:
        return named(name), make_target(name)
    library = plugins.resolve(plugins.COLLECTIVES, name)
    if problem := library.missing():
        pytest.skip(f"{name}: {problem}")
    if library.memory == "gpu" and gpu_count() < MEMBERS:
        pytest.skip(f"{name}: a rank of a group takes a GPU, {MEMBERS} in all, and this machine has {gpu_count()}")
    # any endpoint does, for a group makes no use of it
    fitting = [case for case in cases() if case.memory == library.memory and not case.guest]
    working = [case for case in fitting if registry.diagnose(case.backend).works]
    if not working:
        pytest.skip(f"{name}: no backend works here on {library.memory} memory")
    target = make_target(working[0].name)
    target.collective = replace(COLLECTIVE, name=name, implementation=name)  # type: ignore[attr-defined]
    return working[0], target


GUEST_JOB = 90.0
"""Seconds of a job on the host, after which its ranks are killed; the guest's are its `PATIENCE` times as many."""


def unavailable(error: BackendUnavailable) -> NoReturn:
    """Skip the test that needs what this machine lacks, or fail it where engines are required."""
    if os.environ.get("PDSIM_REQUIRE_ENGINES"):
        pytest.fail(str(error))
    pytest.skip(str(error))


def guest_target(guest: Guest, engine: Engine, **options: Any) -> GuestTarget:
    """Return the target for *engine* in *guest*; *options* are `Processes`'s."""
    from backends.emulation.guest.engines import GuestTarget, server
    from backends.emulation.guest.machine import PATIENCE

    try:
        server(guest, engine.implementation)
    except BackendUnavailable as error:
        unavailable(error)
    return GuestTarget(guest, engine, **{"deadline": GUEST_JOB * PATIENCE, "device_capacity": 1 << 30, **options})
