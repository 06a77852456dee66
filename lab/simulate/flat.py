"""The pool of published single-pool tables: blocks are touched in prompt order and any block may go, so a chain loses
its first blocks first. Only to reproduce such tables; the store evicts children before parents (`pool.py`)."""

from collections.abc import Sequence

from headrace.ids import BlockName
from headrace.kvstore.base import BlockMeta, EvictionPolicy


class FlatPool:
    def __init__(self, capacity_blocks: int, policy: EvictionPolicy, block_bytes: int = 1) -> None:
        self.capacity_blocks = capacity_blocks
        self.inserted = 0
        self.evicted = 0
        self._block_bytes = block_bytes
        self._policy = policy
        self._here: set[BlockName] = set()

    def request(self, names: Sequence[BlockName], now_s: float) -> int:
        """Serve one prompt; returns how many leading blocks were here."""
        here, policy = self._here, self._policy
        hit = next((i for i, name in enumerate(names) if name not in here), len(names))
        parent: BlockName | None = None
        for depth, name in enumerate(names):
            if name in here:
                policy.on_hit(name, now_s)
            else:
                here.add(name)
                policy.on_insert(BlockMeta(name, parent, depth, self._block_bytes), now_s)
                policy.add_evictable(name, now_s)
                self.inserted += 1
                if len(here) > self.capacity_blocks:
                    self._evict(now_s)
            parent = name
        return hit

    def _evict(self, now_s: float) -> None:
        victim = self._policy.victim(now_s)
        assert victim is not None, "every block here is evictable"
        self._here.remove(victim)
        self._policy.on_remove(victim)
        self.evicted += 1
