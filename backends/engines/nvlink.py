# SPDX-License-Identifier: Apache-2.0
"""Copies between GPUs of one machine by CUDA itself: each rank maps the other's memory, and copies on a stream.

Memory is shared by CUDA's inter-process handles, which travel in the endpoint's address; it is mapped when a peer is
met, and unmapped before a withdrawn region is returned. The target has no part in a copy, so notifications go over
`backends.base.control`. Nothing waits for the stream that produced the bytes: `Device.copy` ends before its event
does. A copy ends with the process that started it, before that counts as dead.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import msgspec

from backends.base.control import PeerLine
from backends.base.device import RealBuffer
from backends.base.endpoint import RealEndpoint
from backends.base.processes import myself
from backends.base.transfers import Entry, PeerState, PostedTransfer
from backends.capabilities import EngineLibrary, Variant
from backends.cuda.cuda_device import CudaBuffer, CudaDevice
from backends.cuda.gather import Gather
from pdsim.core.errors import ConfigError, RegistrationError, TransferFailed

CUDA = EngineLibrary("from backends.cuda.runtime import cudart; cudart()", ("torch",), "pip install 'pdsim[gpu]'")


class _Shared(msgspec.Struct, frozen=True, array_like=True):
    """The description of an endpoint for its peers: its process, and a handle for each region."""

    process: str
    token: bytes
    handles: dict[str, bytes]


class _Mapping(NamedTuple):
    region: str  # of a peer
    handle: bytes  # that it was mapped by: memory registered anew has another


@dataclass(eq=False)
class _Partner:
    here: bool  # in this very process, where an address means the same
    stream: int
    handles: dict[str, bytes]  # of its regions now
    starts: dict[str, int] = field(default_factory=dict)  # where these are mapped
    mapped: dict[_Mapping, int] = field(default_factory=dict)  # addresses of all that is
    moving: int = 0  # copies that the stream has not ended


class NvlinkEndpoint(RealEndpoint):
    """An `Endpoint` on CUDA's peer copies.

    Option ``copy``: ``engine`` (default) gives the copy engines all descriptors of a batch in one call; ``kernel``
    stores into the peer's memory by one kernel, which is cheaper for many small pieces and takes multiprocessors. A
    rank on the host has an endpoint too, which registers nothing. Each peer has a stream of its own.
    """

    kind = "nvlink"
    options = ("copy",)
    variants = (
        Variant(
            backend="nvlink",
            requires=CUDA,
            device="gpu",
            memory=("gpu",),
            one_sided=True,
            tried_with={"kernel": {"copy": "kernel"}},
        ),
    )

    def start_engine(self) -> str:
        options = dict(self.settings.options)
        how = options.pop("copy", "engine")
        if options or how not in ("engine", "kernel"):
            raise ConfigError(
                f"backend.options of {self.settings.name!r} must be copy=engine or copy=kernel, "
                f"got {self.settings.options}"
            )
        self._partners: dict[bytes, _Partner] = {}  # by token
        self._gather: Gather | None = None
        if not isinstance(self.device, CudaDevice):
            return "cuda, without a GPU of its own"
        self._gpu = self.device
        if how == "kernel":
            self._gather = Gather(self.device.gpu)
            self._gather.prepare()
        return f"cuda {self._gpu.cuda.version} ipc {how}"

    def pin(self, buffer: RealBuffer) -> bytes:
        if not isinstance(buffer, CudaBuffer):
            raise RegistrationError(
                f"backend {self.settings.name!r} moves GPU memory and {self.rank} is on the host; place it on a "
                f"GPU, or use backend=mooncake_tcp"
            )
        try:
            return self._gpu.cuda.share(buffer.address)
        except TransferFailed as error:
            raise RegistrationError(f"CUDA cannot share {buffer.size} bytes: {error}") from error

    def unpin(self, entry: Entry) -> None:
        """Do nothing: peers unmap it before they return it."""

    def engine_address(self) -> bytes:
        handles = {name: entry.handle for name, entry in self.entries.items()}
        return msgspec.msgpack.encode(_Shared(myself(), self.control.card.token, handles))

    def connect_engine(self, description: bytes) -> _Partner:
        try:
            shared = msgspec.msgpack.decode(description, type=_Shared)
        except (msgspec.MsgspecError, ValueError) as error:
            raise TransferFailed(
                f"{len(description)} bytes that describe no peer of this endpoint: {error}"
            ) from None
        partner = self._partners.get(shared.token)
        if partner is None:
            stream = self._gpu.cuda.stream() if isinstance(self.device, CudaDevice) else 0
            partner = self._partners[shared.token] = _Partner(shared.process == myself(), stream, shared.handles)
        if isinstance(self.device, CudaDevice) and not partner.here:
            regions = [_Mapping(*item) for item in shared.handles.items()]
            for region in regions:
                if region not in partner.mapped:
                    try:
                        partner.mapped[region] = self._gpu.cuda.map(region.handle)
                    except TransferFailed as error:
                        raise TransferFailed(
                            f"region {region.region!r} of the peer cannot be mapped: {error}"
                        ) from error
            partner.starts = {region.region: partner.mapped[region] for region in regions}
        partner.handles = shared.handles
        return partner

    def forget_region(self, peer: PeerState, region: str) -> None:
        partner: _Partner = peer.handle
        if region in peer.withdrawn:
            partner.handles.pop(region, None)
            partner.starts.pop(region, None)
        for mapping in tuple(partner.mapped):
            if mapping.region == region and partner.handles.get(region) != mapping.handle:
                self._gpu.cuda.unmap(partner.mapped.pop(mapping))

    def _unmap_all(self, partner: _Partner) -> None:
        for address in partner.mapped.values():
            self._gpu.cuda.unmap(address)
        partner.mapped.clear()

    def post(self, transfer: PostedTransfer) -> None:
        partner: _Partner = transfer.peer.handle
        region, batch = transfer.remote, transfer.batch
        there = region.address if partner.here else partner.starts[region.name]
        here = transfer.local.region.address
        source, target = (here, there) if transfer.operation == "write" else (there, here)
        try:
            if self._gather is not None:
                transfer.prepared = self.clock.now
                self._gather.copy(source, target, batch, partner.stream)
            elif len(batch.size) == 1:
                source, target = source + batch.source_offset.item(), target + batch.target_offset.item()
                transfer.prepared = self.clock.now
                self._gpu.cuda.copy(target, source, batch.nbytes, partner.stream)
            else:
                sources, targets = batch.source_offset + source, batch.target_offset + target
                transfer.prepared = self.clock.now
                self._gpu.cuda.copy_batch(targets, sources, batch.size, partner.stream)
        except TransferFailed as error:
            self.fail(transfer, error, moving=True)  # of its descriptors some may have been taken
        transfer.posted = self.clock.now
        partner.moving += 1
        self._gpu.completions.when_done(partner.stream, partial(self._done, transfer))

    def _done(self, transfer: PostedTransfer, error: TransferFailed | None) -> None:
        partner: _Partner = transfer.peer.handle
        partner.moving -= 1
        if error is None:
            self.complete(transfer)
        else:
            self.engine_failed(
                transfer, f"CUDA failed a {transfer.operation} of {transfer.batch.nbytes} bytes: {error}"
            )
        if transfer.peer.line.lost and not partner.moving:
            self._unmap_all(partner)

    def on_lost(self, line: PeerLine) -> None:
        super().on_lost(line)
        partner = self._partners.get(line.card.token)
        if partner is not None and not partner.moving:
            self._unmap_all(partner)

    def inbound_drained(self) -> bool:
        return True  # nothing that a process had given its GPU outlives it

    def stop_engine(self, idle: bool) -> None:
        if not idle or not isinstance(self.device, CudaDevice):
            return
        for partner in self._partners.values():
            self._unmap_all(partner)
            self._gpu.cuda.end_stream(partner.stream)
