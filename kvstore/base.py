"""Contracts of the store: eviction policies, the store client that ranks use, and the directory that routers use.

No torch here and in everything it imports: the router and the simulator use the same classes. Bytes never pass through
these interfaces; they move between a rank's pool and the mapped arena (`kvstore/transfer.py`).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from headrace.ids import BlockName, Incarnation, SlotIndex, Tier


@dataclasses.dataclass(slots=True)
class BlockMeta:
    """What a policy may know of a block."""

    name: BlockName
    parent: BlockName | None
    """None for the first block of a chain."""
    depth: int
    """Position in its chain, 0 for the first block: recompute cost grows with it."""
    size_bytes: int
    tenant: bytes = b""
    """Whose it is (`names.tenant_id`); empty: nobody's."""


class EvictionPolicy(Protocol):
    """Orders the evictable blocks of one tier. Pure bookkeeping, single-threaded; time is passed in so that a simulator
    can own the clock. The tier, not the policy, keeps children before parents: it offers a block for eviction only when
    no cached child is left (`add_evictable`), and withdraws it when it is leased or gains a child."""

    def on_insert(self, block: BlockMeta, now_s: float) -> None:
        """The block became ready."""
        ...

    def on_hit(self, name: BlockName, now_s: float) -> None: ...

    def add_evictable(self, name: BlockName, now_s: float) -> None: ...

    def remove_evictable(self, name: BlockName) -> None: ...

    def on_remove(self, name: BlockName) -> None:
        """The block left the tier (evicted, flushed or corrupt). Also removes it from the evictable ones."""
        ...

    def victim(self, now_s: float) -> BlockName | None:
        """The evictable block to drop next, or None. Does not remove it."""
        ...


@runtime_checkable
class ExpiringPolicy(Protocol):
    """An eviction policy that also drops blocks without pressure. Tiers ask it regularly."""

    def expired(self, now_s: float) -> BlockName | None:
        """An evictable block whose time is over, or None. Does not remove it."""
        ...


@runtime_checkable
class BatchPolicy(Protocol):
    """An eviction policy that takes the hits of a whole prompt at once. Optional: it only saves calls."""

    def on_hits(self, names: Sequence[BlockName], now_s: float) -> None:
        """As `on_hit` for each name in order."""
        ...


class Leased(NamedTuple):
    """A read lease on one block of the host tier. A tuple, because a long prompt makes thousands at a time."""

    name: BlockName
    slot: SlotIndex
    digest: bytes
    """XXH3-128 of the payload, 16 bytes."""
    tier: Tier
    """Where it was before somebody asked for it: DISK or PEER for the first lease after a `promote`, then HOST."""


class Coming(NamedTuple):
    """What became of a wish for blocks that lie below the host tier."""

    ready: int
    """Leading blocks that are readable now."""
    coming: int
    """Blocks right after those that are on their way up: ask again soon. 0: nothing to wait for."""


class PutOutcome:
    """Why `begin_put` gave no slot."""

    EXISTS = -1
    """Somebody has it, or is writing it: nothing to do."""
    FULL = -2
    """No room without dropping something held: the write is skipped, never an error to a request."""


class WriteSlot(int):
    """A slot that `begin_put` gave, to be written. It remembers which call gave it: after an abort the same block may
    get the same slot again, and a late commit or abort of the first time must not count for the second."""

    ticket: int

    def __new__(cls, slot: int, ticket: int) -> "WriteSlot":
        made = super().__new__(cls, slot)
        made.ticket = ticket
        return made


def ticket_of(slot: int) -> int:
    """0, which no write has, for a slot that does not come from `begin_put`."""
    return slot.ticket if isinstance(slot, WriteSlot) else 0


class StoreClient(Protocol):
    """One process's connection to its node daemon. Thread-safe; calls are batched and synchronous (a few tens of
    microseconds). Any call may raise DaemonUnavailable; the owner then goes on with its device tier alone and calls
    `reconnect`. Leases are renewed by the client's own heartbeat thread and die with the process."""

    incarnation: Incarnation

    @property
    def arena(self) -> str:
        """Names the mapped host tier. A daemon that was started again has another one, and a slot number of the one
        means nothing in the other."""
        ...

    def match(self, names: Sequence[BlockName]) -> int:
        """How many leading names are readable in a row. Touches them for the policy. Takes no lease."""
        ...

    def lease(self, names: Sequence[BlockName]) -> list[Leased | None]:
        """Take a read lease on each block; None where it is not (or no longer) there. A lease is counted: lease twice,
        release twice. Reading a slot after `release`, or when `lease_valid` is False, is a bug."""
        ...

    def lease_leading(self, names: Sequence[BlockName]) -> list[Leased]:
        """`match` and `lease` in one call: a read lease on each block of the leading run, none beyond it."""
        ...

    def promote(self, names: Sequence[BlockName]) -> Coming:
        """Ask the daemon to bring what lower tiers and other nodes have of these into the host tier; never waits for
        it. What has come is kept a moment for a `lease`, whose `tier` says where it came from. Call it again, every few
        ms, while something is coming; a transfer that fails or is too late stops being counted as coming."""
        ...

    @property
    def has_lower_tiers(self) -> bool:
        """Whether `promote` can ever bring anything."""
        ...

    def release(self, names: Sequence[BlockName]) -> None: ...

    def begin_put(self, blocks: Sequence[tuple[BlockName, BlockName | None, int]], tenant: bytes = b"") -> list[int]:
        """(name, parent, depth) each -> slot to write (a WriteSlot), or PutOutcome. The slot is in state `writing`,
        owned by this client; nobody sees it. Private blocks have parent None and are never in the directory. `tenant`:
        who they are counted for (`names.tenant_id`); empty: for whom their parent is."""
        ...

    def commit_put(self, writes: Sequence[tuple[BlockName, SlotIndex, bytes]], *, keep_lease: bool) -> None:
        """(name, slot, digest) each: all become visible, or (LeaseExpired) none. The slots are those that `begin_put`
        returned, not copies as plain numbers. `keep_lease` turns the write lease into a read lease: the pin that holds
        a block until the handover is acknowledged."""
        ...

    def abort_put(self, writes: Sequence[tuple[BlockName, SlotIndex]]) -> None: ...

    def drop(self, names: Sequence[BlockName], *, corrupt: bool = False) -> None:
        """Forget blocks at once (private blocks after handover; `corrupt` ones, whose bytes are not what was written).
        Held ones go when released."""
        ...

    def announce(self, added: Sequence[BlockName], removed: Sequence[BlockName]) -> None:
        """Tell the directory what this rank's device tier gained and lost."""
        ...

    def slot_view(self, slot: SlotIndex) -> memoryview:
        """The mapped bytes of a slot (`layout.slot_bytes`), writable."""
        ...

    def lease_valid(self) -> bool:
        """False when the last heartbeat is older than the lease time: nothing leased may be read any more."""
        ...

    def stats(self) -> dict[str, float]: ...

    def reconnect(self) -> None:
        """Dial the daemon again after DaemonUnavailable, under a new incarnation. Leases and unfinished writes from
        before are gone; what this rank announced is announced again by the client. Also says that none of this client's
        earlier copies into slots is still running. Raises DaemonUnavailable."""
        ...

    def follow(self, arena: str) -> None:
        """Map the host tier of this name, for slots that another client of the node was given. Dials again where
        another one is mapped: as `reconnect`, it says that no copy of this client is running. Raises
        DaemonUnavailable when the daemon of that arena is not there."""
        ...

    def close(self) -> None:
        """Release every lease and abort every write of this client."""
        ...


class StoreAdmin(Protocol):
    """What tools and operators ask of a node daemon beside `StoreClient`. Errors as there."""

    def pin(self, names: Sequence[BlockName], seconds: float) -> int:
        """Keep the leading readable run of `names` for `seconds`, whatever becomes of this client; how many blocks
        are kept. Raises IncompatiblePeer for a time out of bounds."""
        ...

    def unpin(self, names: Sequence[BlockName]) -> int:
        """End pins early; how many there were."""
        ...

    def set_quota(self, tenant: bytes, blocks: int | None) -> int:
        """How many blocks of the host tier a tenant may fill; None: the configured default. What it has beyond that is
        evicted as far as nothing holds it. Returns how many blocks it has now."""
        ...


class MapWatcher(Protocol):
    """Told of the host tier that a client maps: whoever copies may want the memory pinned."""

    def mapped(self, region: memoryview, slot_bytes: int, keep_alive: Callable[[], object]) -> None:
        """All slots of a newly mapped arena. `keep_alive` is called at least every second while it takes its time. An
        exception refuses the mapping."""
        ...

    def unmapping(self, region: memoryview) -> None:
        """The region goes; no copy of this client is running."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """How many leading blocks of a prompt each place holds."""

    host_blocks: dict[str, int]
    """node name -> leading blocks in its host tier"""
    device_blocks: dict[str, int]
    """rank name ("prefill-0", "decode-0.1") -> leading blocks in its device tier"""
    stored_blocks: dict[str, int] = dataclasses.field(default_factory=dict)
    """node name -> leading blocks in its host or disk tier; only nodes whose disk makes the run longer"""


class Directory(Protocol):
    """A router's view of who holds which block. Answers from memory; never blocks on the network."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def lookup(self, names: Sequence[BlockName]) -> Placement: ...

    def stats(self) -> dict[str, float]: ...
