"""Smallest-key-first set of names: the heap under most policies."""

import heapq
from collections.abc import Iterable
from typing import Any

from headrace.ids import BlockName


class KeyedHeap:
    """Names with comparable, unique keys. `put`, `discard` and `first` are O(log n) amortised: an old heap entry of a
    name stays until it surfaces, or until stale entries outnumber live ones and the heap is rebuilt."""

    def __init__(self) -> None:
        self._keys: dict[BlockName, Any] = {}
        self._heap: list[tuple[Any, BlockName]] = []

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, name: BlockName) -> bool:
        return name in self._keys

    def those_in(self, names: Iterable[BlockName]) -> list[BlockName]:
        keys = self._keys
        return [name for name in names if name in keys]

    def put(self, name: BlockName, key: Any) -> None:
        """Add a name, or give it another key."""
        self._keys[name] = key
        heapq.heappush(self._heap, (key, name))
        if len(self._heap) > 2 * len(self._keys) + 16:
            self._heap = [(key, name) for name, key in self._keys.items()]
            heapq.heapify(self._heap)

    def discard(self, name: BlockName) -> None:
        self._keys.pop(name, None)

    def first(self) -> BlockName | None:
        while self._heap:
            key, name = self._heap[0]
            if self._keys.get(name) == key:
                return name
            heapq.heappop(self._heap)
        return None
