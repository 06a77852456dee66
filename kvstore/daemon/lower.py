"""Everything below a node's host tier, as one thing: disk, other nodes, and what moves blocks up and down.

`StoreCore` calls it with names; nothing here knows sessions or messages. Runs on the daemon's event loop.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

from headrace.ids import BlockName, Incarnation, Tier, new_incarnation
from headrace.kvstore.base import Coming
from headrace.kvstore.daemon.demoter import Demoter
from headrace.kvstore.daemon.events import DISK_PLACE, EventLog
from headrace.kvstore.daemon.from_disk import DiskSource
from headrace.kvstore.daemon.promoter import Promoter, Source
from headrace.kvstore.daemon.pump import Lane, Pump
from headrace.kvstore.disk.store import DiskStore
from headrace.kvstore.host_tier import HostTier
from headrace.kvstore.policies.write import WritePolicy

QUEUE_BLOCKS = {Lane.RESTORE: 8192, Lane.DEMOTE: 1024, Lane.PREFETCH: 1024}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DiskSide:
    """What a node with a disk tier has besides it."""

    store: DiskStore
    policy: WritePolicy
    admit_uses: int
    depth: int
    """Transfers at once."""


class Part(Protocol):
    """Something else that belongs to the lower tiers and is kept up with them."""

    def tick(self) -> None: ...

    def values(self) -> dict[str, float]: ...

    async def close(self) -> None: ...


class LowerTiers:
    def __init__(
        self,
        host: HostTier,
        slot_view: Callable[[int], memoryview],
        disk: DiskSide | None = None,
        sources: Sequence[Source] = (),
    ) -> None:
        """`slot_view`: all bytes of a host slot. `sources`: asked after the disk, in order."""
        self._host = host
        self.owner: Incarnation = new_incarnation()
        host.attach(self.owner)
        self._disk = disk.store if disk is not None else None
        self._pump = Pump(disk.depth if disk is not None else 1, QUEUE_BLOCKS)
        self._demoter: Demoter | None = None
        below: list[Source] = list(sources)
        if disk is not None:
            self._demoter = Demoter(
                host, disk.store, self.owner, slot_view, self._pump, disk.policy, admit_uses=disk.admit_uses
            )
            below.insert(0, DiskSource(disk.store, self._pump))
        self._announce = disk is not None
        self.parts: list[Part] = []
        """Closed with this, before it."""
        self._promoter = Promoter(host, self.owner, slot_view, below)

    def promote(self, names: Sequence[BlockName], *, urgent: bool, here_only: bool = False) -> Coming:
        """As `StoreClient.promote`. Not `urgent`: nobody waits yet. `here_only`: not from other nodes."""
        return self._promoter.promote(names, Lane.RESTORE if urgent else Lane.PREFETCH, here_only=here_only)

    def leased(self, names: Sequence[BlockName]) -> dict[BlockName, Tier]:
        """Clients hold these now: which of them came from below for the first of them."""
        return self._promoter.leased(names)

    def used(self, names: Sequence[BlockName]) -> None:
        """These were put or hit by a request."""
        if self._demoter is not None:
            self._demoter.used(names)

    def drop(self, names: Sequence[BlockName]) -> None:
        if self._disk is not None:
            for name in names:
                self._disk.drop(name)

    def flush(self) -> int:
        return self._disk.flush() if self._disk is not None else 0

    def tick(self) -> None:
        self._host.renew(self.owner)
        self._promoter.tick()
        for part in self.parts:
            part.tick()
        if self._disk is not None:
            self._disk.tick()
        if self._demoter is not None:
            self._demoter.tick()

    def publish(self, events: EventLog) -> bool:
        """Carry what the disk tier gained and lost into the log; True if there is news."""
        if self._disk is None:
            return False
        added, removed = self._disk.tier.changes.take()
        if not self._disk.on:
            self._announce = True
            return events.end(DISK_PLACE)
        if self._announce:
            # On (again): all of it, since the log knows nothing of it.
            self._announce, added = False, [*added, *self._disk.tier.names()]
        return events.change(DISK_PLACE, added, removed)

    def values(self) -> dict[str, float]:
        values = self._promoter.values()
        for part in self.parts:
            values |= part.values()
        if self._disk is not None:
            values |= {f"disk_{key}": value for key, value in self._disk.values().items()}
            values |= {f"disk_queue_{key}": value for key, value in self._pump.values().items()}
        if self._demoter is not None:
            values |= {f"demotion_{key}": value for key, value in self._demoter.values().items()}
        return values

    def check_integrity(self) -> list[str]:
        return [] if self._disk is None else [f"disk: {line}" for line in self._disk.tier.check_integrity()]

    @property
    def idle(self) -> bool:
        """Nothing is moving or waiting to move."""
        return self._pump.idle and not self._promoter.active and (self._disk is None or not self._disk.busy)

    async def abandon(self) -> None:
        """Stop without writing anything down, as the end of the process would. For tests."""
        await self._pump.close()
        if self._disk is not None:
            await self._disk.abandon()

    async def close(self) -> None:
        for part in self.parts:
            await part.close()
        await self._pump.close()
        if self._disk is not None:
            await self._disk.close()
        self._host.detach(self.owner)
