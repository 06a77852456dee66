"""Copies blocks between this rank's pool and the host tier, through the store client's leases and two-phase puts."""

from collections.abc import Sequence as Seq

from headrace.ids import BlockName
from headrace.kvstore.base import PutOutcome, StoreClient
from headrace.kvstore.pool import DevicePool
from headrace.kvstore.transfer import digest, load_slab, store_slab


class StoreMover:
    """Called by the store worker's thread only; the slots it is given stay referenced by the loop meanwhile."""

    def __init__(self, pool: DevicePool, client: StoreClient) -> None:
        self._pool = pool
        self._client = client

    def restore(self, pairs: Seq[tuple[int, int, bytes]]) -> None:
        for device_slot, host_slot, _digest in pairs:
            load_slab(self._pool, device_slot, self._client.slot_view(host_slot))  # type: ignore[arg-type]

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
