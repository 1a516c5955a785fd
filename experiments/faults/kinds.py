# SPDX-License-Identifier: Apache-2.0
"""The kinds of faults and unusual circumstances of `experiment=faults`, and their effects.

`docs/faults.md` has this table.  New kinds are appended: each is drawn in this order, so that the kinds of earlier
seeds stay as they were.
"""

from __future__ import annotations

__all__ = ["KINDS", "RARE"]

KINDS = {
    "delays": "control messages arrive late, in order within a socket only",
    "late": "completions arrive late, even after the deadline",
    "stray": "bytes are read and land at any instant between post and completion",
    "shuffle": "events of one instant happen in any order of ranks",
    "slow": "a rank computes and posts up to fifty times slower for a while",
    "squeezes": "a link is cut, or a hundred times slower, for a while",
    "aborts": "a quarter of the users leave",
    "kills": "a rank is killed",
    "restarts": "the ranks of an instance that lost one start again",
    "torn": "a transfer moves in two to four parts, at different instants",
    "losses": "one rank of each of several instances is killed",
    "together": "all ranks of a prefill and a decode instance are killed at once and start again",
    "silences": "a rank's control messages are held for up to two deadlines; others may give its instance up",
    "router": "the router is killed; every rank ends by itself",
    "broken": "the engine reports failed transfers; none, some or all of their bytes have moved",
    "full": "the engine's send queue is short: posting waits, or is refused",
    "layouts": "PP with CP, data parallelism, decode stages, three instances a side",
    "policies": "metadata over the control channel; notification by message or poll",
    "limits": "rooms have time limits for decode pages and for arrival",
    "held": "decode holds some first pages, which are not sent",
    "nodes": "the sides are on two nodes, joined by RDMA",
    "edges": "lengths are multiples of page and chunk, or one more; outputs have one or two tokens",
    "scatter": "pools hold little more than the longest request; scattering is as slow as the wire",
    "pauses": "a rank stands still for up to two deadlines, as after SIGSTOP; its posted transfers go on",
    "grows": "decode's pages grow with the tokens; preempted KV is computed again or moved to host memory",
    "hosts": "host costs of SGLang's and vLLM's loops",
    "pulls": "decode reads from prefill, under leases, and some leases end early",
    "engines": "engines with and without order, with threads and queues, and with slow reads",
    "routes": "other routing policies, unknown output lengths, fewer retries or none",
}
"""Effect by name."""

RARE = {"router": 0.15, "silences": 0.5, "pauses": 0.5}
"""By how much less likely than the others these are: little can be checked after the loss of the router."""
