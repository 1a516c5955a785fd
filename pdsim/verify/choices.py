# SPDX-License-Identifier: Apache-2.0
"""Whether what is chosen is what the policy says: a part of `pdsim.verify.invariants`.

The costs by which pdsim's own policies choose are stated once more here.  What a policy knows is taken from the
router's accounts, which `pdsim.verify.agreement` compares with its requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

from pdsim.kv.messages import instance_of
from pdsim.serving.requests import HASHED
from pdsim.serving.router import Router


class ChoiceChecker:
    """Calls *report* with an invariant (I7 or I11) and a text for what another policy would have chosen."""

    def __init__(self, report: Callable[[str, str], None]) -> None:
        self._report = report
        self._router: Any = None
        self._turns = Counter[tuple[str, int]]()  # by side and replica: choices
        self._sent: dict[tuple[str, int, str], dict[int, int]] = {}  # and instance: tokens of blocks sent there

    def joined(self, member: Any) -> None:
        """Watch *member*, a rank's program."""
        if isinstance(member, Router):
            self._router, registry = member, member.registry
            for side in (registry.prefills, registry.decodes):
                watched: Any = side
                watched._exchange = partial(self._exchanges, watched, watched._exchange)
            watched = registry
            watched.choose = partial(self._chooses, registry.choose)
        elif member.scheduler is not None:
            policy: Any = member.scheduler.policy
            policy.prefill = partial(self._takes, member, policy.prefill)

    # --- the router ---

    def _exchanges(self, side: Any, exchange: Callable[[float], None], now: float) -> None:
        due = side._sync and now - side._exchanged >= side._sync
        exchange(now)
        if due and any(view != side.load for view in side._views):
            self._report("I11", f"replicas of the router exchange loads {side.load}, and know {side._views}")

    def _chooses(
        self,
        choose: Callable[..., Any],
        room: int,
        tokens: int = 1,
        blocks: tuple[int, ...] = (),
        replica: int = 0,
        now: float = 0.0,
    ) -> Any:
        registry, job = self._router.registry, self._router.job
        prefills, decodes = registry.prefills, registry.decodes
        sides = ("prefill", prefills, 1 if job.query_dp else job.prefill_dp), ("decode", decodes, job.decode_dp)
        able: dict[str, list[str]] = {}
        for name, side, groups in sides:
            if side._views:
                side._exchange(now)
            serving = [one for one in side.names if one in side.load and one not in registry.resting]
            able[name] = [one for one in serving if side.names.index(one) % groups == room % groups] or serving
        first, other = job.policy, job.decode_policy or job.policy
        loads = [(side._views[replica] if side._views else side.load) for _, side, _ in sides]
        loads = [
            {one: load.get(one, 0) for one in able[name]} for load, (name, *_) in zip(loads, sides, strict=True)
        ]
        waits = dict(registry._under_way)
        pair = choose(room, tokens, blocks, replica, now)
        if pair is None:
            return None
        own = tuple(map(instance_of, pair))
        if first == other == "first_token":
            queue = {
                one: (loads[0][one] + tokens - self._cached("prefill", replica, one, blocks, tokens))
                * registry._seconds
                for one in able["prefill"]
            }
            nbytes = job.shape.token_bytes(job.prefill.tp)

            def cost(pair: tuple[str, str]) -> tuple[float, int]:
                rate = job.rates[pair[0]][pair[1]] if job.rates else 0.0
                way = (waits.get(pair[1], 0) + tokens) * nbytes / rate if rate else 0.0
                return queue[pair[0]] + way, loads[1][pair[1]]

            self._compare(room, first, own, min(product(able["prefill"], able["decode"]), key=cost))
            self._insert("prefill", replica, own[0], blocks, tokens)
            return pair
        rates = job.rates.get(own[0], {})
        for (name, *_), policy, load, chosen in zip(sides, (first, other), loads, own, strict=True):
            ways = (
                {one: (waits.get(one, 0) + tokens) / rates[one] for one in able[name]}
                if name == "decode" and rates
                else {}
            )
            self._check(room, policy, name, replica, able[name], load, ways, chosen, (blocks, tokens))
        return pair

    def _check(
        self,
        room: int,
        policy: str,
        side: str,
        replica: int,
        able: list[str],
        load: dict[str, int],
        ways: dict[str, float],
        chosen: str,
        prompt: tuple[tuple[int, ...], int],
    ) -> None:
        turn = self._turns[side, replica]
        self._turns[side, replica] += 1
        if chosen not in able:
            self._compare(room, "who may have it", (chosen,), able)
        elif policy == "least_tokens":
            self._compare(room, policy, chosen, min(able, key=load.__getitem__))
        elif policy == "round_robin":
            self._compare(room, policy, chosen, able[turn % len(able)])
        elif policy == "power_of_two" and len(able) > 1 and load[chosen] > sorted(load.values())[-2]:
            self._compare(room, policy, chosen, "one that is less busy")
        elif policy == "transfer_aware":
            self._compare(room, policy, chosen, min(able, key=lambda one: (ways.get(one, 0.0), load[one])))
        elif policy in ("cache_aware", "first_token"):
            costs = {one: load[one] - self._cached(side, replica, one, *prompt) for one in able}
            self._compare(room, policy, chosen, min(able, key=costs.__getitem__))
            self._insert(side, replica, chosen, *prompt)

    def _compare(self, room: int, policy: str, chosen: Any, own: Any) -> None:
        if chosen != own:
            self._report("I11", f"room {room} is given to {chosen}, by {policy} to {own}")

    def _cached(self, side: str, replica: int, name: str, blocks: tuple[int, ...], tokens: int) -> int:
        sent, total = self._sent.get((side, replica, name), {}), 0
        for block in blocks:
            total += sent.get(block, 0)
            if sent.get(block, 0) < HASHED:
                break
        return min(total, tokens)

    def _insert(self, side: str, replica: int, name: str, blocks: tuple[int, ...], tokens: int) -> None:
        sent = self._sent.setdefault((side, replica, name), {})
        for place, block in enumerate(blocks):
            sent[block] = max(sent.get(block, 0), min(HASHED, tokens - place * HASHED))

    # --- schedulers ---

    def _takes(self, member: Any, prefill: Callable[..., Any], queue: Sequence[Any], budget: int) -> Any:
        taken = prefill(queue, budget)
        by_priority = member.job.engine.scheduler == "priority"
        first = max(
            range(len(queue)),
            key=lambda place: ((queue[place].done > 0, queue[place].priority) if by_priority else (), -place),
        )
        own = first, min(budget, queue[first].request.input - queue[first].done)
        if taken != own:
            self._report("I7", f"{member.rank.name} computes {taken} of its queue next, by its policy {own}")
        return taken
