"""The operations of `base.StoreClient` as messages: shared by the client over a socket and by the fake. Knows wire
forms, not transports."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import repeat
from typing import Any

from headrace.ids import BlockName, SlotIndex, Tier
from headrace.kvstore import wire
from headrace.kvstore.base import Coming, Leased
from headrace.messages import BoxStatus, StatusRequest


class StoreOperations(ABC):
    """`_call` sends one request and returns its reply, or raises what the daemon reported."""

    def __init__(self) -> None:
        self._announced: set[BlockName] = set()

    @abstractmethod
    def _call(self, request: Any) -> Any: ...

    def match(self, names: Sequence[BlockName]) -> int:
        count: int = self._call(wire.Match(names=wire.pack_names(names))).value
        return count

    def lease(self, names: Sequence[BlockName]) -> list[Leased | None]:
        reply = self._call(wire.Lease(names=wire.pack_names(names)))
        leases = _leases(names, reply)
        if wire.NO_SLOT in reply.slots:
            return [None if lease.slot < 0 else lease for lease in leases]
        return list(leases)

    def lease_leading(self, names: Sequence[BlockName]) -> list[Leased]:
        return _leases(names, self._call(wire.LeaseLeading(names=wire.pack_names(names))))

    def promote(self, names: Sequence[BlockName]) -> Coming:
        reply = self._call(wire.Promote(names=wire.pack_names(names), urgent=True))
        return Coming(reply.ready, reply.coming)

    def release(self, names: Sequence[BlockName]) -> None:
        self._call(wire.Release(names=wire.pack_names(names)))

    def begin_put(self, blocks: Sequence[tuple[BlockName, BlockName | None, int]], tenant: bytes = b"") -> list[int]:
        request = wire.BeginPut(
            names=wire.pack_names(name for name, _, _ in blocks),
            parents=wire.pack_names(wire.NO_NAME if parent is None else parent for _, parent, _ in blocks),
            depths=wire.pack_ints([depth for _, _, depth in blocks]),
            tenant=tenant,
        )
        reply: wire.Slots = self._call(request)
        return wire.unpack_writes(reply.slots, reply.tickets)

    def commit_put(self, writes: Sequence[tuple[BlockName, SlotIndex, bytes]], *, keep_lease: bool) -> None:
        self._call(
            wire.CommitPut(
                names=wire.pack_names(name for name, _, _ in writes),
                slots=wire.pack_ints([slot for _, slot, _ in writes]),
                tickets=wire.pack_tickets(slot for _, slot, _ in writes),
                digests=b"".join(digest for _, _, digest in writes),
                keep_lease=keep_lease,
            )
        )

    def abort_put(self, writes: Sequence[tuple[BlockName, SlotIndex]]) -> None:
        self._call(
            wire.AbortPut(
                names=wire.pack_names(name for name, _ in writes),
                slots=wire.pack_ints([slot for _, slot in writes]),
                tickets=wire.pack_tickets(slot for _, slot in writes),
            )
        )

    def drop(self, names: Sequence[BlockName], *, corrupt: bool = False) -> None:
        self._call(wire.Drop(names=wire.pack_names(names), corrupt=corrupt))

    def pin(self, names: Sequence[BlockName], seconds: float) -> int:
        count: int = self._call(wire.Pin(names=wire.pack_names(names), seconds=seconds)).value
        return count

    def unpin(self, names: Sequence[BlockName]) -> int:
        count: int = self._call(wire.Unpin(names=wire.pack_names(names))).value
        return count

    def set_quota(self, tenant: bytes, blocks: int | None) -> int:
        count: int = self._call(wire.SetQuota(tenant=tenant, blocks=-1 if blocks is None else blocks)).value
        return count

    def announce(self, added: Sequence[BlockName], removed: Sequence[BlockName]) -> None:
        # Remembered even if the call fails: `_announce_all` then tells the daemon that comes back.
        self._announced.update(added)
        self._announced.difference_update(removed)
        self._call(wire.Announce(added=wire.pack_names(added), removed=wire.pack_names(removed)))

    def stats(self) -> dict[str, float]:
        status: BoxStatus = self._call(StatusRequest())
        return status.values

    def _announce_all(self) -> None:
        if self._announced:
            self._call(wire.Announce(added=wire.pack_names(self._announced), removed=b""))


def _leases(names: Sequence[BlockName], reply: wire.LeaseReply) -> list[Leased]:
    slots, digests = wire.unpack_slots(reply.slots), wire.unpack_digests(reply.digests)
    tiers = map(wire.TIERS.__getitem__, reply.tiers) if reply.tiers else repeat(Tier.HOST)
    return list(map(Leased._make, zip(names, slots, digests, tiers)))
