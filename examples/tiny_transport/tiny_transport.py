# SPDX-License-Identifier: Apache-2.0
"""A whole transport in a hundred lines: endpoints ask each other, over ZeroMQ, to store or send bytes."""

from functools import cache, partialmethod

import msgspec
import zmq

from backends.capabilities import Variant
from pdsim.core.clock import Mailbox
from pdsim.core.errors import InvalidBatch, RegistrationError, TransferFailed
from pdsim.transfer import Notification, Peer, Region, Transfer, TransferRecord, WriteSequence


class TinyEndpoint:
    """An `Endpoint` without proof that peers are quiesced; its clock's `Source` of what has arrived."""

    variants, engine, quarantined = (Variant(backend="tiny"),), "tiny", 0

    def __init__(self, *, keys, clock, device, engine, recorder, bind="127.0.0.1"):
        self.rank, self.clock, self.device, self.recorder = keys.name, clock, device, recorder
        self.notifications, self.regions, self.moving, self.context = Mailbox(clock), {}, {}, zmq.Context()
        self.socket = cache(lambda uri: [out := self.context.socket(zmq.PUSH), out.connect(uri)][0])
        self.inbox = self.context.socket(zmq.PULL)
        self.uri = f"tcp://{bind}:{self.inbox.bind_to_random_port(f'tcp://{bind}')}"
        self.fileno, self.busy, self.quiesced = (lambda: self.inbox.FD), bool, (lambda _: clock.event())
        clock.watch(self)

    def register(self, buffer, name):
        if self.context.closed or name in self.regions or buffer.registered:
            raise RegistrationError(f"{name!r}: closed, or the name or the buffer is taken")
        self.regions[name] = Region(self.rank, name, buffer.size, buffer.address, self.device.name), buffer
        buffer.registered = True
        return self.regions[name][0]

    def deregister(self, region):
        if region.name not in self.regions or any(region is local for _, _, local in self.moving.values()):
            raise RegistrationError(f"{region.name!r} is not registered, or in use")
        self.regions.pop(region.name)[1].registered = False

    def address(self):
        return msgspec.json.encode([self.rank, self.uri, [region for region, _ in self.regions.values()]])

    def connect(self, address):
        try:
            name, uri, regions = msgspec.json.decode(address, type=tuple[str, str, list[Region]])
        except (msgspec.MsgspecError, ValueError) as error:
            raise TransferFailed(f"no address: {error}") from None
        return Peer(name, {region.name: region for region in regions}, self.socket(uri))

    def start(self, operation, peer, batch, notify=b"", *, timeout=None, label=""):
        local, remote = (batch.source, batch.target)[:: 1 if operation == "write" else -1]
        if local.owner != self.rank or peer.regions.get(remote.name) != remote:
            raise InvalidBatch(f"no {operation} between {local} and {remote}")
        if local.name not in self.regions:
            raise RegistrationError(f"{local.name!r} is not registered")
        transfer, read = Transfer(self.clock, batch, label), self.regions[local.name][1].read
        blocks = zip(batch.source_offset.tolist(), batch.target_offset.tolist(), batch.size.tolist(), strict=True)
        asked = [(to, read(at, size)) if operation == "write" else (at, size) for at, to, size in blocks]
        self.moving[id(transfer)] = transfer, operation, local
        request = operation, self.uri, id(transfer), self.rank, remote.name, asked, notify
        peer.handle.send(msgspec.msgpack.encode(request))
        return transfer

    write, read = partialmethod(start, "write"), partialmethod(start, "read")

    def write_sequence(self, peer, parts, times=()):
        return WriteSequence(self.clock, self, peer, parts, times).start()

    def serve(self, operation, uri, number, sender, name, blocks, notify):
        act = getattr(self.regions.get(name, (None, None))[1], "write" if operation == "write" else "read", None)
        answer = "end", number, bool(act), [act(*block) for block in blocks if act]
        self.socket(uri).send(msgspec.msgpack.encode(answer))
        if act and notify:
            self.notifications.put(Notification(sender, notify))

    def end(self, number, known, pieces):
        transfer, operation, local = self.moving.pop(number)
        batch, now, status = transfer.batch, self.clock.now, "ok" if known else "TransferFailed"
        for at, piece in zip(batch.target_offset.tolist(), pieces, strict=known) if operation == "read" else ():
            self.regions[local.name][1].write(at, piece)
        what = self.engine, operation, batch.source.owner, batch.target.owner, batch.nbytes, len(batch)
        record = TransferRecord(*what, *[transfer.posted] * 3, now, now, status, transfer.label)
        self.recorder.transfer(record)
        transfer.settle()
        transfer.succeed(record) if known else transfer.fail(TransferFailed("the region was withdrawn"))

    def poll(self):
        progressed = False
        while not self.context.closed and self.inbox.get(zmq.EVENTS) & zmq.POLLIN:
            progressed, (operation, *message) = True, msgspec.msgpack.decode(self.inbox.recv())
            self.end(*message) if operation == "end" else self.serve(operation, *message)
        return progressed

    def close(self):
        if not self.context.closed:
            self.clock.unwatch(self)
            for _, buffer in self.regions.values():
                buffer.registered = False
            self.context.destroy(linger=2000)
