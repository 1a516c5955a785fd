# SPDX-License-Identifier: Apache-2.0
"""The common transfer interface; `pdsim.transfer.transfer` has its classes and their contract."""

from pdsim.transfer.batch import Batch, Buffer, Region
from pdsim.transfer.transfer import (
    Batches,
    Channel,
    Device,
    Endpoint,
    Message,
    Notification,
    Peer,
    Program,
    Recorder,
    Spill,
    Transfer,
    TransferRecord,
    WriteSequence,
)

__all__ = [
    "Batch",
    "Batches",
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
    "Spill",
    "Transfer",
    "TransferRecord",
    "WriteSequence",
]
