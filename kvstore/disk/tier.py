"""Bookkeeping of the disk tier: which slot holds which block, who is read, who goes first. Pure: no files, no threads.

    free -> writing -> ready -> (read by n) -> evictable -> free
               |                                  |
               +-> quarantined -> free <----------+

A slot is quarantined while a write that was given up may still be running, and while the record of a dropped block is
erased.

Single-threaded: the daemon's loop.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable

from headrace.ids import BlockName, SlotIndex
from headrace.kvstore.base import BlockMeta, EvictionPolicy, ExpiringPolicy
from headrace.kvstore.changes import ChangeSet
from headrace.kvstore.disk.base import Record
from headrace.kvstore.names import is_private
from headrace.kvstore.residents import Resident, Residents


@dataclasses.dataclass(slots=True)
class DiskCounters:
    """Events since the start, in blocks."""

    recovered: int = 0
    writes: int = 0
    reads: int = 0
    full: int = 0
    aborted: int = 0
    evictions: int = 0
    expirations: int = 0
    dropped: int = 0


class DiskTier:
    def __init__(
        self, *, slots: int, slot_bytes: int, policy: EvictionPolicy, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.slots = slots
        self.counters = DiskCounters()
        self.changes = ChangeSet()
        self._slot_bytes = slot_bytes
        self._policy = policy
        self._clock = clock
        self._free = deque(SlotIndex(slot) for slot in range(slots))
        self._residents = Residents(policy)
        self._writing: dict[SlotIndex, Record] = {}
        self._writing_names: set[BlockName] = set()
        self._doomed: dict[SlotIndex, Resident] = {}
        self._quarantined: set[SlotIndex] = set()
        self._generation = 0

    def recover(self, records: Iterable[Record | None]) -> list[SlotIndex]:
        """Take over what a file holds, oldest first, into an empty tier. Returns the slots of older copies of a name,
        whose records should be erased."""
        found: dict[BlockName, tuple[Record, SlotIndex]] = {}
        stale = []
        for number, record in enumerate(records):
            if record is None or is_private(record.name):
                continue
            slot, other = SlotIndex(number), found.get(record.name)
            if other is not None:
                stale.append(min((record.generation, slot), (other[0].generation, other[1]))[1])
            if other is None or record.generation > other[0].generation:
                found[record.name] = (record, slot)
        now = self._clock()
        for record, slot in sorted(found.values(), key=lambda item: item[0].generation):
            meta = BlockMeta(record.name, record.parent, record.depth, self._slot_bytes, record.tenant)
            self._residents.insert(Resident(meta, slot, 0, record.digest), now)
            self.changes.add(record.name)
            self._generation = record.generation
        taken = {slot for _, slot in found.values()}
        self._free = deque(slot for slot in self._free if slot not in taken)
        self.counters.recovered += len(taken)
        return stale

    # --- writing ----------------------------------------------------------------------------------------------------

    def has(self, name: BlockName) -> bool:
        """Readable here."""
        return self._residents.get(name) is not None

    def has_or_writes(self, name: BlockName) -> bool:
        return name in self._writing_names or self.has(name)

    def wanted_by_child(self, name: BlockName) -> bool:
        """Whether a child of this block is here or is being written: without the block it could never be hit."""
        return self._residents.has_children(name)

    def begin_write(self, meta: BlockMeta, digest: bytes) -> tuple[SlotIndex, Record] | None:
        """A slot in state writing and the record to write with it; None when there is no room without dropping what is
        read, or when the block is here already."""
        if self.has_or_writes(meta.name) or is_private(meta.name):
            return None
        now = self._clock()
        self._residents.adopt(meta.parent, now)
        slot = self._take_slot(now)
        if slot is None:
            self._residents.disown(meta.parent, now)
            self.counters.full += 1
            return None
        self._generation += 1
        record = Record(meta.name, meta.parent, meta.depth, digest, self._generation, meta.tenant)
        self._writing[slot] = record
        self._writing_names.add(meta.name)
        return slot, record

    def commit(self, slot: SlotIndex) -> None:
        """The whole slot is on disk."""
        record, now = self._end_write(slot), self._clock()
        meta = BlockMeta(record.name, record.parent, record.depth, self._slot_bytes, record.tenant)
        self._residents.insert(Resident(meta, slot, 0, record.digest), now)
        self._residents.disown(record.parent, now)
        self.changes.add(record.name)
        self.counters.writes += 1

    def abort(self, slot: SlotIndex, *, quarantine: bool) -> None:
        """The write failed. With `quarantine` it may still be running: `unquarantine` frees the slot."""
        self._residents.disown(self._end_write(slot).parent, self._clock())
        self.counters.aborted += 1
        if quarantine:
            self._quarantined.add(slot)
        else:
            self._free.append(slot)

    def unquarantine(self, slot: SlotIndex) -> None:
        self._quarantined.remove(slot)
        self._free.append(slot)

    # --- reading ----------------------------------------------------------------------------------------------------

    def begin_read(self, name: BlockName) -> Resident | None:
        """Hold a block while it is read; its slot is not reused before `end_read`."""
        resident = self._residents.get(name)
        if resident is not None:
            now = self._clock()
            self._residents.hold(resident, now)
            self._residents.hit(resident, now)
        return resident

    def end_read(self, resident: Resident) -> SlotIndex | None:
        """The slot, quarantined and to be erased, if this was the last reader of a dropped block."""
        if self._doomed.get(resident.slot) is not resident:
            self._residents.unhold(resident, self._clock())
            return None
        resident.refs -= 1
        if resident.refs:
            return None
        del self._doomed[resident.slot]
        self._quarantined.add(resident.slot)
        return resident.slot

    # --- removing ---------------------------------------------------------------------------------------------------

    def drop(self, name: BlockName) -> SlotIndex | None:
        """Invisible at once. The slot, quarantined and to be erased, or None if it is still being read (then `end_read`
        gives it) or the block is not here."""
        if self._residents.get(name) is None:
            return None
        resident = self._remove(name, self._clock())
        self.counters.dropped += 1
        if resident.refs:
            self._doomed[resident.slot] = resident
            return None
        self._quarantined.add(resident.slot)
        return resident.slot

    def flush(self) -> list[SlotIndex]:
        """Forget every block that nobody reads; their slots, quarantined and to be erased."""
        now = self._clock()
        slots = [self._remove(name, now).slot for name in self._residents.idle()]
        self._quarantined.update(slots)
        return slots

    def tick(self) -> None:
        """Drop blocks whose time is over, if the policy has one."""
        now = self._clock()
        if isinstance(self._policy, ExpiringPolicy):
            while (name := self._policy.expired(now)) is not None:
                self._free.append(self._remove(name, now).slot)
                self.counters.expirations += 1

    # --- looking ----------------------------------------------------------------------------------------------------

    def get(self, name: BlockName) -> Resident | None:
        return self._residents.get(name)

    def names(self) -> list[BlockName]:
        return [resident.name for resident in self._residents]

    def stats(self) -> dict[str, float]:
        gauges = {
            "slots": self.slots,
            "free": len(self._free),
            "writing": len(self._writing),
            "ready": len(self._residents),
            "reading": self._residents.held + len(self._doomed),
            "evictable": self._residents.evictable,
            "quarantined": len(self._quarantined),
        }
        return {**gauges, **{f"{key}_total": value for key, value in dataclasses.asdict(self.counters).items()}}

    def check_integrity(self) -> list[str]:
        """All violations found, as sentences; empty when sound."""
        wrong = self._residents.violations([r.parent for r in self._writing.values() if r.parent is not None])
        ready = [resident.slot for resident in self._residents]
        everywhere = [*self._free, *self._writing, *ready, *self._doomed, *self._quarantined]
        if sorted(everywhere) != list(range(self.slots)):
            wrong.append(
                f"free {len(self._free)} + writing {len(self._writing)} + ready {len(ready)} + doomed "
                f"{len(self._doomed)} + quarantined {len(self._quarantined)} are not each of {self.slots} slots once"
            )
        if self._writing_names != {record.name for record in self._writing.values()}:
            wrong.append("the names being written differ from the slots being written")
        return wrong

    # --- inside -----------------------------------------------------------------------------------------------------

    def _end_write(self, slot: SlotIndex) -> Record:
        record = self._writing.pop(slot)
        self._writing_names.discard(record.name)
        return record

    def _take_slot(self, now_s: float) -> SlotIndex | None:
        if not self._free:
            victim = self._residents.victim(now_s)
            if victim is None:
                return None
            self._free.append(self._remove(victim.meta.name, now_s).slot)
            self.counters.evictions += 1
        return self._free.popleft()

    def _remove(self, name: BlockName, now_s: float) -> Resident:
        resident = self._residents.remove(name, now_s)
        self.changes.remove(name)
        return resident
