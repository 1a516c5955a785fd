# SPDX-License-Identifier: Apache-2.0
"""The kinds of faults and unusual circumstances of `experiment=faults`, and their effects.

`docs/faults.md` has this table.  New kinds are appended: each is drawn in this order, so that the kinds of earlier
seeds stay as they were.
"""

from __future__ import annotations

__all__ = ["KINDS", "RARE"]

KINDS = {
    "delays": "control messages arrive late; order holds within a socket only",
    "late": "completions arrive late, also after the deadline: bytes land after the time-out",
    "stray": "bytes are read and land at any instant between post and completion",
    "shuffle": "events of one instant on several ranks happen in any order",
    "slow": "a rank computes and posts up to fifty times slower for a while",
    "squeezes": "a link is cut, or a hundred times slower, for a while",
    "aborts": "a quarter of the users leave",
    "kills": "a rank is killed",
    "restarts": "the ranks of an instance that lost one start again",
    "torn": "a transfer moves in two to four parts, each at an instant of its own",
    "losses": "one rank of each of several instances is killed",
    "together": "all ranks of a prefill and a decode instance are killed at one instant and start again",
    "silences": "no control message reaches or leaves a rank for up to two deadlines, then all do; its instance may "
    "be given up meanwhile though it lives, writes, and comes back",
    "router": "the router is killed; every rank ends by itself",
    "broken": "the engine reports transfers as failed of which none, some or all bytes have moved",
    "full": "the engine's send queue holds few descriptors: posting waits, or is refused",
    "layouts": "PP with CP, data parallelism and several stages on decode, three instances a side",
    "policies": "metadata over the control channel with notification by message or poll",
    "limits": "rooms have time limits for pages at decode and for all to arrive",
    "held": "decode holds some first pages of requests, which are not sent",
    "nodes": "the two sides are on two nodes, and KV moves over RDMA",
    "edges": "lengths are multiples of page and chunk, or one more; outputs have one or two tokens",
    "scatter": "pools hold little more than the longest request, and scattering is as slow as the wire",
    "pauses": "a rank stands still for up to two deadlines, as after SIGSTOP, and goes on; what it has posted goes "
    "on meanwhile, and it may be given up",
    "grows": "decode's pages grow with the tokens; a request without pages for the next is preempted, and its KV "
    "computed again, or moved to host memory and back",
    "hosts": "host costs of the loops of SGLang and vLLM: forwards chosen ahead, KV posted in turn, slow launches, "
    "steps between the look that finds KV and the one that uses it",
    "pulls": "decode reads what prefill lends it, under leases of which some end early",
    "engines": "the transfer engine keeps order or not, posts with several threads, has several queues, and reads "
    "cost more than writes; slices of pages are written plane by plane",
    "routes": "another routing policy, output lengths that it does not know, and fewer retries or none",
}
"""Effect by name."""

RARE = {"router": 0.15, "silences": 0.5, "pauses": 0.5}
"""By how much less likely than the others these are: little can be checked after the loss of the router."""
