"""Writes host blocks to the disk tier, as the write policy and the admission filter say. Runs on the event loop.

A block that is being written is pinned, so its slot cannot be reused under the transfer. With a policy that writes on
eviction a small reserve of slots is kept free ahead of need: the daemon never makes a client wait for a disk.
"""

from collections.abc import Callable, Sequence

from headrace.ids import BlockName, Incarnation
from headrace.kvstore.daemon.pump import Lane, Pump
from headrace.kvstore.disk.store import DiskStore
from headrace.kvstore.host_tier import HostTier
from headrace.kvstore.names import is_private
from headrace.kvstore.policies.sketch import CountSketch
from headrace.kvstore.policies.write import WritePolicy
from headrace.kvstore.residents import Resident

MAX_RESERVE = 64
"""Most slots that are kept free ahead of need."""


class Demoter:
    def __init__(
        self,
        host: HostTier,
        disk: DiskStore,
        owner: Incarnation,
        slot_view: Callable[[int], memoryview],
        pump: Pump,
        policy: WritePolicy,
        *,
        admit_uses: int,
    ) -> None:
        """`admit_uses`: blocks used less often never go to disk."""
        self._host, self._disk, self._owner, self._slot_view, self._pump = host, disk, owner, slot_view, pump
        self._policy = policy
        self._admit_uses = admit_uses
        self._sketch = CountSketch(host.slots + disk.tier.slots)
        self._queued: set[BlockName] = set()
        self._writes_back = policy.on_evict(admit_uses)
        self._reserve = max(1, min(MAX_RESERVE, host.slots // 16)) if self._writes_back else 0
        self.declined = 0
        """Blocks evicted from the host tier that the policy or the filter kept from the disk."""
        self.unwritten = 0
        """Blocks that would have gone to disk, but a write needed their slot at once."""
        host.on_gone.append(self._gone)

    def used(self, names: Sequence[BlockName]) -> None:
        """These blocks were put or hit."""
        wanted = [name for name in names if not is_private(name)]
        for name, uses in zip(wanted, self._sketch.add(wanted).tolist()):
            if uses >= self._admit_uses and self._policy.on_use(uses) and not self._disk.tier.has_or_writes(name):
                self._queue(name, evict=False)

    def tick(self) -> None:
        """Keep the reserve: write back the coldest blocks and let them go."""
        if not self._disk.on:
            return
        missing = self._reserve - self._host.free - len(self._queued)
        while missing > 0 and (coldest := self._host.coldest()) is not None:
            name = coldest.meta.name
            if self._disk.has(name) or not self._wanted_below(name):
                self.declined += not self._disk.has(name)
                self._host.evict(name)
            elif not self._queue(name, evict=True):
                return
            missing -= 1

    def values(self) -> dict[str, float]:
        return {"declined_total": float(self.declined), "unwritten_total": float(self.unwritten)}

    # --- inside -----------------------------------------------------------------------------------------------------

    def _wanted_below(self, name: BlockName) -> bool:
        uses = int(self._sketch.estimate([name])[0])
        admitted = uses >= self._admit_uses or self._disk.tier.wanted_by_child(name)
        return admitted and self._policy.on_evict(uses) and not is_private(name)

    def _queue(self, name: BlockName, *, evict: bool) -> bool:
        if name in self._queued:
            return False
        # Pinned from now on: it leaves the ranks of the coldest, and the next one comes into view.
        resident = self._host.pin(self._owner, name) if self._disk.on else None
        if resident is None:
            return False
        self._queued.add(name)
        if not self._pump.offer(Lane.DEMOTE, lambda: self._write(resident, evict)):
            self._finish(resident)
            return False
        return True

    async def _write(self, resident: Resident, evict: bool) -> None:
        written = False
        try:
            slab = self._slot_view(resident.slot)
            transfer = await self._disk.write(resident.meta, resident.digest, slab)
            written = transfer.ok
            if transfer.running is not None:
                # The device may still read the slot: it stays pinned until it no longer does.
                await transfer.settled()
        finally:
            self._finish(resident)
        if evict and (written or self._disk.has(resident.meta.name)):
            self._host.evict(resident.meta.name)

    def _finish(self, resident: Resident) -> None:
        self._queued.discard(resident.meta.name)
        self._host.release(self._owner, [resident.meta.name])

    def _gone(self, name: BlockName, why: str) -> None:
        if why in ("evicted", "quota") and self._disk.on and not self._disk.has(name):
            if self._wanted_below(name):
                self.unwritten += 1
            else:
                self.declined += 1
