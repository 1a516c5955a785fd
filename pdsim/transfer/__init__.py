# SPDX-License-Identifier: Apache-2.0
"""The common transfer interface; `pdsim.transfer.transfer` has its classes and their contract."""

from pdsim.transfer.batch import Batch, Buffer, Region
from pdsim.transfer.transfer import (
    Channel,
    Device,
    Endpoint,
    Message,
    Notification,
    Peer,
    Program,
    Recorder,
    Repeated,
    Series,
    Transfer,
    TransferRecord,
)

__all__ = [
    "Batch",
    "Buffer",
    "Channel",
    "Device",
    "Endpoint",
    "Message",
    "Notification",
    "Peer",
    "Program",
    "Recorder",
    "Region",
    "Repeated",
    "Series",
    "Transfer",
    "TransferRecord",
]
