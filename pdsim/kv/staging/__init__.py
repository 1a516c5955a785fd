# SPDX-License-Identifier: Apache-2.0
"""The staged path: gather into a staging buffer, one write, scatter.

`ring` has slots, blocks and buffers, `receiver` the decode side; the prefill side is part of `pdsim.kv.push`.
"""
