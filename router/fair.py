"""Who waits, and who is next: deficit round robin between tenants by what their requests cost, inside a tenant higher
priorities first and then by arrival. Pure.

A tenant's turn adds a quantum to its credit; its requests go while the credit covers them. So a tenant with a thousand
requests, or with very large ones, takes no more of the room than its share while others wait.
"""

import bisect
import collections
import itertools
from collections.abc import Callable, Iterator
from typing import Any

QUANTUM = 8.0
"""Cost (blocks) that a turn of a tenant of weight 1 adds."""


class Waiter:
    """One request in the queue; `admit` returns True when it took its place."""

    def __init__(self, admit: Callable[[], bool], admitted: Any, tenant: str, priority: int, cost: float) -> None:
        self.admit = admit
        self.admitted = admitted
        self.tenant = tenant
        self.cost = cost
        self.order: tuple[int, int] = (-priority, 0)


class FairQueue:
    def __init__(self, weight: Callable[[str], float] = lambda _tenant: 1.0) -> None:
        self._weight = weight
        self._lines: collections.OrderedDict[str, list[Waiter]] = collections.OrderedDict()
        """Tenants that wait, the one whose turn it is first."""
        self._credit: dict[str, float] = {}
        self._arrivals = itertools.count()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Waiter]:
        return (waiter for line in self._lines.values() for waiter in line)

    def __contains__(self, waiter: Waiter) -> bool:
        return waiter in self._lines.get(waiter.tenant, ())

    def lengths(self) -> dict[str, int]:
        return {tenant: len(line) for tenant, line in self._lines.items()}

    def add(self, waiter: Waiter) -> None:
        waiter.order = (waiter.order[0], next(self._arrivals))
        if waiter.tenant not in self._lines:
            self._lines[waiter.tenant] = []
            self._credit[waiter.tenant] = 0.0
        bisect.insort(self._lines[waiter.tenant], waiter, key=lambda w: w.order)
        self._length += 1

    def next(self) -> Waiter | None:
        """Whose turn it is; it stays in the queue. The answer only changes when somebody comes or goes."""
        if not self._lines:
            return None
        while True:
            tenant, line = next(iter(self._lines.items()))
            if self._credit[tenant] >= line[0].cost:
                return line[0]
            # Turns in which nobody could go are skipped in one stride.
            turns = min(
                -(-(w[0].cost - self._credit[t]) // self._share(t)) if w[0].cost > self._credit[t] else 0
                for t, w in self._lines.items()
            )
            for other in self._lines:
                self._credit[other] += max(0.0, turns - 1) * self._share(other)
            self._credit[tenant] += self._share(tenant)
            if self._credit[tenant] < line[0].cost:
                self._lines.move_to_end(tenant)

    def _share(self, tenant: str) -> float:
        return QUANTUM * max(self._weight(tenant), 1e-3)

    def take(self, waiter: Waiter) -> None:
        """It goes: its tenant pays, and keeps its turn while its credit lasts."""
        tenant = waiter.tenant
        self._credit[tenant] -= waiter.cost
        self.remove(waiter)
        if tenant in self._lines and self._credit[tenant] < self._lines[tenant][0].cost:
            self._lines.move_to_end(tenant)

    def remove(self, waiter: Waiter) -> None:
        line = self._lines[waiter.tenant]
        line.remove(waiter)
        self._length -= 1
        if not line:
            # A tenant that waits for nothing saves nothing up.
            del self._lines[waiter.tenant], self._credit[waiter.tenant]

    def to_displace(self, tenant: str) -> Waiter | None:
        """Who leaves a full queue for a newcomer of `tenant`: the last in the longest line, if that one is longer than
        the newcomer's would be."""
        longest = max(self._lines, key=lambda t: len(self._lines[t]), default=None)
        if longest is None or len(self._lines[longest]) <= len(self._lines.get(tenant, ())) + 1:
            return None
        return self._lines[longest][-1]
