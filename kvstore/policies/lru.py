"""Least recently used: the victim is the evictable block whose last insert or hit is oldest."""

from collections.abc import Sequence

from headrace.ids import BlockName
from headrace.kvstore.base import BlockMeta
from headrace.kvstore.policies.order import KeyedHeap


class LruPolicy:
    """O(log n) a call. Blocks that are held or have children keep their place in time while they are withdrawn."""

    def __init__(self, capacity_blocks: int, argument: str = "") -> None:
        self._last_use: dict[BlockName, int] = {}
        self._evictable = KeyedHeap()
        self._clock = 0

    def on_insert(self, block: BlockMeta, now_s: float) -> None:
        self._touch(block.name)

    def on_hit(self, name: BlockName, now_s: float) -> None:
        self._touch(name)
        if name in self._evictable:
            self._evictable.put(name, self._last_use[name])

    def on_hits(self, names: Sequence[BlockName], now_s: float) -> None:
        first = self._clock + 1
        self._clock += len(names)
        self._last_use.update(zip(names, range(first, first + len(names))))
        for name in self._evictable.those_in(names):
            self._evictable.put(name, self._last_use[name])

    def add_evictable(self, name: BlockName, now_s: float) -> None:
        self._evictable.put(name, self._last_use[name])

    def remove_evictable(self, name: BlockName) -> None:
        self._evictable.discard(name)

    def on_remove(self, name: BlockName) -> None:
        self._evictable.discard(name)
        self._last_use.pop(name, None)

    def victim(self, now_s: float) -> BlockName | None:
        return self._evictable.first()

    def _touch(self, name: BlockName) -> None:
        self._clock += 1
        self._last_use[name] = self._clock
