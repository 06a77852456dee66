"""Copies blocks between this rank's pool and the host tier, through the store client's leases and two-phase puts."""

import random
from collections.abc import Sequence as Seq

from headrace.errors import DigestMismatch
from headrace.ids import BlockName
from headrace.kvstore.base import Leased, PutOutcome, StoreClient
from headrace.kvstore.pool import DevicePool
from headrace.kvstore.transfer import digest, load_slab, store_slab


class StoreMover:
    """Called by the store worker's thread only; the slots it is given stay referenced by the loop meanwhile."""

    def __init__(self, pool: DevicePool, client: StoreClient, verify_share: float) -> None:
        """`verify_share` (0..1) of the loads are checked against their digest."""
        self._pool = pool
        self._client = client
        self._verify_share = verify_share
        self._dice = random.Random()

    def restore(self, device_slot: int, source: Leased) -> None:
        view = self._client.slot_view(source.slot)[: self._pool.layout.payload_bytes]
        if self._dice.random() < self._verify_share and digest(view) != source.digest:
            self._client.drop([source.name])
            raise DigestMismatch(f"block {source.name.hex()[:16]} in host slot {source.slot} is not what was written")
        load_slab(self._pool, device_slot, view)

    def publish(self, blocks: Seq[tuple[int, BlockName, BlockName | None, int]]) -> tuple[int, int]:
        outcomes = self._client.begin_put([(name, parent, depth) for _, name, parent, depth in blocks])
        writes, skipped = [], 0
        try:
            for (device_slot, name, _parent, _depth), host_slot in zip(blocks, outcomes):
                if host_slot >= 0:
                    view = self._client.slot_view(host_slot)  # type: ignore[arg-type]
                    store_slab(self._pool, device_slot, view)
                    writes.append((name, host_slot, digest(view[: self._pool.layout.payload_bytes])))
                skipped += host_slot == PutOutcome.FULL
        except Exception:
            self._client.abort_put([(b[1], slot) for b, slot in zip(blocks, outcomes) if slot >= 0])  # type: ignore[misc]
            raise
        if writes:
            self._client.commit_put(writes, keep_lease=False)  # type: ignore[arg-type]
        return len(blocks) - skipped, skipped
