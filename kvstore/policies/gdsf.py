"""Greedy-dual size frequency: keeps what is dear to recompute, often used, and small.

    value = age + uses x recompute cost / bytes

`age` rises to the value of each victim, so old fame fades. Recompute cost of a block is linear in its depth: the dense
part of a block's prefill is constant, its indexer scans all tokens before it (DESIGN section 9).
"""

from headrace.errors import ConfigError
from headrace.ids import BlockName
from headrace.kvstore.base import BlockMeta
from headrace.kvstore.policies.order import KeyedHeap

_DEPTH_DOUBLING_COST_BLOCKS = 1024.0
"""Depth at which a block costs twice what the first one does; `gdsf:N` overrides it."""


class GdsfPolicy:
    """O(log n) a call."""

    def __init__(self, capacity_blocks: int, argument: str = "") -> None:
        try:
            self._doubling = float(argument) if argument else _DEPTH_DOUBLING_COST_BLOCKS
        except ValueError as error:
            raise ConfigError(f"gdsf:{argument}: the argument is a number of blocks") from error
        if self._doubling <= 0:
            raise ConfigError(f"gdsf:{argument}: the number of blocks must be above 0")
        self._gain: dict[BlockName, float] = {}
        self._uses: dict[BlockName, int] = {}
        self._value: dict[BlockName, tuple[float, int]] = {}
        self._evictable = KeyedHeap()
        self._age = 0.0
        self._clock = 0
        self._last_victim: BlockName | None = None

    def on_insert(self, block: BlockMeta, now_s: float) -> None:
        self._gain[block.name] = (1.0 + block.depth / self._doubling) / block.size_bytes
        self._uses[block.name] = 0
        self._use(block.name)

    def on_hit(self, name: BlockName, now_s: float) -> None:
        self._use(name)
        if name in self._evictable:
            self._evictable.put(name, self._value[name])

    def add_evictable(self, name: BlockName, now_s: float) -> None:
        self._evictable.put(name, self._value[name])

    def remove_evictable(self, name: BlockName) -> None:
        self._evictable.discard(name)

    def on_remove(self, name: BlockName) -> None:
        self._evictable.discard(name)
        value = self._value.pop(name, None)
        self._gain.pop(name, None)
        self._uses.pop(name, None)
        if value is not None and name == self._last_victim:
            self._age = max(self._age, value[0])

    def victim(self, now_s: float) -> BlockName | None:
        self._last_victim = self._evictable.first()
        return self._last_victim

    def _use(self, name: BlockName) -> None:
        self._clock += 1
        self._uses[name] += 1
        self._value[name] = (self._age + self._uses[name] * self._gain[name], self._clock)
