"""Tiers below the device pools: host memory and disk of one node, with what moves between them. Bookkeeping is
`kvstore.residents` and the policies of production; bytes are counted, not moved.

A prompt's blocks are written through to the host tier. What the host tier evicts goes to the disk tier, if there is
one, and what the disk tier evicts is gone. Sizes are in blocks of 64 tokens.
"""

import dataclasses
from collections.abc import Sequence

from headrace.ids import BlockName, SlotIndex
from headrace.kvstore.base import BlockMeta, ExpiringPolicy
from headrace.kvstore.policies import make_policy
from headrace.kvstore.residents import Resident, Residents

_NO_SLOT = SlotIndex(0)


class TierCache:
    """One tier of `capacity_blocks` blocks; 0: the tier does not exist."""

    def __init__(self, capacity_blocks: int, policy: str, block_bytes: int) -> None:
        self.capacity_blocks = capacity_blocks
        self.block_bytes = block_bytes
        self._policy = make_policy(policy, max(capacity_blocks, 1))
        self._residents = Residents(self._policy)

    def __len__(self) -> int:
        return len(self._residents)

    def has(self, name: BlockName) -> bool:
        return self._residents.get(name) is not None

    def touch(self, names: Sequence[BlockName], now_s: float) -> None:
        for name in names:
            resident = self._residents.get(name)
            if resident is not None:
                self._residents.hit(resident, now_s)

    def pin(self, names: Sequence[BlockName], now_s: float) -> list[Resident]:
        """Keep `names` (those that are here) until `unpin`."""
        pinned = [r for r in map(self._residents.get, names) if r is not None]
        for resident in pinned:
            self._residents.hold(resident, now_s)
        return pinned

    def unpin(self, pinned: Sequence[Resident], now_s: float) -> None:
        for resident in reversed(pinned):
            self._residents.unhold(resident, now_s)

    def put(self, blocks: Sequence[BlockMeta], now_s: float) -> tuple[int, list[BlockMeta]]:
        """Insert what is not here, parents first, as far as room can be made: a full tier skips the write. Returns how
        many went in and what was evicted for them."""
        evicted: list[BlockMeta] = []
        refused: set[BlockName] = set()
        written: list[Resident] = []
        for meta in blocks:
            if self.has(meta.name):
                continue
            # As `HostTier.begin_put`: the parent is protected first, or it could make room for its own child.
            self._residents.adopt(meta.parent, now_s)
            if meta.parent in refused or not self._room(evicted, now_s):
                refused.add(meta.name)
            else:
                written.append(Resident(meta, _NO_SLOT, 1))
                self._residents.insert(written[-1], now_s)
            self._residents.disown(meta.parent, now_s)
        self.unpin(written, now_s)
        return len(written), evicted

    def expire(self, now_s: float) -> None:
        """Drop what a policy with a time to live no longer wants."""
        if isinstance(self._policy, ExpiringPolicy):
            while (name := self._policy.expired(now_s)) is not None:
                self._residents.remove(name, now_s)

    def _room(self, evicted: list[BlockMeta], now_s: float) -> bool:
        """Make sure that one more fits; what had to go is added to `evicted`."""
        if len(self) < self.capacity_blocks:
            return True
        victim = self._residents.victim(now_s)
        if victim is None:
            return False
        evicted.append(self._residents.remove(victim.meta.name, now_s).meta)
        return True

    def violations(self) -> list[str]:
        over = len(self) > self.capacity_blocks
        return [f"{len(self)} blocks in {self.capacity_blocks}"] * over + self._residents.violations()


@dataclasses.dataclass(slots=True)
class Moved:
    """Blocks moved per leg."""

    device_to_host: int = 0
    host_to_device: int = 0
    host_to_disk: int = 0
    disk_to_host: int = 0
    prefill_to_decode: int = 0


class Node:
    """Host and disk tier of one node."""

    def __init__(self, host: TierCache, disk: TierCache) -> None:
        self.host = host
        self.disk = disk
        self.moved = Moved()

    def expire(self, now_s: float) -> None:
        self.host.expire(now_s)
        self.disk.expire(now_s)

    def run_below(self, names: Sequence[BlockName], start: int) -> tuple[int, int]:
        """How many names from `start` on, without a gap, are in the host tier and how many only on disk."""
        host = disk = 0
        for index in range(start, len(names)):
            if self.host.has(names[index]):
                host += 1
            elif self.disk.has(names[index]):
                disk += 1
            else:
                break
        return host, disk

    def leading(self, names: Sequence[BlockName]) -> int:
        """Leading names that are readable on this node."""
        return sum(self.run_below(names, 0))

    def restored(self, names: Sequence[BlockName], host: int, disk: int, now_s: float) -> None:
        """Blocks `names` were read for a device; those on disk came through the host tier."""
        self.moved.host_to_device += host + disk
        self.moved.disk_to_host += disk
        self.host.touch(names, now_s)
        self.disk.touch(names, now_s)

    def write_through(self, names: Sequence[BlockName], now_s: float) -> None:
        """A whole chain is on a device: put what the host tier lacks."""
        blocks = [
            BlockMeta(name, names[depth - 1] if depth else None, depth, self.host.block_bytes)
            for depth, name in enumerate(names)
        ]
        written, evicted = self.host.put(blocks, now_s)
        self.moved.device_to_host += written
        if evicted and self.disk.capacity_blocks:
            # Children were evicted before their parents; on disk the parents go in first.
            stored, _ = self.disk.put(sorted(evicted, key=lambda meta: meta.depth), now_s)
            self.moved.host_to_disk += stored
