# SPDX-License-Identifier: Apache-2.0
"""Series of writes that share posting threads or links, worked out together from one change to the next.

Ranks of an instance do the same at the same time, so series that are alike in all that their times depend on are one
`Lane`: `fold` refines colours of series, threads and links until equal colours mean equal times (the coarsest
equitable partition, on which max-min rates and queues of threads are those of the whole).
"""

from __future__ import annotations

from collections import Counter
from math import inf
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    Series: TypeAlias = Any  # `pdsim.sim.sequence`, which imports this module

RESTS, WAITS, POSTS, MOVES = range(4)
"""What a write does until the time `Lane.at`: it completes, is to be submitted, is posted, or is on the wire.

Of what is due at one instant flows end last.
"""

SAME: Final = 1.0 + 1e-15
"""Flows that end within a few roundings of one another end together."""

Row = tuple[float, float, float, float, float]
"""When a write was submitted, posted, on the wire, off the wire and complete."""

State = tuple[int, int, float, float, float, float, float, float, float, float, float]
"""The fields of `Lane.state`."""


class Lane:
    """Series that are alike: one of them is worked out for all.

    They go through the *thread* and the *links* with these numbers in their `Crossing`.
    """

    def __init__(
        self, members: Sequence[Series], cap: float = inf, thread: int = 0, links: Sequence[int] = ()
    ) -> None:
        one = members[0]
        self.members = members
        self.thread = thread
        self.links = links
        self.bit = 1  # in its `Crossing`
        self.rows: list[Row] = []  # writes that are complete
        self.kinds = one.kinds
        self.times = one.times
        self.sizes = one.sizes
        self.postings = one.postings
        self.cap = cap  # of the rate of one: what it shares with nobody
        self.overlap, self.latency, self.limit = one.overlap, one.latency, one.limit
        _, self.after, self.wake = one.sleep
        self.state = one.state

    @property
    def state(self) -> State:
        """Which write it is at, what that does until when, its stages, its flow, since when its engine rests."""
        stages = self.submitted, self.posted, self.begin, self.end
        return self.number, self.phase, self.at, *stages, self.left, self.rate, self.since, self.idle

    @state.setter
    def state(self, state: State) -> None:
        self.number, self.phase, self.at, self.submitted, self.posted, self.begin, self.end = state[:7]
        self.left, self.rate, self.since, self.idle = state[7:]

    def go_on(self, at: float, free: list[float]) -> None:
        """Submit the next write at the time *at*, or wait until it may be; *free* is when each thread is."""
        if self.times and (then := self.times[self.number]) > at:
            self.phase, self.at = WAITS, then
            if then - self.idle > self.after:
                self.idle = -inf  # since when it sleeps makes no difference between lanes
            return
        start = max(at, free[self.thread])
        self.submitted = at
        self.posted = free[self.thread] = start + self.postings[self.kinds[self.number]]
        begin = start if self.overlap else self.posted
        if begin - self.idle > self.after:
            begin += self.wake
        self.phase, self.at, self.begin, self.idle = POSTS, begin, begin, begin


class Crossing:
    """Lanes that share threads or links, from the time *now* until one of them is over.

    *free* is when each thread is free, *links* the capacity of each link and how many series of each lane pass it.
    """

    def __init__(
        self, lanes: list[Lane], free: list[float], links: list[tuple[float, Mapping[int, int]]], now: float
    ) -> None:
        self.lanes = lanes
        for number, lane in enumerate(lanes):
            lane.bit = 1 << number
        self.until = now
        self._since = now
        self._links = links
        self._free = free
        self._moving = 0  # a bit for each lane whose flow is on the wire
        self._rates: dict[int, list[tuple[Lane, float]]] = {}
        self._before: tuple[list[float], list[State]] = [], []
        self._late = inf  # when a write has taken so long that it may time out once something meets it

    def foresee(self) -> bool:
        """Work out all until the first lane is over; return False if a write takes too long before, at `until`."""
        self._before = list(self._free), [lane.state for lane in self.lanes]
        self._load()
        self._late = inf
        self.until = self._run(inf)
        for lane in self.lanes:
            if lane.phase != WAITS and self.until - lane.submitted > lane.limit:
                self._late = min(self._late, lane.submitted + lane.limit)
        if self._late == inf:
            return True
        late = max(self._since, self._late)
        self.stop(late)
        self.until = late
        return False

    def stop(self, now: float) -> None:
        """Undo what happens at *now* or later."""
        if now < self.until:
            free, states = self._before
            self._free[:] = free
            for lane, state in zip(self.lanes, states, strict=True):
                lane.state = state
                lane.rows.clear()
            self._load()
            self._run(now)
        for lane in self.lanes:
            for member in lane.members:
                member.thread.free = self._free[lane.thread]

    def _load(self) -> None:
        self._moving = sum([lane.bit for lane in self.lanes if lane.phase == MOVES])
        self._share(self._since)

    def _run(self, until: float) -> float:
        # Go on to *until*, or until the first lane is over, and return when that is.
        lanes, free, single = self.lanes, self._free, len(self.lanes) == 1
        while True:
            at, lane = until, None
            for one in lanes:
                due = one.at
                if due < at:
                    at, lane = due, one
                elif due == at and lane and (one.phase, one.begin) < (lane.phase, lane.begin):
                    lane = one
            if lane is None:
                return until
            phase = lane.phase
            if phase == MOVES:
                self._moving ^= lane.bit
                lane.phase, lane.end, lane.rate = RESTS, at, 0.0
                if self._moving:
                    for one in lanes:
                        if one.phase == MOVES and one.at <= at * SAME:
                            one.at = at
                    self._share(at)
                lane.idle = max(at, lane.posted)
                lane.at = lane.idle + lane.latency
            elif phase == POSTS:
                if single and self._alone(lane, until):
                    continue
                lane.left, lane.rate, lane.since = lane.sizes[lane.kinds[lane.number]], 0.0, at
                lane.phase = MOVES
                self._moving ^= lane.bit
                self._share(at)
            elif phase == WAITS:
                lane.go_on(at, free)
            elif self._complete(lane, at):
                for one in lanes:  # all that are over now are reported together
                    if one.at == at and one.phase == RESTS and one.number + 1 == len(one.kinds):
                        self._complete(one, at)
                return at
            else:
                lane.go_on(at, free)

    def _complete(self, lane: Lane, at: float) -> bool:
        # End a write of *lane*; return whether that was the last.
        lane.rows.append((lane.submitted, lane.posted, lane.begin, lane.end, at))
        if at - lane.submitted > lane.limit:
            self._late = min(self._late, lane.submitted + lane.limit)
        lane.number += 1
        if lane.number < len(lane.kinds):
            return False
        lane.phase, lane.at = WAITS, inf
        return True

    def _alone(self, lane: Lane, until: float) -> bool:
        # As `_run`, for the writes before the last that are complete before *until*; return whether there are any.
        rate, free, rows, before = self._solve(1)[0][1], self._free, lane.rows, lane.number
        kinds, times, sizes, postings, latency = lane.kinds, lane.times, lane.sizes, lane.postings, lane.latency
        overlap, after, wake, limit = lane.overlap, lane.after, lane.wake, lane.limit
        number, thread, last = before, lane.thread, len(lane.kinds) - 1
        submitted, posted, begin, ready = lane.submitted, lane.posted, lane.begin, free[lane.thread]
        while number < last:
            end = begin + sizes[kinds[number]] / rate
            idle = end
            if posted > end:
                idle = posted
            complete = idle + latency
            if complete >= until or complete - submitted > limit:
                break
            rows.append((submitted, posted, begin, end, complete))
            number += 1
            submitted = times[number] if times and times[number] > complete else complete
            lane.number, lane.end, lane.idle = number, end, idle
            if submitted >= until:
                free[thread] = ready
                lane.go_on(complete, free)
                return True
            start = max(submitted, ready)
            posted = ready = start + postings[kinds[number]]
            begin = start if overlap else posted
            if begin - idle > after:
                begin += wake
        if number > before:
            free[thread] = ready
            lane.submitted, lane.posted, lane.begin = submitted, posted, begin
            lane.phase, lane.at, lane.idle = POSTS, begin, begin
        return number > before

    def _share(self, now: float) -> None:
        rates = self._rates.get(self._moving)
        if rates is None:
            rates = self._rates[self._moving] = self._solve(self._moving)
        for lane, rate in rates:
            if rate != lane.rate:
                lane.left -= lane.rate * (now - lane.since)
                lane.rate, lane.since = rate, now
                lane.at = now + max(lane.left, 0.0) / rate

    def _solve(self, mask: int) -> list[tuple[Lane, float]]:
        # Max-min rates: all that are left get as much as the fullest link, or the lowest cap, lets them.
        lanes = self.lanes
        left = moving = [number for number in range(len(lanes)) if mask >> number & 1]
        rates: dict[int, float] = {}
        free = [capacity for capacity, _ in self._links]
        flows = [0] * len(free)
        for number in moving:
            for link in lanes[number].links:
                flows[link] += self._links[link][1][number]
        while left:
            level, tight = min([lanes[number].cap for number in left]), -1
            for link, count in enumerate(flows):
                if count and free[link] / count < level:
                    level, tight = free[link] / count, link
            for number in left:
                lane = lanes[number]
                if tight in lane.links if tight >= 0 else lane.cap == level:
                    rates[number] = level
                    for link in lane.links:
                        count = self._links[link][1][number]
                        free[link] -= level * count
                        flows[link] -= count
            left = [number for number in left if number not in rates]
        return [(lanes[number], rates[number]) for number in moving]


def fold(several: Sequence[Series], users: Mapping[Any, Collection[Series]], now: float) -> list[Crossing]:
    """Return the crossings of *several* series, which share none of their *users* with other series.

    A crossing holds all that are alike, also those that share nothing with one another.
    """
    partition = _Partition(several, users)
    return [partition.crossing(colours, now) for colours in partition.connected()]


class _Partition:
    # Series, and the threads and links (resources) that several of them share, by number, each with a colour.

    def __init__(self, several: Sequence[Series], users: Mapping[Any, Collection[Series]]) -> None:
        self.several = several
        self.number_of: dict[Any, int] = {}  # of a resource
        self.capacities: list[float] = []  # of resources; -1: a thread
        self.users: list[list[int]] = []  # of resources: series in order
        self.shared: list[list[int]] = []  # of series: resources
        self.caps: list[float] = []  # of series: what they share with nobody
        self.places = [0] * len(several)  # of series, among those of their threads
        self._number(users)
        self.colours, self.resource_colours = self._refined()
        self.members: list[list[int]] = [[] for _ in range(max(self.colours) + 1)]  # of colours: series
        for number, colour in enumerate(self.colours):
            self.members[colour].append(number)

    def _number(self, users: Mapping[Any, Collection[Series]]) -> None:
        index = {one: number for number, one in enumerate(self.several)}
        most = max([one.most for one in self.several])
        for one in self.several:
            cap, own = one.path.cap, list[int]()
            for resource in one.resources:
                if (number := self.number_of.get(resource)) is not None:
                    own.append(number)
                    continue
                is_thread, sharing = resource is one.thread, users[resource]
                narrow = is_thread or resource.capacity < 2 * most * len(sharing)
                if len(sharing) > 1 and narrow:
                    own.append(len(self.users))
                    self.number_of[resource] = len(self.users)
                    self.capacities.append(-1.0 if is_thread else resource.capacity)
                    self.users.append([index[other] for other in sharing])
                    if is_thread:
                        for place, other in enumerate(self.users[-1]):
                            self.places[other] = place
                elif not is_thread:
                    cap = min(cap, resource.capacity)
            self.shared.append(own)
            self.caps.append(cap)

    def _refined(self) -> tuple[list[int], list[int]]:
        # Colours of series and of resources: numbers of what they differ in, until no colour parts any more.
        known: dict[Any, int] = {}
        colours = [
            known.setdefault((self.places[n], one.alike, one.state, one.thread.free, self.caps[n]), len(known))
            for n, one in enumerate(self.several)
        ]
        bits = len(colours).bit_length()
        while True:
            before, known, resources = len(known), {}, dict[Any, int]()
            counts = [1 << bits * colour for colour in colours]  # their sum says how many there are of each colour
            of_resources = [
                resources.setdefault((capacity, sum([counts[n] for n in users])), len(resources))
                for capacity, users in zip(self.capacities, self.users, strict=True)
            ]
            colours = [
                known.setdefault((colour, *[of_resources[n] for n in own]), len(known))
                for colour, own in zip(colours, self.shared, strict=True)
            ]
            if len(known) == before:
                return colours, of_resources

    def connected(self) -> Iterator[list[int]]:
        """Yield the colours of series that meet one another, directly or by way of others."""
        left, followed = dict.fromkeys(range(len(self.members))), set[int]()
        while left:
            reached, ahead = list[int](), [next(iter(left))]
            while ahead:
                colour = ahead.pop()
                if colour not in left:
                    continue
                del left[colour]
                reached.append(colour)
                for resource in self.shared[self.members[colour][0]]:
                    if self.resource_colours[resource] not in followed:
                        followed.add(self.resource_colours[resource])
                        ahead += {self.colours[n] for n in self.users[resource]}
            yield reached

    def crossing(self, colours: Sequence[int], now: float) -> Crossing:
        """Return the crossing of the series of *colours*, with a lane, a thread and links for each that differs."""
        lane_of = {colour: number for number, colour in enumerate(colours)}
        lanes: list[Lane] = []
        free: list[float] = []
        links: list[tuple[float, Mapping[int, int]]] = []
        numbers: dict[int, int] = {}  # by colour: of a thread, or of a link
        for colour in colours:
            first, through = self.members[colour][0], dict[int, None]()
            one = self.several[first]
            shared = self.number_of.get(one.thread)
            own = -1 - len(lanes)  # the colour of a thread that nobody shares
            thread = numbers.setdefault(own if shared is None else self.resource_colours[shared], len(free))
            if thread == len(free):
                free.append(one.thread.free)
            for resource in self.shared[first]:
                if self.capacities[resource] >= 0.0:
                    number = numbers.setdefault(self.resource_colours[resource], len(links))
                    if number == len(links):
                        passing = Counter(lane_of[self.colours[n]] for n in self.users[resource])
                        links.append((self.capacities[resource], passing))
                    through[number] = None
            lanes.append(Lane([self.several[n] for n in self.members[colour]], self.caps[first], thread, [*through]))
        return Crossing(lanes, free, links, now)
