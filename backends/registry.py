# SPDX-License-Identifier: Apache-2.0
"""The installed engines: entry points of the group ``pdsim.backends``, each an `Endpoint` class.

Names are listed without importing anything; what a backend needs is read from its class (`backends.capabilities`),
which imports no engine's library either.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from typing import Any

from backends.capabilities import EngineLibrary, Variant
from backends.diagnosis import Diagnosis, devices, error_of, installed
from pdsim.core import plugins
from pdsim.core.errors import BackendUnavailable, ConfigError, instead
from pdsim.hardware.costs import Collective, Engine


def names() -> tuple[str, ...]:
    """Return the names of all implementations, without importing them."""
    return plugins.names(plugins.BACKENDS)


def load(name: str) -> Any:
    """Return the endpoint class called *name*; the errors of `pdsim.core.plugins.resolve`."""
    return plugins.resolve(plugins.BACKENDS, name)


def variants(implementation: str) -> tuple[Variant, ...]:
    """Return what the class called *implementation* declares; without declarations, a backend of that name."""
    declared: tuple[Variant, ...] = getattr(load(implementation), "variants", ())
    return declared or (Variant(backend=implementation),)


def variants_of(backend: str) -> tuple[Variant, ...]:
    """Return the variants of *backend* (as in ``conf/backend``).  Raise a `ConfigError` if no class declares any."""
    return tuple(variant for variant in variants(implementation_of(backend)) if variant.backend == backend)


def implementation_of(backend: str) -> str:
    """Return the implementation that declares *backend*.  Raise a `ConfigError` if there is none."""
    implementations = _implementations()
    if backend not in implementations:
        raise ConfigError(
            f"no installed package provides backend {backend!r}; {instead(backend, sorted(implementations))}"
        )
    return implementations[backend]


def backends() -> tuple[str, ...]:
    """Return the names of all backends that installed implementations declare."""
    return tuple(_implementations())


def on_hosts(nodes: int = 1) -> tuple[str, ...]:
    """Return the backends that move host memory, of one machine or between *nodes*, and need their library only."""
    working = []
    for backend in backends():
        with suppress(BackendUnavailable):
            if any(way.on_hosts(nodes) for way in variants_of(backend)):
                working.append(backend)
    return tuple(working)


@cache
def _implementations() -> dict[str, str]:
    # One that cannot be imported provides the backend of its own name.
    implementations: dict[str, str] = {}
    for name in names():
        ways: tuple[Variant, ...] = (Variant(backend=name),)
        with suppress(BackendUnavailable):
            ways = variants(name)
        implementations |= {way.backend: name for way in ways}
    return implementations


@cache
def diagnose(backend: str) -> Diagnosis:
    """Return whether *backend* (as in ``conf/backend``) works here; a `ConfigError` for an unknown one.

    It works if all of its libraries do and one of its variants finds its device; if not, the reason names everything
    that is missing.
    """
    implementation = implementation_of(backend)
    try:
        ways = variants_of(backend)
    except BackendUnavailable as error:
        return Diagnosis(backend, False, "", str(error), f"reinstall {_provider(implementation)}")
    libraries = _libraries(ways)
    missing = [(why, library.install) for library in libraries if (why := error_of(library.probe))]
    needed = [device for device in devices() if device.name in {way.device for way in ways}]
    if all(way.device for way in ways) and not any(device.works for device in needed):
        hosts = ", ".join(on_hosts()) or "none is installed"
        others = f"use target=model, or a backend that moves host memory: {hosts}"
        missing.append((" and ".join(device.reason for device in needed), others))
    own = _provider(implementation)
    # pdsim's version would be taken for that of an engine
    own = "comes with pdsim" if own.startswith("pdsim ") else own
    versions = " ".join(filter(None, map(installed, libraries))) if libraries else own
    if not missing:
        return Diagnosis(backend, True, versions or "version unknown")
    reasons, remedies = zip(*missing, strict=True)
    return Diagnosis(backend, False, versions, ", and ".join(reasons), "; ".join(remedies))


def diagnose_library(backend: str) -> str:
    """Return why a library of *backend* does not work here and what would help, or nothing if all do."""
    ways = _libraries(variants_of(backend))
    return "; ".join(f"{error}: {library.install}" for library in ways if (error := error_of(library.probe)))


def check(engine: Engine) -> Iterator[str]:
    """Yield a line for each reason why ``target=real`` cannot run *engine* here, whatever the machine is to be."""
    ways = [way for way in variants(engine.implementation) if way.backend == engine.name]
    for rule in dict.fromkeys(way.check for way in ways if way.check is not None):
        yield from rule(engine)
    if engine.threads != 1 and not any(way.posting_threads for way in ways):
        yield (
            f"backend.threads={engine.threads}: real ranks of backend={engine.name} post from one thread; use 1, "
            "or a backend of Mooncake or NIXL"
        )


def notes(engine: Engine) -> Iterator[str]:
    """Yield a line for each thing that a run of *engine* should say, though it is not wrong."""
    for way in variants(engine.implementation):
        if way.backend == engine.name and way.notes is not None:
            yield from way.notes(engine)


def check_collective(collective: Collective) -> Iterator[str]:
    """Yield a line for each reason why ``target=real`` cannot gather with *collective*."""
    from backends.collectives import base

    yield from base.check(collective)


def _libraries(ways: Iterable[Variant]) -> list[EngineLibrary]:
    return list(dict.fromkeys(way.requires for way in ways if way.requires is not None))


def _provider(implementation: str) -> str:
    name = plugins.provider(plugins.BACKENDS, implementation)
    return f"{name} {version(name)}" if name else ""
