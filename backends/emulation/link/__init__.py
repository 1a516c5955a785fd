# SPDX-License-Identifier: Apache-2.0
"""A link of known rate and delay between network namespaces, made in user space.

`namespaces` makes the nodes, `packet_forwarder` is the process that carries packets between them, and
`emulated_link` starts and ends both for a job.
"""
