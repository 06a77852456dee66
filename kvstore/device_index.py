"""Bookkeeping of one rank's device pool: which slot holds which block, who uses it, what goes first. Pure: no torch.

A slot is free, owned (one or more references, not named yet: being computed or loaded), or named. A named slot with
references is held; without, it is cached and may be evicted, children before parents. The prefill leader, the decode
ranks and the simulator use this class unchanged. Single-threaded.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

from headrace.ids import BlockName, SlotIndex
from headrace.kvstore.base import BlockMeta, EvictionPolicy
from headrace.kvstore.changes import ChangeSet
from headrace.kvstore.names import is_private
from headrace.kvstore.residents import Resident, Residents


class DeviceIndex:
    """`num_slots` slots. Slots are returned by number; every slot that `acquire`, `allocate` or `name_slot` returned
    carries one reference that `release` gives back."""

    def __init__(
        self,
        num_slots: int,
        policy: EvictionPolicy,
        clock: Callable[[], float] = time.monotonic,
        slot_bytes: int = 1,
    ) -> None:
        self.num_slots = num_slots
        self.evictions = 0
        self._clock = clock
        self._slot_bytes = slot_bytes
        self._free = deque(SlotIndex(slot) for slot in range(num_slots))
        self._residents = Residents(policy)
        self._named: dict[SlotIndex, Resident] = {}
        self._owned: dict[SlotIndex, int] = {}
        self._changes = ChangeSet()

    @property
    def free_count(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    @property
    def held_count(self) -> int:
        """Slots with at least one reference."""
        return len(self._owned) + self._residents.held

    @property
    def cached_count(self) -> int:
        """Named slots without a reference."""
        return self.num_slots - self.free_count - self.held_count

    def match(self, names: Sequence[BlockName]) -> list[SlotIndex]:
        """Slots of the leading run of `names` that is here. Takes no reference and touches nothing."""
        return [r.slot for r in self._residents.leading(names)]

    def acquire(self, names: Sequence[BlockName]) -> list[SlotIndex]:
        """As `match`, with one reference each."""
        now, run = self._clock(), self._residents.leading(names)
        for resident in run:
            self._residents.hit(resident, now)
            self._residents.hold(resident, now)
        return [r.slot for r in run]

    def retain(self, slots: Sequence[SlotIndex]) -> None:
        """One more reference on each slot. Raises ValueError for a free or cached slot."""
        for slot in slots:
            named = self._named.get(slot)
            if named is not None and named.refs > 0:
                named.refs += 1
            elif slot in self._owned:
                self._owned[slot] += 1
            else:
                raise ValueError(f"slot {slot} is not held, it cannot be retained")

    def allocate(self, count: int) -> list[SlotIndex] | None:
        """`count` unnamed slots with one reference each, or None when that many cannot be had without dropping what is
        held. Contents are whatever was there."""
        now = self._clock()
        if count > self.free_count + self.cached_count:
            return None
        while len(self._free) < count:
            victim = self._residents.victim(now)
            if victim is None:
                return None
            self._drop(victim, now)
            self.evictions += 1
        slots = [self._free.popleft() for _ in range(count)]
        self._owned.update(dict.fromkeys(slots, 1))
        return slots

    def name_slot(self, slot: SlotIndex, name: BlockName, parent: BlockName | None, depth: int) -> SlotIndex:
        """Give an owned slot its name: its bytes are complete and will not change. If the name is here already, the
        caller's reference moves to that slot, which is returned, and the duplicate is given back."""
        references = self._owned.get(slot)
        if references is None:
            raise ValueError(f"slot {slot} is not an owned, unnamed slot; it cannot become {name.hex()}")
        now, existing = self._clock(), self._residents.get(name)
        if existing is not None:
            self._residents.hit(existing, now)
            self._residents.hold(existing, now)
            self.release([slot])
            return existing.slot
        del self._owned[slot]
        resident = Resident(BlockMeta(name, parent, depth, self._slot_bytes), slot, references)
        self._named[slot] = resident
        self._residents.insert(resident, now)
        self._changes.add(name)
        return slot

    def release(self, slots: Sequence[SlotIndex]) -> None:
        """Give one reference of each slot back. An unnamed slot without references is free, a named one is cached.
        Raises ValueError for a slot that is not held."""
        now = self._clock()
        for slot in slots:
            named = self._named.get(slot)
            if named is not None:
                self._residents.unhold(named, now)
                continue
            if slot not in self._owned:
                raise ValueError(f"slot {slot} is released, but nothing holds it")
            self._owned[slot] -= 1
            if not self._owned[slot]:
                del self._owned[slot]
                self._free.append(slot)

    def flush(self) -> int:
        """Forget every block that nothing holds; returns how many."""
        now, idle = self._clock(), self._residents.idle()
        for name in idle:
            resident = self._residents.get(name)
            assert resident is not None
            self._drop(resident, now)
        return len(idle)

    def take_changes(self) -> tuple[list[BlockName], list[BlockName]]:
        """(added, removed) since the last call, net, without private names: what to announce."""
        return self._changes.take()

    def names(self) -> list[BlockName]:
        """Every name here, for a full announcement after a reconnect."""
        return [r.name for r in self._residents if not is_private(r.name)]

    def stats(self) -> dict[str, float]:
        return {
            "slots": self.num_slots,
            "free": self.free_count,
            "held": self.held_count,
            "cached": self.cached_count,
            "evictions": self.evictions,
        }

    def check_integrity(self) -> list[str]:
        """All violations found, as sentences; empty when sound."""
        wrong = self._residents.violations()
        free, owned, named = set(self._free), set(self._owned), set(self._named)
        if len(free) != len(self._free):
            wrong.append("a slot is free twice")
        if free & owned or free & named or owned & named:
            wrong.append(f"slots in two states: {sorted(free & owned | free & named | owned & named)}")
        if free | owned | named != set(range(self.num_slots)):
            wrong.append(f"free {len(free)} + owned {len(owned)} + named {len(named)} != total {self.num_slots}")
        wrong += [f"owned slot {slot} has {refs} references" for slot, refs in self._owned.items() if refs < 1]
        wrong += [f"slot {slot} and its block disagree" for slot, r in self._named.items()
                  if r.slot != slot or self._residents.get(r.name) is not r]  # fmt: skip
        if len(named) != len(self._residents):
            wrong.append(f"{len(named)} named slots but {len(self._residents)} names")
        return wrong

    def _drop(self, resident: Resident, now_s: float) -> None:
        self._residents.remove(resident.name, now_s)
        del self._named[resident.slot]
        self._free.append(resident.slot)
        self._changes.remove(resident.name)
