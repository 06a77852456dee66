"""Records of the host tier's bookkeeping. Pure."""

import dataclasses
from collections.abc import Callable, Iterable

from headrace.ids import Incarnation, SlotIndex
from headrace.kvstore.base import BlockMeta
from headrace.kvstore.leases import Leases


@dataclasses.dataclass(slots=True)
class Writing:
    meta: BlockMeta
    owner: Incarnation
    ticket: int


@dataclasses.dataclass(slots=True)
class Owner:
    deadline_s: float
    leases: Leases = dataclasses.field(default_factory=Leases)
    writes: set[SlotIndex] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(slots=True)
class Quarantine:
    slots: list[SlotIndex]
    until_s: float
    may_write: Callable[[], bool]


@dataclasses.dataclass(slots=True)
class HostCounters:
    """Events since the start, in blocks unless said otherwise."""

    hits: int = 0
    misses: int = 0
    puts: int = 0
    put_exists: int = 0
    put_full: int = 0
    aborted: int = 0
    dropped: int = 0
    corrupt: int = 0
    """Dropped because a digest did not fit."""
    flushed: int = 0
    evictions: int = 0
    quota_evictions: int = 0
    expirations: int = 0
    quarantined: int = 0
    stale_releases: int = 0
    owners_expired: int = 0
    """Clients."""


def oldest_lease_s(owners: Iterable[Owner], now_s: float) -> float:
    """For how long the block that has been read longest has been held; 0: none is."""
    since = [resident.held_since_s for owner in owners for resident in owner.leases]
    return now_s - min(since) if since else 0.0
