"""Least frequently used, ties by least recent use."""

from headrace.ids import BlockName
from headrace.kvstore.base import BlockMeta
from headrace.kvstore.policies.order import KeyedHeap


class LfuPolicy:
    """O(log n) a call. Counts start at 1 with the insert and are forgotten when the block leaves."""

    def __init__(self, capacity_blocks: int, argument: str = "") -> None:
        self._uses: dict[BlockName, tuple[int, int]] = {}
        self._evictable = KeyedHeap()
        self._clock = 0

    def on_insert(self, block: BlockMeta, now_s: float) -> None:
        self._clock += 1
        self._uses[block.name] = (1, self._clock)

    def on_hit(self, name: BlockName, now_s: float) -> None:
        self._clock += 1
        self._uses[name] = (self._uses[name][0] + 1, self._clock)
        if name in self._evictable:
            self._evictable.put(name, self._uses[name])

    def add_evictable(self, name: BlockName, now_s: float) -> None:
        self._evictable.put(name, self._uses[name])

    def remove_evictable(self, name: BlockName) -> None:
        self._evictable.discard(name)

    def on_remove(self, name: BlockName) -> None:
        self._evictable.discard(name)
        self._uses.pop(name, None)

    def victim(self, now_s: float) -> BlockName | None:
        return self._evictable.first()
