"""What changed in which place of this node, numbered, for directories. Pure.

The log is bounded in names, not in entries. Who asks for something that is no longer in it gets a snapshot.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping

from headrace.ids import BlockName, Incarnation
from headrace.kvstore.names import is_private
from headrace.kvstore.wire import Events, PlaceChange, pack_names

HOST_PLACE = "host"
DISK_PLACE = "disk"


class EventLog:
    """Events of one run of a daemon, numbered from 1 without gaps."""

    def __init__(
        self,
        incarnation: Incarnation,
        max_names: int = 1 << 15,
        sources: Mapping[str, Collection[BlockName]] | None = None,
    ) -> None:
        """`sources`: places whose names somebody else keeps: what is in them is read there (private names are passed
        over), and what is told of them is exact. The log keeps the names of all other places."""
        self.incarnation = incarnation
        self.last = 0
        self._max_names = max_names
        self._names = 0
        self._events: deque[PlaceChange] = deque()
        self._sources = sources or {}
        self._held: dict[str, set[BlockName]] = {} if HOST_PLACE in self._sources else {HOST_PLACE: set()}

    def change(self, place: str, added: Iterable[BlockName], removed: Iterable[BlockName]) -> bool:
        """Record what really changed in `place`; False if nothing did."""
        if place in self._sources:
            new, gone = list(added), list(removed)
        else:
            held = self._held.setdefault(place, set())
            new = [name for name in added if name not in held]
            held.update(new)
            gone = [name for name in removed if name in held]
            held.difference_update(gone)
        if not new and not gone:
            return False
        self._append(PlaceChange(place=place, added=pack_names(new), removed=pack_names(gone)), len(new) + len(gone))
        return True

    def end(self, place: str) -> bool:
        """The place is gone with all it held (a rank's process ended)."""
        if self._held.pop(place, None) is None:
            return False
        self._append(PlaceChange(place=place, added=b"", removed=b"", gone=True), 1)
        return True

    def held(self, place: str) -> int:
        return len(self._sources[place] if place in self._sources else self._held.get(place, ()))

    def places(self) -> list[str]:
        return [*self._sources, *self._held]

    def since(self, incarnation: Incarnation, after: int) -> Events:
        """Events after number `after`, or a snapshot if the log does not reach back so far."""
        first = self.last - len(self._events)
        if incarnation != self.incarnation or not first <= after <= self.last:
            return self.snapshot()
        changes = tuple(self._events[i] for i in range(after - first, len(self._events)))
        return Events(incarnation=self.incarnation, last=self.last, snapshot=False, changes=changes)

    def snapshot(self) -> Events:
        changes = tuple(
            PlaceChange(place=place, added=pack_names(name for name in names if not is_private(name)), removed=b"")
            for place, names in (*self._sources.items(), *self._held.items())
        )
        return Events(incarnation=self.incarnation, last=self.last, snapshot=True, changes=changes)

    def _append(self, event: PlaceChange, names: int) -> None:
        self.last += 1
        self._events.append(event)
        self._names += names
        while self._names > self._max_names and self._events:
            dropped = self._events.popleft()
            self._names -= 1 if dropped.gone else (len(dropped.added) + len(dropped.removed)) // 32
