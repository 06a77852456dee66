"""The bound: a policy that knows the future. It drops the block whose next use is farthest away (Belady), the deeper
one first when two are equally far.

Every block of a prompt is used whenever a later block of it is, so the farthest-used block never has a child that is
used sooner, and dropping leaves only loses nothing. Blocks of the request being served are pinned by the pool, as in
production: without that, plain Belady breaks chains in flight and can lose to LRU. Since a request must hold its whole
chain, this is the best a cache that admits every block can do, not a bound for caches that bypass blocks.
"""

from collections.abc import Sequence

from headrace.ids import BlockName
from headrace.kvstore.base import BlockMeta
from headrace.kvstore.policies.order import KeyedHeap
from headrace.lab.traces.form import Request


class ClairvoyantPolicy:
    """An eviction policy fed with the requests to come. `at_request` says which one is being served."""

    def __init__(self, requests: Sequence[Request], names: Sequence[BlockName]) -> None:
        self._next: dict[BlockName, tuple[int, int]] = {}
        self._evictable = KeyedHeap()
        self._depth: dict[BlockName, int] = {}
        self._never = len(requests)
        self._now = 0
        self._uses = self._schedule(requests, names)

    @staticmethod
    def _schedule(requests: Sequence[Request], names: Sequence[BlockName]) -> dict[BlockName, list[int]]:
        """Indices of the requests that use each block, last one first, so that `pop` gives the next."""
        uses: dict[BlockName, list[int]] = {}
        for index in range(len(requests) - 1, -1, -1):
            for first, count in requests[index].runs:
                for name in names[first : first + count]:
                    if name in uses:
                        uses[name].append(index)
                    else:
                        uses[name] = [index]
        return uses

    def at_request(self, index: int) -> None:
        self._now = index

    def on_insert(self, block: BlockMeta, now_s: float) -> None:
        self._depth[block.name] = block.depth
        self._look_ahead(block.name)

    def on_hit(self, name: BlockName, now_s: float) -> None:
        self._look_ahead(name)
        if name in self._evictable:
            self._evictable.put(name, self._next[name])

    def add_evictable(self, name: BlockName, now_s: float) -> None:
        self._evictable.put(name, self._next[name])

    def remove_evictable(self, name: BlockName) -> None:
        self._evictable.discard(name)

    def on_remove(self, name: BlockName) -> None:
        self._evictable.discard(name)
        self._next.pop(name, None)
        self._depth.pop(name, None)

    def victim(self, now_s: float) -> BlockName | None:
        return self._evictable.first()

    def _look_ahead(self, name: BlockName) -> None:
        following = self._following(name)
        self._next[name] = (-following, -self._depth[name])

    def _following(self, name: BlockName) -> int:
        """Index of the next request that uses `name`; `_never` when there is none."""
        uses = self._uses[name]
        while uses and uses[-1] <= self._now:
            uses.pop()
        return uses[-1] if uses else self._never


class ReuseOracle(ClairvoyantPolicy):
    """Knows whether a block is ever used again, but not when: drops what never comes back first, else least recently
    used. What lies between it and the bound can only be had by knowing *when* conversations go on."""

    def __init__(self, requests: Sequence[Request], names: Sequence[BlockName]) -> None:
        super().__init__(requests, names)
        self._clock = 0

    def _look_ahead(self, name: BlockName) -> None:
        self._clock += 1
        self._next[name] = (int(self._following(name) != self._never), self._clock)
