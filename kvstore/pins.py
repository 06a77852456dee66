"""Blocks that somebody asked to keep for a while: a system prompt before the rush, a conversation that goes on. Pure.

A pin belongs to no client: it outlives whoever asked, and ends at its deadline. Inside, the pins are one more owner of
leases in the host tier, so a pinned block is what a leased one is: never evicted, freed when the last one lets go.
"""

import heapq
import time
from collections.abc import Callable, Sequence

from headrace.ids import BlockName, Incarnation
from headrace.kvstore.host_tier import HostTier

OWNER = Incarnation("pins")
MAX_SHARE = 0.5
"""Most of a tier that pins may hold: the rest must stay able to turn over."""
MAX_SECONDS = 86_400.0


class Pins:
    """Single-threaded, beside its tier. `tick` regularly."""

    def __init__(self, tier: HostTier, clock: Callable[[], float] = time.monotonic) -> None:
        self._tier, self._clock = tier, clock
        self._ends: dict[BlockName, float] = {}
        self._heap: list[tuple[float, BlockName]] = []
        self.expired = 0

    def __len__(self) -> int:
        return len(self._ends)

    def pin(self, names: Sequence[BlockName], seconds: float) -> int:
        """Keep the leading readable run of `names` for `seconds` from now, but no block for less than it was promised
        before. Returns how many of them are pinned now: fewer where a block is not there, or pins hold their share of
        the tier already. Raises ValueError for a time outside 0..MAX_SECONDS."""
        if not 0 < seconds <= MAX_SECONDS:
            raise ValueError(f"a pin lasts between 0 and {MAX_SECONDS:.0f} s, not {seconds}")
        end, pinned = self._clock() + seconds, 0
        for name in names:
            if name not in self._ends:
                if len(self._ends) >= int(self._tier.slots * MAX_SHARE):
                    break
                if not self._ends:
                    self._tier.attach(OWNER)
                if self._tier.pin(OWNER, name) is None:
                    if not self._ends:
                        self._tier.detach(OWNER)
                    break
            if end > self._ends.get(name, 0.0):
                self._ends[name] = end
                heapq.heappush(self._heap, (end, name))
            pinned += 1
        return pinned

    def unpin(self, names: Sequence[BlockName]) -> int:
        """End pins before their time; returns how many there were."""
        found = [name for name in dict.fromkeys(names) if self._ends.pop(name, None) is not None]
        if found:
            self._tier.release(OWNER, found)
            if not self._ends:
                self._heap.clear()
                self._tier.detach(OWNER)
        return len(found)

    def tick(self) -> None:
        """End what is over. Before the tier's own tick: this owner never expires."""
        now, over = self._clock(), []
        while self._heap and self._heap[0][0] <= now:
            end, name = heapq.heappop(self._heap)
            if self._ends.get(name) == end:
                over.append(name)
        self.expired += self.unpin(over)
        if self._ends:
            self._tier.renew(OWNER)

    def stats(self) -> dict[str, float]:
        return {"pinned": float(len(self._ends)), "pins_expired_total": float(self.expired)}
