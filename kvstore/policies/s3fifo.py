"""S3-FIFO: a small queue filters one-hit blocks, a main queue gives second chances, a ghost queue remembers names that
left the small one. Blocks that are held or have children keep their queue place but are passed over."""

from collections import OrderedDict

from headrace.ids import BlockName
from headrace.kvstore.base import BlockMeta
from headrace.kvstore.policies.order import KeyedHeap

_SMALL_SHARE = 0.1
_MAX_USES = 3


class _Queue:
    """A FIFO whose evictable members can be found from the old end in O(log n)."""

    def __init__(self) -> None:
        self.places: dict[BlockName, int] = {}
        self.evictable = KeyedHeap()

    def discard(self, name: BlockName) -> None:
        self.evictable.discard(name)
        self.places.pop(name, None)


class S3FifoPolicy:
    """O(log n) amortised: a block moves at most `_MAX_USES` times per hit."""

    def __init__(self, capacity_blocks: int, argument: str = "") -> None:
        self._small_blocks = max(1, int(capacity_blocks * _SMALL_SHARE))
        self._ghost_blocks = max(1, capacity_blocks - self._small_blocks)
        self._small, self._main = _Queue(), _Queue()
        self._ghost: OrderedDict[BlockName, None] = OrderedDict()
        self._uses: dict[BlockName, int] = {}
        self._place = 0
        self._last_victim: BlockName | None = None

    def on_insert(self, block: BlockMeta, now_s: float) -> None:
        known = block.name in self._ghost
        self._ghost.pop(block.name, None)
        self._uses[block.name] = 0
        self._append(self._main if known else self._small, block.name)

    def on_hit(self, name: BlockName, now_s: float) -> None:
        self._uses[name] = min(_MAX_USES, self._uses[name] + 1)

    def add_evictable(self, name: BlockName, now_s: float) -> None:
        queue = self._queue_of(name)
        queue.evictable.put(name, queue.places[name])

    def remove_evictable(self, name: BlockName) -> None:
        self._queue_of(name).evictable.discard(name)

    def on_remove(self, name: BlockName) -> None:
        if name in self._small.places and name == self._last_victim:
            self._ghost[name] = None
            while len(self._ghost) > self._ghost_blocks:
                self._ghost.popitem(last=False)
        self._small.discard(name)
        self._main.discard(name)
        self._uses.pop(name, None)

    def victim(self, now_s: float) -> BlockName | None:
        self._last_victim = self._find()
        return self._last_victim

    def _find(self) -> BlockName | None:
        while True:
            small, main = self._small.evictable.first(), self._main.evictable.first()
            if small is not None and (main is None or len(self._small.places) > self._small_blocks):
                if self._uses[small] < 2:
                    return small
                self._uses[small] = 0
                self._small.discard(small)
                self._append(self._main, small, evictable=True)
            elif main is not None:
                if not self._uses[main]:
                    return main
                self._uses[main] -= 1
                self._append(self._main, main, evictable=True)
            else:
                return None

    def _queue_of(self, name: BlockName) -> _Queue:
        return self._small if name in self._small.places else self._main

    def _append(self, queue: _Queue, name: BlockName, evictable: bool = False) -> None:
        self._place += 1
        queue.places[name] = self._place
        if evictable:
            queue.evictable.put(name, self._place)
