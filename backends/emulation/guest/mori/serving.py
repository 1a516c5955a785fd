# SPDX-License-Identifier: Apache-2.0
"""MORI in the RDMA guest: the server of its jobs, and a device that it can find its way from."""

from __future__ import annotations

from backends.emulation.guest.machine import DEVICE, Guest, GuestFailed
from backends.emulation.guest.mori import shims, space
from backends.emulation.guest.server import Server

__all__ = ["RECIPE"]

# MORI walks up from the device's folder until it comes to a PCI address, and never ends where there is none, as with
# soft-RoCE: so the guest shows the device below the address of the card that it is on.
_CARD = f"""
folder=$(readlink -f /sys/class/infiniband/{DEVICE})
card=$(basename "$(readlink -f /sys/class/net/eth0/device/..)")
mkdir -p "/run/cards/$card/{DEVICE}"
mount --bind "$folder" "/run/cards/$card/{DEVICE}"
mount -t tmpfs tmpfs /sys/class/infiniband
ln -s "/run/cards/$card/{DEVICE}" /sys/class/infiniband/{DEVICE}
"""
_ENVIRONMENT = {
    "PYTHONPATH": str(space.REPOSITORY),
    "MORI_IO_CP_TIMEOUT_MS": "60000",  # emulated processors are slow to make queue pairs
    # the other's thread keeps those that connect from a lock, if processors are few
    "MORI_IO_POLL_CQ_MODE": "event",
    "MORI_IO_QP_PER_TRANSFER": "1",
    "MORI_IO_NUM_WORKER_THREADS": "1",
}


class _Mori:
    """The `Recipe`: MORI runs on a Python of its own, with libraries that the guest's machine can do without."""

    def server(self, guest: Guest) -> Server:
        python, libraries = space.python()
        environment = {**_ENVIRONMENT, "LD_PRELOAD": str(libraries / shims.PAUSE)}
        done = guest.run("bash", "-ec", _CARD, timeout=60)
        if done.status:
            raise GuestFailed(f"the guest's RDMA device was not given a place on a bus: {done.output}")
        return Server(guest, "mori", "mori.io", [str(python)], environment)

    def missing(self, backend: str) -> str:  # noqa: ARG002 all of its backends need the same
        return space.missing_requirements()


RECIPE = _Mori()
