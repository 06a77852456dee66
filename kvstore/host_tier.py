"""Bookkeeping of a node's host tier. Pure: it owns slot numbers, names and leases, never bytes, sockets or clocks.

    free -> writing -> ready -> leased n -> evictable -> free
               |
               +-> quarantined -> free      the writer vanished, or may still be writing

A block is visible from `commit_put` on, whole or not at all. A lease belongs to one owner (an incarnation of a client);
it lives while the owner is renewed. A dropped block that somebody still reads is invisible at once and freed with its
last lease. Single-threaded: the daemon's loop.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, KeysView, Sequence

from headrace.errors import LeaseExpired
from headrace.ids import BlockName, Incarnation, SlotIndex
from headrace.kvstore.base import BlockMeta, EvictionPolicy, ExpiringPolicy, PutOutcome, WriteSlot, ticket_of
from headrace.kvstore.changes import ChangeSet
from headrace.kvstore.checksum import DIGEST_BYTES
from headrace.kvstore.host_check import stats, violations
from headrace.kvstore.host_state import HostCounters, Owner, Quarantine, Writing
from headrace.kvstore.quotas import Quotas
from headrace.kvstore.residents import Resident, Residents

Write = tuple[BlockName, SlotIndex, bytes]
MayWrite = Callable[[], bool]


MAX_TICKET = (1 << 31) - 1
_DEPTHS = tuple(range(4096))


class HostTier:
    """`slots` slots of `slot_bytes`. `lease_s`: an owner not renewed for so long is dead. `grace_s`: least time a slot
    of a vanished writer stays quarantined."""

    def __init__(
        self,
        *,
        slots: int,
        slot_bytes: int,
        policy: EvictionPolicy,
        lease_s: float,
        grace_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        quotas: Quotas | None = None,
    ) -> None:
        """`quotas`: limits of tenants around `policy`; None: nobody is limited and nobody can be."""
        self.slots = slots
        self.counters = HostCounters()
        self.changes = ChangeSet()
        self.on_gone: list[Callable[[BlockName, str], None]] = []
        """Told of visible blocks that go, and why: evicted, demoted, quota, expired, dropped, corrupt, flushed."""
        self._slot_bytes = slot_bytes
        self._policy = policy
        self._lease_s = lease_s
        self._grace_s = grace_s
        self.clock = self._clock = clock
        self._free = deque(SlotIndex(slot) for slot in range(slots))
        self._quotas = quotas or Quotas(policy)
        self._residents = Residents(self._quotas)
        self._writing: dict[SlotIndex, Writing] = {}
        self._writing_names: set[BlockName] = set()
        self._doomed: dict[SlotIndex, Resident] = {}
        self._quarantine: list[Quarantine] = []
        self._owners: dict[Incarnation, Owner] = {}
        self._ticket = 0

    # --- owners -----------------------------------------------------------------------------------------------------

    def attach(self, owner: Incarnation) -> None:
        """A client is there; its lease time starts."""
        self._owners[owner] = Owner(self._clock() + self._lease_s)

    def renew(self, owner: Incarnation) -> None:
        """Heartbeat. Raises LeaseExpired for an owner that is not attached (any more)."""
        self._owner(owner).deadline_s = self._clock() + self._lease_s

    def detach(self, owner: Incarnation, may_write: MayWrite | None = None) -> None:
        """The client is gone: its leases end. Without `may_write` it has said that it no longer writes, and its
        unfinished slots are free; else they are quarantined until the grace is over and `may_write()` is False."""
        gone = self._owners.pop(owner, None)
        if gone is None:
            return
        now = self._clock()
        self._unhold(list(gone.leases), now)
        slots = sorted(gone.writes)
        for slot in slots:
            self._forget_write(slot, now)
        if may_write is None:
            self._free.extend(slots)
        elif slots:
            self._quarantine.append(Quarantine(slots, now + self._grace_s, may_write))
            self.counters.quarantined += len(slots)

    def tick(self) -> list[Incarnation]:
        """Regular upkeep: frees quarantined slots whose time has come and drops blocks whose time is over. Returns the
        owners whose lease ended: the caller detaches them with what it knows of their process."""
        now = self._clock()
        for entry in [q for q in self._quarantine if q.until_s <= now and not q.may_write()]:
            self._free.extend(entry.slots)
            self._quarantine.remove(entry)
        if isinstance(self._policy, ExpiringPolicy):
            while (name := self._policy.expired(now)) is not None:
                self._remove(name, now, "expired")
                self.counters.expirations += 1
        for tenant in self._quotas.limited():
            self._shrink(tenant, now)
        expired = [owner for owner, state in self._owners.items() if state.deadline_s <= now]
        self.counters.owners_expired += len(expired)
        return expired

    # --- reading ----------------------------------------------------------------------------------------------------

    def match(self, names: Sequence[BlockName]) -> int:
        """Leading names that are readable; touches them."""
        now, run = self._clock(), self._residents.leading(names)
        self._residents.hit_all(run, now)
        return len(run)

    def lease(self, owner: Incarnation, names: Sequence[BlockName]) -> list[Resident | None]:
        """One read lease on each block that is readable, None for the others. Raises LeaseExpired (see `renew`)."""
        found = self._residents.find(names)
        self._take_leases(owner, [resident for resident in found if resident is not None], len(names))
        return found

    def lease_leading(self, owner: Incarnation, names: Sequence[BlockName]) -> list[Resident]:
        """`match` and `lease` at once: one read lease on each block of the leading readable run."""
        run = self._residents.leading(names)
        self._take_leases(owner, run, len(names))
        return run

    def pin(self, owner: Incarnation, name: BlockName) -> Resident | None:
        """As `lease` of one block, but no use of it: for copies to a lower tier."""
        resident = self._residents.get(name)
        if resident is not None:
            leases = self._owner(owner).leases
            self._residents.hold(resident, self._clock())
            leases.add([resident])
        return resident

    def release(self, owner: Incarnation, names: Sequence[BlockName]) -> None:
        """Give back one lease of this owner on each block. A block it has no lease on is left alone and counted: no
        owner can end another's lease, nor one of its own twice."""
        taken = self._owner(owner).leases.take(names)
        self.counters.stale_releases += len(names) - len(taken)
        self._unhold(taken, self._clock())

    # --- writing ----------------------------------------------------------------------------------------------------

    def begin_put(
        self, owner: Incarnation, blocks: Sequence[tuple[BlockName, BlockName | None, int]], tenant: bytes = b""
    ) -> list[WriteSlot | int]:
        """(name, parent, depth) each -> slot in state `writing`, or PutOutcome. A block whose parent found the tier
        full in the same call is not written either: without its parent nobody would find it. Without `tenant` a block
        is counted for whom its parent is."""
        state, now = self._owner(owner), self._clock()
        refused: set[BlockName] = set()
        given: dict[BlockName, BlockMeta] = {}
        outcomes: list[WriteSlot | int] = []
        for name, parent, depth in blocks:
            if name in self._writing_names or self._residents.get(name) is not None:
                self.counters.put_exists += 1
                outcomes.append(PutOutcome.EXISTS)
                continue
            # Before the search for room, or the block's own parent could be chosen to make room for it.
            self._residents.adopt(parent, now)
            above = None if parent is None else self._residents.get(parent) or given.get(parent)
            whose = tenant or (b"" if above is None else above.tenant)
            slot = None if parent in refused else self._take_slot(whose, now)
            if slot is None:
                self._residents.disown(parent, now)
                refused.add(name)
                self.counters.put_full += 1
                outcomes.append(PutOutcome.FULL)
                continue
            self._ticket = ticket = self._ticket % MAX_TICKET + 1
            # There are many blocks: a block and its child share one object for the name of the parent, and blocks of
            # one depth one for that number.
            depth = _DEPTHS[depth] if 0 <= depth < len(_DEPTHS) else depth
            meta = BlockMeta(name, parent if above is None else above.name, depth, self._slot_bytes, whose)
            self._writing[slot] = Writing(meta, owner, ticket)
            self._writing_names.add(name)
            self._quotas.count(whose, 1)
            given[name] = meta
            state.writes.add(slot)
            outcomes.append(WriteSlot(slot, ticket))
        return outcomes

    def commit_put(self, owner: Incarnation, writes: Sequence[Write], *, keep_lease: bool) -> None:
        """All become visible, or (LeaseExpired) none."""
        state, now = self._owner(owner), self._clock()
        self._check_writes(owner, [(name, slot) for name, slot, _ in writes])
        for name, _, digest in writes:
            if len(digest) != DIGEST_BYTES:
                raise ValueError(f"digest of {name.hex()} has {len(digest)} bytes, not {DIGEST_BYTES}")
        for _, slot, digest in writes:
            slot, meta = SlotIndex(int(slot)), self._writing[slot].meta
            resident = Resident(meta, slot, int(keep_lease), digest)
            self._residents.insert(resident, now)
            self._quotas.count(meta.tenant, 1)
            self._forget_write(slot, now)
            state.writes.discard(slot)
            if keep_lease:
                state.leases.add([resident])
            self.changes.add(meta.name)
        self.counters.puts += len(writes)

    def abort_put(
        self, owner: Incarnation, writes: Sequence[tuple[BlockName, SlotIndex]], may_write: MayWrite | None = None
    ) -> None:
        """The slots are free, or, with `may_write`, quarantined until it is False: a copy that was given up may still
        be running. Slots that are not the owner's own writes are left alone."""
        state, now = self._owner(owner), self._clock()
        mine = [SlotIndex(int(slot)) for name, slot in writes if self._is_write(owner, name, slot)]
        for slot in mine:
            self._forget_write(slot, now)
            state.writes.discard(slot)
        self.counters.aborted += len(mine)
        if may_write is None:
            self._free.extend(mine)
        elif mine:
            self._quarantine.append(Quarantine(mine, now, may_write))
            self.counters.quarantined += len(mine)

    # --- removing ---------------------------------------------------------------------------------------------------

    def drop(self, names: Sequence[BlockName], *, corrupt: bool = False) -> None:
        """Blocks become invisible at once; the slot of one that is still read is freed with its last lease."""
        now = self._clock()
        for name in names:
            if self._residents.get(name) is not None:
                self._remove(name, now, "corrupt" if corrupt else "dropped")
                self.counters.dropped += 1
                self.counters.corrupt += corrupt

    def evict(self, name: BlockName) -> bool:
        """Make room ahead of need. False if the block is held, has children here, or is gone."""
        if goes := self._residents.may_go(name):
            self._remove(name, self._clock(), "demoted")
            self.counters.evictions += 1
        return goes

    def set_quota(self, tenant: bytes, blocks: int | None) -> int:
        """Limit a tenant, None: to the default; evicts what it has beyond that and nothing holds. Returns how many
        blocks it has now. Raises ValueError for what is no tenant."""
        now = self._clock()
        present = [(r.meta, self._residents.may_go(r.name)) for r in self._residents if r.tenant == tenant]
        self._quotas.set_limit(tenant, blocks, present, now)
        self._shrink(tenant, now)
        return self._quotas.used(tenant)

    def flush(self) -> int:
        """Forget every block that nothing holds; returns how many."""
        idle, now = self._residents.idle(), self._clock()
        for name in idle:
            self._remove(name, now, "flushed")
        self.counters.flushed += len(idle)
        return len(idle)

    # --- looking ----------------------------------------------------------------------------------------------------

    def names(self) -> list[BlockName]:
        """All visible names."""
        return [r.name for r in self._residents]

    @property
    def free(self) -> int:
        return len(self._free)

    def coldest(self) -> Resident | None:
        """The block that would be evicted next."""
        return self._residents.victim(self._clock())

    def leases_of(self, owner: Incarnation) -> int:
        state = self._owners.get(owner)
        return len(state.leases) if state else 0

    def stats(self) -> dict[str, float]:
        """Slots by state, counters by cause, tenants with a limit."""
        return stats(self)

    @property
    def visible(self) -> KeysView[BlockName]:
        """All visible names; a live view."""
        return self._residents.names()

    def find(self, names: Sequence[BlockName]) -> list[Resident | None]:
        """The visible block of each name, or None; touches nothing."""
        return self._residents.find(names)

    def blocks(self) -> Iterator[Resident]:
        """All visible blocks."""
        return iter(self._residents)

    def check_integrity(self) -> list[str]:
        """All violations found, as sentences; empty when sound."""
        return violations(self)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _owner(self, owner: Incarnation) -> Owner:
        state = self._owners.get(owner)
        if state is None:
            raise LeaseExpired(f"client {owner} is not attached: its leases and unfinished writes are gone")
        return state

    def _check_writes(self, owner: Incarnation, writes: Sequence[tuple[BlockName, SlotIndex]]) -> None:
        if len({slot for _, slot in writes}) != len(writes):
            raise LeaseExpired("a slot is committed twice in one call")
        for name, slot in writes:
            if not self._is_write(owner, name, slot):
                raise LeaseExpired(
                    f"slot {slot} is not being written by {owner} as {name.hex()}, ticket {ticket_of(slot)}; "
                    "nothing is committed"
                )

    def _is_write(self, owner: Incarnation, name: BlockName, slot: SlotIndex) -> bool:
        writing = self._writing.get(slot)
        return writing is not None and (writing.owner, writing.meta.name, writing.ticket) == (
            owner,
            name,
            ticket_of(slot),
        )

    def _take_slot(self, tenant: bytes, now_s: float) -> SlotIndex | None:
        if self._quotas.is_full(tenant):
            if not self._make_room_of(tenant, now_s):
                self._quotas.refused += 1
                return None
        elif not self._free:
            victim = self._residents.victim(now_s)
            if victim is None:
                return None
            self._remove(victim.name, now_s, "evicted")
            self.counters.evictions += 1
        # A tenant below its limit got room from anybody; one at its limit has just made some itself.
        return self._free.popleft()

    def _make_room_of(self, tenant: bytes, now_s: float) -> bool:
        """Evict a tenant's own blocks until it may have one more; False if it holds too much."""
        self._shrink(tenant, now_s)
        if self._quotas.is_over(tenant):
            return False
        return not self._quotas.is_full(tenant) or self._evict_one_of(tenant, now_s)

    def _shrink(self, tenant: bytes, now_s: float) -> None:
        while self._quotas.is_over(tenant) and self._evict_one_of(tenant, now_s):
            pass

    def _evict_one_of(self, tenant: bytes, now_s: float) -> bool:
        name = self._quotas.victim_of(tenant, now_s)
        if name is None:
            return False
        self._remove(name, now_s, "quota")
        self.counters.quota_evictions += 1
        return True

    def _remove(self, name: BlockName, now_s: float, why: str) -> None:
        for told in self.on_gone:
            told(name, why)
        resident = self._residents.remove(name, now_s)
        self._quotas.count(resident.tenant, -1)
        self.changes.remove(name)
        if resident.refs:
            self._doomed[resident.slot] = resident
        else:
            self._free.append(resident.slot)

    def _take_leases(self, owner: Incarnation, residents: Sequence[Resident], asked: int) -> None:
        leases, now = self._owner(owner).leases, self._clock()
        # Held first: what is not on offer costs the policy less to touch.
        self._residents.hold_all(residents, now)
        self._residents.hit_all(residents, now)
        leases.add(residents)
        self.counters.hits += len(residents)
        self.counters.misses += asked - len(residents)

    def _unhold(self, residents: Sequence[Resident], now_s: float) -> None:
        if not self._doomed:
            self._residents.unhold_all(residents, now_s)
            return
        doomed = [r for r in residents if self._doomed.get(r.slot) is r]
        self._residents.unhold_all([r for r in residents if self._doomed.get(r.slot) is not r], now_s)
        for resident in doomed:
            resident.refs -= 1
            if not resident.refs:
                del self._doomed[resident.slot]
                self._free.append(resident.slot)

    def _forget_write(self, slot: SlotIndex, now_s: float) -> None:
        meta = self._writing.pop(slot).meta
        self._writing_names.discard(meta.name)
        self._quotas.count(meta.tenant, -1)
        self._residents.disown(meta.parent, now_s)
