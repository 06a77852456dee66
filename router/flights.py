"""Prefixes that are being computed right now, before any event can tell the directory. Pure bookkeeping.

A prompt that begins with one of them waits until it is there (`Flight.over`) and is placed then: the prefix is computed
once and the siblings spread over all groups. For a short while after that everybody believes in it, since the events
that announce it are on their way.
"""

import asyncio
import collections
import dataclasses
from collections.abc import Sequence

from headrace.ids import BlockName

LINGER_S = 2.0
"""How long a finished flight is believed in without the directory's word."""
LEAST_BLOCKS = 4
"""A shared new prefix below this is not worth waiting for."""


@dataclasses.dataclass(slots=True, eq=False)
class Flight:
    group: str
    names: Sequence[BlockName]
    """The blocks it computes."""
    ends_at: float
    """Predicted."""
    over: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    forget_at: float = 0.0


class Flights:
    def __init__(self) -> None:
        self._by_name: dict[BlockName, Flight] = {}
        self._over: collections.deque[Flight] = collections.deque()

    def __len__(self) -> int:
        return len(self._by_name)

    def depart(self, group: str, names: Sequence[BlockName], ends_at: float) -> Flight:
        """`group` begins to compute `names` (those that nobody has or computes)."""
        flight = Flight(group, names, ends_at)
        for name in names:
            self._by_name.setdefault(name, flight)
        return flight

    def arrive(self, flight: Flight, now: float, *, computed: bool) -> None:
        """It is over; idempotent. Not computed: nobody has it."""
        if flight.over.is_set():
            return
        flight.over.set()
        if computed:
            flight.forget_at = now + LINGER_S
            self._over.append(flight)
        else:
            self._drop(flight)
        while self._over and self._over[0].forget_at <= now:
            self._drop(self._over.popleft())

    def _drop(self, flight: Flight) -> None:
        for name in flight.names:
            if self._by_name.get(name) is flight:
                del self._by_name[name]

    def of(self, name: BlockName) -> Flight | None:
        """The flight that brings or brought a block."""
        return self._by_name.get(name)

    def along(self, names: Sequence[BlockName], known: int, now: float) -> tuple[int, Flight | None]:
        """(leading blocks that are there or on their way, the flight that brings the last of them and is not over),
        given that `known` leading blocks are somewhere."""
        depth, last = known, None
        while depth < len(names):
            flight = self._by_name.get(names[depth])
            if flight is None or (flight.over.is_set() and flight.forget_at <= now):
                break
            last = flight
            depth += 1
        return depth, None if last is None or last.over.is_set() else last
