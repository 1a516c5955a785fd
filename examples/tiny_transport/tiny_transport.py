# SPDX-License-Identifier: Apache-2.0
"""A whole transport in a hundred lines of code: endpoints ask each other, over ZeroMQ, to store or send bytes."""

import msgspec
import zmq

from backends.capabilities import Variant
from pdsim.core.errors import InvalidBatch, RegistrationError, TransferFailed
from pdsim.core.mailbox import Mailbox
from pdsim.transfer import Notification, Peer, Region, Transfer, TransferRecord, WriteSequence


class TinyEndpoint:
    """An `Endpoint`, and the `Source` from which its clock learns what has arrived."""

    variants = (Variant(backend="tiny"),)
    engine, quarantined = "tiny", 0

    def __init__(self, *, keys, clock, device, engine, recorder, bind="127.0.0.1"):
        self.rank, self.clock, self.device, self.recorder = keys.name, clock, device, recorder
        self.notifications, self.regions, self.moving, self.sockets = Mailbox(clock), {}, {}, {}
        self.context, self.number, self.closed = zmq.Context(), 0, False
        self.inbox = self.context.socket(zmq.PULL)
        self.uri = f"tcp://{bind}:{self.inbox.bind_to_random_port(f'tcp://{bind}')}"
        self.fileno, self.busy = (lambda: self.inbox.FD), (lambda: False)
        clock.watch(self)

    def register(self, buffer, name):
        if self.closed or name in self.regions or buffer.registered:
            raise RegistrationError(f"{name!r}: closed, or the name or the buffer is taken")
        region = Region(self.rank, name, buffer.size, buffer.address, self.device.name)
        self.regions[name], buffer.registered = (region, buffer), True
        return region

    def deregister(self, region):
        if region.name not in self.regions or any(region is local for _, local, *_ in self.moving.values()):
            raise RegistrationError(f"{region.name!r} is not registered, or in use")
        self.regions.pop(region.name)[1].registered = False

    def address(self):
        return msgspec.json.encode([self.rank, self.uri, [region for region, _ in self.regions.values()]])

    def connect(self, address):
        try:
            name, uri, regions = msgspec.json.decode(address, type=tuple[str, str, list[Region]])
        except (msgspec.MsgspecError, ValueError) as error:
            raise TransferFailed(f"no address: {error}") from None
        return Peer(name, {region.name: region for region in regions}, uri)

    def write(self, peer, batch, notify=b"", *, timeout=None, label=""):
        return self.post("write", peer, batch, batch.source, batch.target, notify, label)

    def read(self, peer, batch, *, timeout=None, label=""):
        return self.post("read", peer, batch, batch.target, batch.source, b"", label)

    def write_sequence(self, peer, batches, notify=b"", *, label="", progress=None):
        return WriteSequence(self.clock, self, peer, batches, notify, label, progress).start()

    def quiesced(self, peer):
        return self.clock.event()  # this transport proves nothing

    def close(self):
        if not self.closed:
            self.closed = True
            self.clock.unwatch(self)
            for _, buffer in self.regions.values():
                buffer.registered = False
            self.context.destroy(linger=2000)

    def post(self, operation, peer, batch, local, remote, notify, label):
        if local.owner != self.rank or peer.regions.get(remote.name) != remote:
            raise InvalidBatch(f"no {operation} between {local} and {remote}")
        if local.name not in self.regions:
            raise RegistrationError(f"{local.name!r} is not registered")
        begun, transfer, self.number = self.clock.now, Transfer(self.clock, batch, label), self.number + 1
        there = batch.target_offset if operation == "write" else batch.source_offset
        data = self.get(local.name, batch.source_offset, batch.size) if operation == "write" else b""
        request = [self.uri, self.number, self.rank, remote.name, there.tolist(), batch.size.tolist(), notify, data]
        self.send(peer.handle, operation, *request)
        self.moving[self.number] = transfer, local, operation, peer.name, begun, self.clock.now
        return transfer

    def serve(self, operation, uri, number, sender, name, offsets, sizes, notify, data):
        known = name in self.regions
        if known and operation == "write":
            self.put(name, offsets, sizes, data)
            if notify:
                self.notifications.put(Notification(sender, notify))
        answer = self.get(name, offsets, sizes) if known and operation == "read" else b""
        self.send(uri, "end", number, known, answer)

    def end(self, number, known, data):
        transfer, local, operation, peer, begun, posted = self.moving.pop(number)
        batch, now = transfer.batch, self.clock.now
        if operation == "read" and known:
            self.put(local.name, batch.target_offset, batch.size, data)
        route = (self.rank, peer) if operation == "write" else (peer, self.rank)
        times, status = (begun, begun, posted, now, now), "ok" if known else "TransferFailed"
        sizes = batch.nbytes, len(batch)
        record = TransferRecord(self.engine, operation, *route, *sizes, *times, status, transfer.label)
        self.recorder.transfer(record)
        transfer.settle()
        transfer.succeed(record) if known else transfer.fail(TransferFailed("the region was withdrawn"))

    def get(self, name, offsets, sizes):
        return b"".join(self.regions[name][1].read(int(at), int(n)) for at, n in zip(offsets, sizes, strict=True))

    def put(self, name, offsets, sizes, data, done=0):
        for at, n in zip(offsets, sizes, strict=True):
            self.regions[name][1].write(int(at), data[done : done + int(n)])
            done += int(n)

    def send(self, uri, *message):
        if uri not in self.sockets:
            self.sockets[uri] = self.context.socket(zmq.PUSH)
            self.sockets[uri].connect(uri)
        self.sockets[uri].send(msgspec.msgpack.encode(message))

    def poll(self):
        found = False
        while not self.closed and self.inbox.get(zmq.EVENTS) & zmq.POLLIN:
            operation, *message = msgspec.msgpack.decode(self.inbox.recv())
            self.end(*message) if operation == "end" else self.serve(operation, *message)
            found = True
        return found
