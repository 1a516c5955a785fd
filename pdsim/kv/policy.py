# SPDX-License-Identifier: Apache-2.0
"""What distinguishes the ways in which backends hand KV over, as data: `policy` in `conf/backend`.

Unknown here: what a transfer costs (`pdsim.hardware.costs.Engine`), and how any of this is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

from pdsim.core.errors import ConfigError
from pdsim.core.units import NotNegativeInt, Seconds

POOLS = {"default": ("write", "device"), "nvlink": ("control", "host"), "intra_node_nvlink": ("write", "device")}
"""Path and memory of first-token metadata by the pool of KV memory, as SGLang's `send_aux` has them: a write after
the KV, except that the NVLINK pool cannot carry host memory and uses TCP ("control")."""

VARIABLES = {
    "SGLANG_MOONCAKE_CUSTOM_MEM_POOL": ("mooncake", "backend.policy.pool", ("NVLINK", "INTRA_NODE_NVLINK")),
    "SGLANG_MOONCAKE_SEND_AUX_TCP": ("mooncake", "backend.policy.metadata", {"1": "control"}),
    "SGLANG_MORI_SEND_AUX_RDMA": ("mori", "backend.policy.metadata", {"1": "write"}),
    "SGLANG_MORI_TRANSFER_SHARDS": ("mori", "backend.policy.queues", ""),
    "SGLANG_DISAGGREGATION_QUEUE_SIZE": ("mooncake nixl", "backend.policy.queues", ""),
    "SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER": ("", "kv.all_cp_ranks", {"1": "true"}),
    "SGLANG_DISAGG_STAGING_BUFFER": ("mooncake nixl", "kv.staging", {"1": "true"}),
    "SGLANG_DISAGG_STAGING_BUFFER_SIZE_MB": ("mooncake nixl", "kv.staging_buffer", "MiB"),
    "SGLANG_DISAGG_STAGING_POOL_SIZE_MB": ("mooncake nixl", "kv.staging_ring", "MiB"),
    "SGLANG_SYMM_MEM_PREALLOC_GB_SIZE": ("", "collective.pool", "GiB"),
}
"""SGLang's variables: the engines that read each ("" is any), the key that it means, and its values or its unit."""


def described(environment: Mapping[str, str], engine: str) -> Iterator[str]:
    """Yield ``key=value`` for each of `VARIABLES` that *environment* sets and SGLang reads with *engine*.

    0, false and nothing leave a key alone.  Raise a `ConfigError` for a value that no key has.

    >>> list(described({"SGLANG_DISAGG_STAGING_BUFFER": "1", "SGLANG_MORI_SEND_AUX_RDMA": "1"}, "nixl"))
    ['kv.staging=true']
    """
    for name, (engines, key, values) in VARIABLES.items():
        text = environment.get(name, "").strip()
        if text.lower() in ("", "0", "-1", "false", "none") or (engines and engine not in engines.split()):
            continue
        if isinstance(values, str):
            if not text.isdecimal():
                raise ConfigError(f"{name}={text} must be a whole number; unset it, or set {key}")
            yield f"{key}={text}{values}"
            continue
        known = values if isinstance(values, dict) else {value: value.lower() for value in values}
        value = known.get("1" if text.lower() == "true" and "1" in known else text)
        if value is None:
            raise ConfigError(f"{name}={text} is none of {', '.join(known)}; unset it, or set {key}")
        yield f"{key}={value}"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How a prefill rank hands KV to a backend, and how the other side learns of it.

    Without values: every chunk is posted at once, grouped, in one write with the metadata.
    """

    # each with one worker that blocks until its write is done; 0: the scheduler's thread posts
    queues: NotNegativeInt = 0
    handover: Seconds = 0.0  # until a queue's thread begins a write: it waits for the lock that the scheduler holds
    # a room's queue: by the peers that it goes to, or by its number ("room")
    shard: Annotated[str, "one of session, room"] = "session"
    # what one write of whole rows moves: a chunk's planes together, one "plane" or "descriptor"
    call: Annotated[str, "one of chunk, plane, descriptor"] = "chunk"
    slices: Annotated[str, "one of '', chunk, plane"] = ""  # likewise of slices of rows; "" is as *call*
    # a descriptor is a run of neighbouring pages, or one page ("pages")
    grouping: Annotated[str, "one of runs, pages"] = "runs"
    # with every "write"; once a room as a "message"; or when the scheduler polls ("poll")
    notify: Annotated[str, "one of write, message, poll"] = "write"
    pool: Annotated[str, "one of default, nvlink, intra_node_nvlink"] = "default"  # that KV is in: one of `POOLS`
    # in a "write" of its own, the last "batch" of KV, or by "control"; "" is by the pool
    metadata: Annotated[str, "one of '', batch, write, control"] = ""
    metadata_memory: Annotated[str, "one of '', device, host"] = ""  # "device" or "host"; "" is by the pool
    metadata_stall: Seconds = 0.0  # of decode's steps by metadata that is written: SGLang 22665 warns of it on AINIC
    notice: Seconds = 0.0  # for which each notification of a write holds decode's scheduler: it takes NIXL's
    # if the engine cannot write it: over the "control" channel; "" fails the request
    metadata_fallback: Annotated[str, "one of '', control"] = ""
    staging: bool = False  # whether the backend has a staged path
    decode_cache: bool = False  # whether decode may keep a prefix cache when prefill pushes, as SGLang allows it

    @property
    def memory_pool(self) -> str:
        """The pool of `pdsim.transfer.Device.allocate`: memory for transfers within a node needs none of its own."""
        return "nvlink" if self.pool == "nvlink" else "default"

    @property
    def metadata_by(self) -> str:
        """Which way metadata goes: ``"batch"``, ``"write"`` or ``"control"``."""
        return self.metadata or POOLS[self.pool][0]

    @property
    def metadata_on(self) -> str:
        """Which memory its rows lie in: ``"device"`` or ``"host"``."""
        return self.metadata_memory or POOLS[self.pool][1]


@dataclass(frozen=True, kw_only=True)
class Staging:
    """The staged path between ranks that keep different heads: sizes in bytes, the same on all ranks of a side."""

    ring: int  # of each decode rank
    buffer: int  # of each queue of a prefill rank
    wait: float  # seconds that a chunk waits for a slot before it goes in slices
    scatter: str = "chunk"  # once all writers' blocks of a "chunk" are there (SGLang), or each "writer"'s by itself

    def __post_init__(self) -> None:
        for name in ("ring", "buffer", "wait"):
            if not getattr(self, name) > 0:
                raise ValueError(f"staging {name} must be > 0, got {getattr(self, name)}")
