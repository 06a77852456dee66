"""Time to live: a block expires `ttl` seconds after its insert, hits do not prolong it. Under pressure the one that
expires first goes first; the tier also drops expired ones without pressure (`expired`)."""

from headrace.errors import ConfigError
from headrace.ids import BlockName
from headrace.kvstore.base import BlockMeta
from headrace.kvstore.policies.order import KeyedHeap

DEFAULT_TTL_S = 3600.0


class TtlPolicy:
    """O(log n) a call. `ttl:300` lives five minutes."""

    def __init__(self, capacity_blocks: int, argument: str = "") -> None:
        try:
            self._ttl_s = float(argument) if argument else DEFAULT_TTL_S
        except ValueError as error:
            raise ConfigError(f"ttl:{argument}: the argument is a number of seconds") from error
        if self._ttl_s <= 0:
            raise ConfigError(f"ttl:{argument}: the number of seconds must be above 0")
        self._ends: dict[BlockName, tuple[float, int]] = {}
        self._evictable = KeyedHeap()
        self._count = 0

    def on_insert(self, block: BlockMeta, now_s: float) -> None:
        self._count += 1
        self._ends[block.name] = (now_s + self._ttl_s, self._count)

    def on_hit(self, name: BlockName, now_s: float) -> None:
        pass

    def add_evictable(self, name: BlockName, now_s: float) -> None:
        self._evictable.put(name, self._ends[name])

    def remove_evictable(self, name: BlockName) -> None:
        self._evictable.discard(name)

    def on_remove(self, name: BlockName) -> None:
        self._evictable.discard(name)
        self._ends.pop(name, None)

    def victim(self, now_s: float) -> BlockName | None:
        return self._evictable.first()

    def expired(self, now_s: float) -> BlockName | None:
        """An evictable block whose time is over, or None."""
        first = self._evictable.first()
        return first if first is not None and self._ends[first][0] <= now_s else None
