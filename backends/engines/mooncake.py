# SPDX-License-Identifier: Apache-2.0
"""Mooncake's TransferEngine: over TCP, over RDMA (``mooncake``), and over NVLink between the GPUs of a machine.

It always listens on all interfaces and takes writes to registered memory from anyone: run it on a
trusted network, or in a network namespace.  Its own notifications are text, travel apart from the data and must be
polled for, so ours go over `backends.base.control` after the target has acknowledged the bytes.  A batch that failed
may have other blocks under way, since the engine stops looking at the first bad one: it stays in quarantine.
"""

import math
import os
import re
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from backends.base.control import PeerLine
from backends.base.device import RealBuffer
from backends.base.endpoint import RealEndpoint
from backends.base.processes import captured_stderr, half_open, installed, prepare
from backends.base.transfers import Entry, PostedTransfer, PostingThreads
from backends.capabilities import EngineLibrary, Variant, declared
from backends.cuda.cuda_device import CudaBuffer, CudaDevice
from backends.jobs.affinity import keep_for
from pdsim.core.errors import BackendUnavailable, ConfigError, RegistrationError
from pdsim.hardware.costs import Engine

PATIENCE = 30.0
"""Seconds that the engine goes on waiting after our deadline, for the proof that lets a transfer settle."""

ENDLESS = "315360000"
"""Seconds of the engine's own limit over TCP.  It reads a clock that can be set: a step of that clock failed every
transfer under way.  Its limit of progress reads one that cannot, and ends those of a peer that has stopped."""

SLICE = 10e-3
"""Seconds of a processor that a thread takes which polls: longer than what the kernel gives others, 0.7 to 3 ms, so
that threads that post do not keep the engine's own, which do the work, from a processor."""

SMALL, FEW = 1 << 16, 16
"""Bytes and descriptors up to which a batch over NVLink is done at once, if nothing else is under way: 12 us, as
long as two turns of the clock."""

_MOVED, _FAILED = 1, -1  # `transfer_check_status` of a batch that has ended, which must not be asked again


@dataclass(eq=False)
class _Session:
    session: str  # the peer as the engine names it, by host and port
    answers: bool = False  # whether the peer has answered; it is asked before the first transfer
    asked: bool = False  # whether a thread waits for that
    under_way: int = 0  # batches that the clock's thread has posted over NVLink
    waiting: deque[PostedTransfer] = field(default_factory=deque)  # for the answer, or for these to end, in order


MOONCAKE = EngineLibrary(
    "import mooncake.engine",
    ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine-cuda13", "mooncake-transfer-engine"),
    "pip install 'pdsim[mooncake]'; apt-get install -y --no-install-recommends libibverbs1 libnuma1 libcurl4",
)
MOONCAKE_CUDA = EngineLibrary(
    "from mooncake import engine; "
    "engine.SUPPORT_INTRA_NVLINK or exit('Mooncake was built without intra-node NVLink')",
    MOONCAKE.distributions,
    "pip install mooncake-transfer-engine-cuda13==0.3.14 in place of any other (mooncake-transfer-engine for CUDA "
    "12); apt-get install -y --no-install-recommends libibverbs1 ibverbs-providers libnuma1 libcurl4",
)


def _forced(engine: Engine) -> Iterator[str]:
    value = os.environ.get("MC_FORCE_TCP", engine.options.get("MC_FORCE_TCP", "1"))
    if value != "1":
        yield (
            f"warning: backend={engine.name}: MC_FORCE_TCP={value} is kept, as SGLang keeps it; Mooncake uses TCP "
            "whenever the variable is set, and backend=mooncake is the one for RDMA"
        )


@dataclass(frozen=True, kw_only=True)
class _Transport(Variant):
    # The settings that choose a transport, and the log line that proves it: the protocol argument does not.

    name: str
    protocol: str
    environment: Mapping[str, str]
    witness: str  # what the engine's log says of it, or of each device that it uses
    flag: str = ""  # of the module: whether it was built with it
    posting_threads: bool = True

    @property
    def gpu_only(self) -> bool:
        return self.memory == ("gpu",)


class MooncakeEndpoint(RealEndpoint):
    """An `Endpoint` on ``mooncake.engine.TransferEngine``.

    Options beside environment variables: ``threads``, how many batches to one peer are under way at once, and
    ``device``, the RDMA devices to use, with commas between them; those that the engine finds if it is empty.

    Over a network `post` queues a transfer for the threads of its peer, so that a peer that has stopped does not
    delay another; one of them posts it and busy-polls until its end.  With *posting* so many threads of the rank
    take its transfers to all peers in turn, over NVLink too, as SGLang's workers do; with 0 the clock's thread posts
    and that of the peer waits, for what does not block asks about the first block of a batch only.  Otherwise over
    NVLink, where no peer takes part and a thread costs more than many batches, the clock's thread posts and asks.  A
    batch id is a pointer that is freed with the answer: it is used once and never leaves its thread.

    The first transfer to a peer waits until the peer has answered `send_probe`.  It makes the engine fetch what the
    peer has registered, under a lock that every transfer takes (0.3.13, ``openSegment`` in transfer_engine_py.cpp):
    all would wait for up to 60 s if the peer had stopped.  The probe does not take that lock.  Both connect within a
    limit of the system's clock: set ahead in those microseconds, it fails what waits for them.
    """

    kind = "mooncake"
    options = ("threads", "device")
    variants = (
        _Transport(
            backend="mooncake_tcp",
            requires=MOONCAKE,
            memory=("host", "gpu"),  # GPU memory is staged through the host, if the wheel was built with CUDA
            notes=_forced,
            name="tcp",
            protocol="tcp",
            environment={"MC_FORCE_TCP": "1"},
            witness=r"TcpTransport: (listen)",
        ),
        _Transport(
            backend="mooncake_nvlink",
            requires=MOONCAKE_CUDA,
            device="gpu",
            memory=("gpu",),
            one_sided=True,
            name="nvlink",
            protocol="rdma",
            environment={"MC_INTRANODE_NVLINK": "1"},  # MC_INTRA_NVLINK, as documented, leaves one on TCP
            witness=r"Using (Intra-Node NVLink) transport",
            flag="SUPPORT_INTRA_NVLINK",
        ),
        _Transport(
            backend="mooncake",
            requires=MOONCAKE,
            device="rdma",
            one_sided=True,
            proves_quiescence=False,
            guest="backends.emulation.guest.engines:MOONCAKE",
            name="rdma",
            protocol="rdma",
            environment={},
            witness=r"RDMA device: (\w+)",
        ),
    )

    def start_engine(self) -> str:
        self._transport = declared(self.variants, self.settings.name)[0]
        self.proves_quiescence = self._transport.proves_quiescence
        options = dict(self.settings.options)
        threads = options.pop("threads", "1")
        if not threads.isdecimal() or int(threads) < 1:
            raise ConfigError(f"backend.options.threads must be a whole number > 0, got {threads!r}")
        self._most = int(threads)
        self._threads = PostingThreads(self.posting or 0, self._most, self._begin, self._serve)
        self._sessions: dict[str, _Session] = {}
        self._tickets: dict[PostedTransfer, int] = {}  # what the clock's thread has posted
        device = options.pop("device", "")
        patience = max(5, math.ceil(self.settings.timeout + PATIENCE))
        defaults = {
            "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",  # 0.3.13 refuses a batch of more than 1024 otherwise
            "MC_TRANSFER_TIMEOUT": str(patience),
            "MC_TCP_PROGRESS_TIMEOUT_SEC": str(patience),
            "MC_LOG_LEVEL": "INFO",
        }
        needed = {**self._transport.environment, **options}
        if self._transport.name == "tcp":  # SGLang sets it where nobody has: any value means TCP to Mooncake
            device, defaults["MC_FORCE_TCP"] = "", needed.pop("MC_FORCE_TCP")
            defaults["MC_TRANSFER_TIMEOUT"] = ENDLESS
        prepare(self.settings.name, needed, defaults)
        native = self._native = self._library().TransferEngine()
        self._sync = {"write": native.batch_transfer_sync_write, "read": native.batch_transfer_sync_read}
        self._async = {"write": native.batch_transfer_async_write, "read": native.batch_transfer_async_read}
        self._ask = native.transfer_check_status
        with captured_stderr() as log:
            code = native.initialize(self.bind, "P2PHANDSHAKE", self._transport.protocol, device)
        text = log()
        if code:
            raise BackendUnavailable(f"Mooncake did not start (code {code}): {text.strip()[-300:]}")
        transports = sorted(set(re.findall(self._transport.witness, text)))
        if not transports:
            raise BackendUnavailable(
                f"Mooncake did not report a transport over {self._transport.name}, so it chose another: "
                f"{text.strip()[-300:]}"
            )
        self._session = f"{self.bind}:{native.get_rpc_port()}"
        if self._transport.gpu_only:
            self.clock.watch(self)
        devices = transports if self._transport.name == "rdma" else []
        return " ".join(["mooncake", installed(*MOONCAKE.distributions), self._transport.name, *devices])

    def _library(self) -> Any:
        try:
            from mooncake import engine
        except ImportError as error:
            raise BackendUnavailable(f"Mooncake cannot be imported ({error}): {MOONCAKE.install}") from error
        flag = self._transport.flag or ("SUPPORT_CUDA" if isinstance(self.device, CudaDevice) else "")
        if flag and not getattr(engine, flag, False):
            raise BackendUnavailable(
                f"backend {self.settings.name!r} on a GPU needs Mooncake built with CUDA, and "
                f"{installed(*MOONCAKE.distributions)} has {flag}=False; {MOONCAKE_CUDA.install}"
            )
        return engine

    def pin(self, buffer: RealBuffer) -> None:
        if self._transport.gpu_only:
            if not isinstance(buffer, CudaBuffer):
                raise RegistrationError(
                    f"backend {self.settings.name!r} takes GPU memory only and {self.rank} is on the host; place it "
                    f"on a GPU, or use backend=mooncake_tcp"
                )
            buffer.kept = True  # peers keep what they have mapped for ever, and look at nothing but its address
        code = self._native.register_memory(buffer.address, buffer.size)
        if code:
            raise RegistrationError(f"Mooncake refused to register {buffer.size} bytes (code {code})")

    def unpin(self, entry: Entry) -> None:
        code = self._native.unregister_memory(entry.buffer.address)
        if code:
            raise RegistrationError(f"Mooncake refused to unregister {entry.region.name!r} (code {code})")

    def engine_address(self) -> bytes:
        return self._session.encode()

    def connect_engine(self, description: bytes) -> _Session:
        session = description.decode()
        return self._sessions.setdefault(session, _Session(session))

    def post(self, transfer: PostedTransfer) -> None:
        transfer.handle = transfer.blocks()
        transfer.prepared = self.clock.now
        session = transfer.peer.handle
        if session.answers:
            self._post(transfer)
            return
        session.waiting.append(transfer)
        if not session.asked:
            session.asked = True
            native, clock = self._native, self.clock

            def probe() -> None:
                clock.call(partial(self._answered, session, native.send_probe(session.session)))

            threading.Thread(target=probe, name="probing", daemon=True).start()

    def _answered(self, session: _Session, code: int) -> None:
        session.answers, session.asked = code == 0, False
        transfers, session.waiting = session.waiting, deque()
        for transfer in transfers:
            if transfer.triggered:  # failed while it waited: nothing has moved, and nothing will
                self.quiesce(transfer)
            elif session.answers:
                self._post(transfer)
            else:
                self.engine_failed(transfer, f"Mooncake got no answer from it (code {code})", moving=False)

    def _post(self, transfer: PostedTransfer) -> None:
        batch = transfer.batch
        if self.posting or not self._transport.gpu_only:
            if self.posting == 0:
                transfer.handle = self._begun(transfer)
            self._threads.put(transfer)
        elif batch.nbytes <= SMALL and len(batch.size) <= FEW and not self._tickets:
            transfer.posted = transfer.prepared
            code = self._sync[transfer.operation](transfer.peer.handle.session, *transfer.handle)
            self._finish(transfer, code, self.clock.now)
        else:
            transfer.peer.handle.waiting.append(transfer)
            self._go_on(transfer.peer.handle)

    def _begun(self, transfer: PostedTransfer) -> int:
        ticket: int = self._async[transfer.operation](transfer.peer.handle.session, *transfer.handle)
        transfer.posted = self.clock.now
        return ticket

    def _go_on(self, session: _Session) -> None:
        while session.waiting and session.under_way < self._most:
            transfer = session.waiting.popleft()
            if transfer.triggered:  # failed while it waited: nothing has moved, and nothing will
                self.quiesce(transfer)
                continue
            if ticket := self._begun(transfer):
                self._tickets[transfer] = ticket
                session.under_way += 1
            else:
                self._finish(transfer, None, transfer.posted)

    def on_lost(self, line: PeerLine) -> None:
        super().on_lost(line)
        if (peer := self.known.by_token.get(line.card.token)) is not None:
            self._threads.leave(peer)

    def inbound_drained(self) -> bool:
        # a peer writes over connections that it opened; an idle one of ours stays when its peer is gone
        return self.proves_quiescence and not half_open(accepted=True)

    def poll(self) -> bool:
        """Report what has ended over NVLink and post what waited for it; return whether anything has.

        All copies of a thread are on one stream, and the engine asks whether it is idle.  So all are asked
        before any goes on: what is posted then would keep the stream from being idle.
        """
        ask, codes = self._ask, dict[PostedTransfer, int]()
        while ended := {
            transfer: code
            for transfer, ticket in self._tickets.items()
            if (code := ask(ticket)) in (_MOVED, _FAILED)
        }:
            for transfer in ended:  # the engine has freed what its ticket points to
                del self._tickets[transfer]
            codes |= ended
        if not codes:
            return False
        for transfer, code in codes.items():
            transfer.peer.handle.under_way -= 1
            self._finish(transfer, 0 if code == _MOVED else code, self.clock.now)
        for session in {transfer.peer.handle for transfer in codes}:
            self._go_on(session)
        return True

    def busy(self) -> bool:
        return bool(self._tickets)

    def _begin(self) -> None:
        self.device.enter()
        keep_for(SLICE)

    def _serve(self, transfer: PostedTransfer) -> None:
        if transfer.triggered and self.posting != 0:  # failed while it waited: nothing has moved, and nothing will
            self.clock.call(partial(self.quiesce, transfer))
            return
        if self.posting:
            transfer.posted = self.clock.now
            code = self._sync[transfer.operation](transfer.peer.handle.session, *transfer.handle)
        else:
            ticket = transfer.handle if self.posting == 0 else self._begun(transfer)
            code = self._native.get_batch_transfer_status([ticket]) if ticket else None
        self.clock.call(partial(self._finish, transfer, code, self.clock.now))

    def _finish(self, transfer: PostedTransfer, code: int | None, at: float) -> None:
        transfer.handle = None
        if code == 0:
            self.complete(transfer, at)
        else:
            what = "did not take" if code is None else "failed"
            self.engine_failed(
                transfer, f"Mooncake {what} a {transfer.operation} of {transfer.batch.nbytes} bytes (code {code})"
            )

    def stop_engine(self, idle: bool) -> None:
        self.clock.unwatch(self)
        self._threads.stop(wait=idle)
        if idle:
            del self._native, self._sync, self._async, self._ask, self._threads
