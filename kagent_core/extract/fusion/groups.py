"""Groups of calls that can run one after the other: none waits for another in a circle."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator

from kagent_core.extract.fusion.flow import DataFlow


class Groups:
    """A partition of calls into groups, at first each call on its own. Calls and groups go by position.

    A group may only be made where it is convex: no way leads out of it and back in, over whatever other groups.
    """

    def __init__(self, flow: DataFlow) -> None:
        self._flow = flow
        self._group = list(range(len(flow.calls)))
        self._members: dict[int, tuple[int, ...]] = {position: (position,) for position in self._group}
        self._followers: dict[int, set[int]] = {p: set(following) for p, following in enumerate(flow.followers)}

    def copy(self) -> Groups:
        """Return groups that can be merged without changing these."""
        other = Groups.__new__(Groups)
        other._flow = self._flow
        other._group = list(self._group)
        other._members = dict(self._members)
        other._followers = {group: set(following) for group, following in self._followers.items()}
        return other

    def of(self, position: int) -> tuple[int, ...]:
        """Return the calls of the group that a call is in, in program order."""
        return self._members[self._group[position]]

    def union(self, positions: Collection[int]) -> tuple[int, ...]:
        """Return the calls of all the groups that some calls are in, in program order."""
        return tuple(sorted({member for position in positions for member in self.of(position)}))

    def way_back(self, positions: Collection[int]) -> int | None:
        """Return a call by which a way leads out of the group that some calls would make and back in, or None.

        Only groups that begin before the last of these calls can be on such a way, so a look-around is all it takes.
        """
        inside = {self._group[position] for position in positions}
        last = max(self._members[group][-1] for group in inside)
        waiting = [(following, following) for group in inside for following in self._followers[group]]
        seen: set[int] = set()
        while waiting:
            position, way_out = waiting.pop()
            group = self._group[position]
            if group in inside:
                if way_out != position:  # else it is a step from one of the calls to another
                    return way_out
                continue
            if group not in seen and self._members[group][0] < last:
                seen.add(group)
                waiting.extend((following, way_out) for following in self._followers[group])
        return None

    def merge(self, positions: Collection[int]) -> None:
        """Make one group of the groups that some calls are in."""
        inside = sorted({self._group[position] for position in positions}, key=lambda g: -len(self._members[g]))
        home, *others = inside
        followers = self._followers[home]
        for other in others:
            for member in self._members[other]:
                self._group[member] = home
            followers |= self._followers.pop(other)
        members = sorted(member for group in inside for member in self._members[group])
        for other in others:
            del self._members[other]
        self._members[home] = tuple(members)
        followers.difference_update(members)

    def in_order(self) -> Iterator[tuple[int, ...]]:
        """Yield the groups so that each comes after those that it must wait for; else the earliest one first."""
        waits: dict[int, int] = dict.fromkeys(self._members, 0)
        following = {
            group: {self._group[position] for position in self._followers[group]} - {group} for group in self._members
        }
        for groups in following.values():
            for group in groups:
                waits[group] += 1
        ready = [(self._members[group][0], group) for group, count in waits.items() if count == 0]
        heapq.heapify(ready)
        while ready:
            _, group = heapq.heappop(ready)
            yield self._members[group]
            for other in following[group]:
                waits[other] -= 1
                if waits[other] == 0:
                    heapq.heappush(ready, (self._members[other][0], other))
