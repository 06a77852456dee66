"""Adaptive replacement: balances a list of blocks seen once against one of blocks seen again, steered by hits on the
names each list has recently lost."""

from collections import OrderedDict

from headrace.ids import BlockName
from headrace.kvstore.base import BlockMeta
from headrace.kvstore.policies.order import KeyedHeap


class _List:
    """Recency list with the evictable members in order, and the names it lost last."""

    def __init__(self) -> None:
        self.last_use: dict[BlockName, int] = {}
        self.evictable = KeyedHeap()
        self.ghosts: OrderedDict[BlockName, None] = OrderedDict()

    def discard(self, name: BlockName) -> None:
        self.evictable.discard(name)
        self.last_use.pop(name, None)


class ArcPolicy:
    """O(log n) a call."""

    def __init__(self, capacity_blocks: int, argument: str = "") -> None:
        self._capacity = max(1, capacity_blocks)
        self._once, self._again = _List(), _List()
        self._target = 0.0
        """Blocks the once-list should have."""
        self._clock = 0
        self._last_victim: BlockName | None = None

    def on_insert(self, block: BlockMeta, now_s: float) -> None:
        name, once, again = block.name, self._once.ghosts, self._again.ghosts
        if name in once:
            self._target = min(self._capacity, self._target + max(1.0, len(again) / len(once)))
        elif name in again:
            self._target = max(0.0, self._target - max(1.0, len(once) / len(again)))
        known = name in once or name in again
        once.pop(name, None)
        again.pop(name, None)
        self._touch(self._again if known else self._once, name, evictable=False)

    def on_hit(self, name: BlockName, now_s: float) -> None:
        evictable = name in self._once.evictable or name in self._again.evictable
        self._once.discard(name)
        self._touch(self._again, name, evictable)

    def add_evictable(self, name: BlockName, now_s: float) -> None:
        mine = self._list_of(name)
        mine.evictable.put(name, mine.last_use[name])

    def remove_evictable(self, name: BlockName) -> None:
        self._list_of(name).evictable.discard(name)

    def on_remove(self, name: BlockName) -> None:
        mine = self._list_of(name)
        if name in mine.last_use and name == self._last_victim:
            mine.ghosts[name] = None
            while len(mine.ghosts) > self._capacity:
                mine.ghosts.popitem(last=False)
        self._once.discard(name)
        self._again.discard(name)

    def victim(self, now_s: float) -> BlockName | None:
        once, again = self._once.evictable.first(), self._again.evictable.first()
        if once is not None and (again is None or len(self._once.last_use) > self._target):
            self._last_victim = once
        else:
            self._last_victim = again
        return self._last_victim

    def _list_of(self, name: BlockName) -> _List:
        return self._once if name in self._once.last_use else self._again

    def _touch(self, mine: _List, name: BlockName, evictable: bool) -> None:
        self._clock += 1
        mine.last_use[name] = self._clock
        if evictable:
            mine.evictable.put(name, self._clock)
