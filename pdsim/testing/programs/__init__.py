# SPDX-License-Identifier: Apache-2.0
"""The programs of the conformance suite: what ranks do, on whatever implementation of the waist they run.

A program is a generator that takes its `pdsim.transfer.job.Rank` and plain data, yields the events that it
waits for, and returns plain data, which the tests compare.  Tests name programs by their path
(``pdsim.testing.programs:echo``), because on a real engine each runs in a process of its own.  A
count of wrong bytes is None where the device keeps no contents.

Programs that belong together have names that say so: one writes (``write_blocks``), the other is
written to (``be_written``).  They use nothing but the interface, so that the same ones hold for a
model and for an engine that is not in this repository.  By what they are about:

- `moving`: bytes arrive, and only where they were sent; notifications and their order
- `refusals`: what must be refused, and must have had no effect
- `living`: channels, devices, addresses and the end of an endpoint
- `losing`: deadlines, killed and stopped ranks, quarantine
- `gathering`: groups and their symmetric memory
"""

from pdsim.testing.programs.gathering import gather_everything, gather_late, gather_until_lost
from pdsim.testing.programs.living import (
    be_reconnected,
    close_twice,
    compute_in_turn,
    copy_within,
    echo,
    receive_numbers,
    reconnect,
    send_back,
    send_numbers,
    send_to_nobody,
    touch_outside,
    use_memory,
)
from pdsim.testing.programs.losing import (
    be_late,
    be_lost,
    be_other,
    be_stopped,
    be_target,
    be_victim,
    fail,
    lose_one_of_two,
    outlive,
    stop_peer,
    write_after_loss,
    write_and_close,
    write_until_killed,
    write_until_lost,
)
from pdsim.testing.programs.moving import (
    be_hub,
    be_notified,
    be_one_of_many,
    be_read,
    be_written,
    be_written_in_sequence,
    cross_writes,
    notify_at_once,
    notify_in_turn,
    read_blocks,
    write_blocks,
    write_in_sequence,
    write_silently,
    write_to_hub,
    write_to_many,
)
from pdsim.testing.programs.refusals import (
    be_spared,
    connect_to_garbage,
    register_late,
    register_oddly,
    withdraw,
    withdraw_own_region,
    write_nonsense,
    write_to_latecomer,
    write_to_withdrawn,
)
from pdsim.testing.programs.tools import KiB, MiB

__all__ = [
    "KiB",
    "MiB",
    "be_hub",
    "be_late",
    "be_lost",
    "be_notified",
    "be_one_of_many",
    "be_other",
    "be_read",
    "be_reconnected",
    "be_spared",
    "be_stopped",
    "be_target",
    "be_victim",
    "be_written",
    "be_written_in_sequence",
    "close_twice",
    "compute_in_turn",
    "connect_to_garbage",
    "copy_within",
    "cross_writes",
    "echo",
    "fail",
    "gather_everything",
    "gather_late",
    "gather_until_lost",
    "lose_one_of_two",
    "notify_at_once",
    "notify_in_turn",
    "outlive",
    "read_blocks",
    "receive_numbers",
    "reconnect",
    "register_late",
    "register_oddly",
    "send_back",
    "send_numbers",
    "send_to_nobody",
    "stop_peer",
    "touch_outside",
    "use_memory",
    "withdraw",
    "withdraw_own_region",
    "write_after_loss",
    "write_and_close",
    "write_blocks",
    "write_in_sequence",
    "write_nonsense",
    "write_silently",
    "write_to_hub",
    "write_to_latecomer",
    "write_to_many",
    "write_to_withdrawn",
    "write_until_killed",
    "write_until_lost",
]
