# SPDX-License-Identifier: Apache-2.0
"""The programs of the conformance suite: what ranks do, on whatever implementation of the waist they run.

A program is a generator that takes its `pdsim.transfer.job.Rank` and plain data, yields the events that it
waits for, and returns plain data, which the tests compare; on a real engine each runs in a process of its own.  A
count of wrong bytes is None where the device keeps no contents.

Programs that belong together have names that say so: one writes *to* a rank (``write_blocks``), the other is
written *by* one (``be_written``).  They use nothing but the interface, so that the same ones hold for a model and
for an engine that is not in this repository.  By what they are about:

- `moving`: bytes arrive, and only where they were sent; notifications and their order
- `refusals`: what must be refused, and must have had no effect
- `living`: channels, devices, addresses and the end of an endpoint
- `losing`: deadlines, killed and stopped ranks, quarantine
- `gathering`: groups and their symmetric memory
"""
