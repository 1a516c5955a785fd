# SPDX-License-Identifier: Apache-2.0
"""What if: a run simulated again with one cause of its time relieved twofold, or with a part of another run's setup.

Simulations are of the model, whatever the run's target was, with the same seed and so the same requests, and nothing
of them is kept.  Shares of time say where a request waited, and not what would help: a queue goes away when forwards
are quicker.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from pdsim.config import Config
from pdsim.core.errors import ConfigError
from pdsim.core.progress import ShowProgress, within
from pdsim.results.record import Result, mean, percentile
from pdsim.run import simulated


@dataclass(frozen=True)
class WhatIf:
    """A cause of time: numbers of the configuration, of any experiment and machine, that are scaled together.

    Whole numbers stay whole, and at least 1.
    """

    cause: str  # its name in ``pdsim explain``
    what: str  # the time that it accounts for
    how: str  # it is relieved
    factors: Mapping[str, float]  # by dotted key, ``*`` for any characters, what its number is multiplied by


_COSTS = ("backend.int??", "collective.plain", "collective.symmetric")

WHAT_IFS = (
    WhatIf("compute", "forwards of prefill and decode", "forwards take half as long", {"compute.scale": 0.5}),
    WhatIf(
        "queue",
        "waiting for pages, for an engine, for a place in a batch",
        "requests arrive half as often",
        {"workload.rate": 0.5, "workload.speed": 0.5, "workload.load": 0.5},
    ),
    WhatIf(
        "admission",
        "(of the queue: waiting for memory or a place)",
        "twice the memory, staging and batch limits",
        {"hw.gpu.memory": 2, "hw.host.memory": 2, "kv.pool": 2, "kv.staging_ring": 2, "kv.staging_buffer": 2}
        | {"scheduler.prefill_batch": 2, "scheduler.decode_batch": 2, "kv.state_slots": 2},
    ),
    WhatIf(
        "posting",
        "building and posting descriptors",
        "calls and descriptors cost half",
        {f"{at}.{key}": 0.5 for at in _COSTS for key in ("call", "*descriptor", "ramp.extra", "step")},
    ),
    WhatIf(
        "link",
        "bytes on the wire",
        "links and engines carry twice the rate, at half the latency",
        {f"{at}.{key}": 2 for at in _COSTS for key in ("rate", "*_rate")}
        | {f"hw.{key}": 2 for key in ("*.rate", "gpu.pcie", "host.tcp_rate", "host.memory_rate", "link.back")}
        | {"hw.link.rates": 2, "hw.interconnect.latency": 0.5, "hw.nic.latency": 0.5, "hw.link.delay": 0.5},
    ),
    WhatIf(
        "host",
        "control messages, threads that wake, completions seen",
        "hosts, control messages and completions take half as long",
        {
            f"hw.{key}": 0.5
            for key in ("host.wake", "host.idle_wake", "host.tcp_latency", "gpu.idle_wake", "*.copies.*")
        }
        | {f"{at}.{key}": 0.5 for at in _COSTS for key in ("latency", "read", "after_pause")}
        | {f"engine.{side}.{key}": 0.5 for side in ("prefill", "decode") for key in ("a*", "step", "launch")}
        | {"engine.proxy": 0.5},
    ),
    WhatIf(
        "polling",
        "until the decode scheduler looks, between two steps",
        "an idle decode engine looks twice as often",
        {"engine.decode.idle": 0.5},
    ),
)
"""In the order in which a request meets them, roughly."""


def changed(config: Config, what_if: WhatIf) -> Config | None:
    """Return *config* with the numbers of *what_if* scaled; None if all of them are 0 or missing."""
    other = _scaled(config, what_if.factors, "")
    return None if other == config else other


def _scaled(value: Any, factors: Mapping[str, float], at: str) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        below = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        scaled = {name: _scaled(item, factors, f"{at}.{name}".lstrip(".")) for name, item in below.items()}
        changed = {name: item for name, item in scaled.items() if item is not below[name]}
        return replace(value, **changed) if changed else value
    if isinstance(value, tuple):
        items = tuple(_scaled(item, factors, at) for item in value)
        return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not value:
        return value
    factor = next((factor for pattern, factor in factors.items() if fnmatchcase(at, pattern)), 1.0)
    if factor == 1.0:
        return value
    return max(1, round(value * factor)) if isinstance(value, int) else value * factor


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Figures to compare between simulations, in seconds; None where there is none.

    Means are over the requests, or transfers, that ended well.
    """

    requests: int = 0  # that ended
    e2e: float | None = None  # mean, as all but the p99
    ttft: float | None = None
    ttft_p99: float | None = None
    tpot: float | None = None
    handoff: float | None = None  # of a request's KV, after its last forward
    transfer: float | None = None  # of one transfer, submitted to seen

    @property
    def time(self) -> float | None:
        """The time to explain: end to end of a request, or of a transfer without requests."""
        return self.e2e if self.e2e is not None else self.transfer


def figures(result: Result, request: int | None = None) -> Figures:
    """Return the figures of *result*, or of one *request* of it alone.  Raise a `ConfigError` if nothing ended."""
    columns = result.requests
    ended = [row for row, e2e in enumerate(columns.get("e2e", ())) if e2e is not None and request in (None, row)]
    latencies = [each.seen - each.submitted for each in result.transfers if each.status == "ok"]
    if not ended and (not latencies or request is not None):
        raise ConfigError(
            f"{'nothing' if request is None else f'request {request} did not'} end when simulated again"
        )

    def values(name: str) -> list[float]:
        return [columns[name][row] for row in ended if columns[name][row] is not None]

    return Figures(
        requests=len(ended),
        e2e=mean(values("e2e")),
        ttft=mean(values("ttft")),
        ttft_p99=percentile(values("ttft"), 99.0),
        tpot=mean(values("tpot")),
        handoff=mean(values("transfer")),
        transfer=mean(latencies) if request is None else None,
    )


def try_what_ifs(
    config: Config, causes: Iterable[str], progress: ShowProgress, request: int | None = None
) -> dict[str, Figures | str]:
    """Return the figures of *config* as it is, under ``""``, and with each of *causes* relieved, or why not.

    With *request* the figures are those of that one request.  Raise a `ConfigError` if *config* itself cannot be
    simulated.
    """
    chosen = {each.cause: changed(config, each) for each in WHAT_IFS if each.cause in set(causes)}
    return _simulated({"": config} | chosen, 1, progress, request)


def try_exchanges(configs: Sequence[Config], progress: ShowProgress) -> dict[str, Figures | str]:
    """Return the figures of the two *configs*, ``"A"`` and ``"B"``, and of A with each group of B that differs.

    Raise a `ConfigError` if one of the two cannot be simulated.
    """
    first, second = configs
    return _simulated({"A": first, "B": second} | exchanged(first, second), 2, progress)


def _simulated(
    configs: Mapping[str, Config | None], must: int, progress: ShowProgress, request: int | None = None
) -> dict[str, Figures | str]:
    # Raise what the first *must* raise; for the others the reason stands instead of figures.
    results: dict[str, Figures | str] = {}
    for number, (name, config) in enumerate(configs.items()):
        shown = within(progress, number / len(configs), (number + 1) / len(configs), f"{name or 'as it was'},")
        if config is None:
            results[name] = "nothing of it is in this configuration"
            continue
        try:
            results[name] = figures(simulated(config, shown), request)
        except (ConfigError, ValueError) as error:
            if number < must:
                raise
            results[name] = f"cannot be run: {' '.join(str(error).split())}"
    return results


GROUPS = ("backend", "hw", "model", "parallel", "engine", "workload", "kv", "scheduler", "compute", "collective")
"""Of a `Config`, what is exchanged as one; a backend comes with its policy."""


def exchanged(first: Config, second: Config) -> dict[str, Config]:
    """Return *first* with each group of *second* that differs, by the name of the group.

    Groups are exchanged one at a time: what two of them do together is in neither.
    """
    configs: dict[str, Config] = {}
    for group in (*GROUPS, "experiment", "seed"):
        names = ("backend", "policy") if group == "backend" else (group,)
        changes = {name: getattr(second, name) for name in names if getattr(second, name) != getattr(first, name)}
        if changes:
            configs[group] = replace(first, **changes)
    return configs
