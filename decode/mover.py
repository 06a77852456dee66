"""Copies blocks between this rank's pool and the host tier, through the store client's leases and two-phase puts."""

import random
from collections.abc import Sequence as Seq

from headrace.decode.join import Block
from headrace.errors import CapacityError, DigestMismatch
from headrace.ids import BlockName
from headrace.kvstore.base import Leased, PutOutcome, StoreClient
from headrace.kvstore.names import private_name
from headrace.kvstore.pool import DevicePool
from headrace.kvstore.transfer import digest, load_slabs, side_stream_for, store_slab


class StoreMover:
    """Called by the store worker's thread only; the slots it is given stay referenced by the loop meanwhile."""

    def __init__(self, pool: DevicePool, client: StoreClient, verify_share: float) -> None:
        """`verify_share` (0..1) of the loads are checked against their digest."""
        self._pool = pool
        self._client = client
        self._verify_share = verify_share
        self._dice = random.Random()
        # On the steps' own stream every copy would first wait for the step that runs.
        self._side = side_stream_for(pool)
        self._fence: object = None

    def fence(self) -> object:
        return self._side.fence()

    def follow(self, fence: object) -> None:
        self._fence = fence

    def restore(self, device_slots: Seq[int], sources: Seq[Leased]) -> None:
        views = [self._client.slot_view(source.slot)[: self._pool.layout.payload_bytes] for source in sources]
        for source, view in zip(sources, views):
            if self._dice.random() < self._verify_share and digest(view) != source.digest:
                self._client.drop([source.name], corrupt=True)
                raise DigestMismatch(
                    f"block {source.name.hex()[:16]} in host slot {source.slot} is not what was written"
                )
        with self._side.after(self._fence):
            load_slabs(self._pool, device_slots, views)

    def publish(self, blocks: Seq[Block], tenant: bytes = b"") -> tuple[int, int]:
        outcomes = self._write(blocks, keep_lease=False, tenant=tenant)
        skipped = outcomes.count(PutOutcome.FULL)
        return len(blocks) - skipped, skipped

    def park(self, blocks: Seq[Block]) -> list[BlockName]:
        names = [block[1] for block in blocks]
        pinned = [lease is not None for lease in self._client.lease(names)]
        try:
            for again in range(2):
                left = [at for at, done in enumerate(pinned) if not done]
                if again:  # somebody else is writing these; whether that succeeds is not ours to wait for
                    for at in left:
                        names[at] = private_name()
                outcomes = self._write(
                    [(blocks[at][0], names[at], blocks[at][2], blocks[at][3]) for at in left], keep_lease=True
                )
                if PutOutcome.FULL in outcomes:
                    raise CapacityError(
                        f"{outcomes.count(PutOutcome.FULL)} of {len(blocks)} blocks found no room there"
                    )
                for at, outcome in zip(left, outcomes):
                    pinned[at] = outcome >= 0
        except Exception:
            self._client.release([name for name, done in zip(names, pinned) if done])
            raise
        return names

    def _write(self, blocks: Seq[Block], *, keep_lease: bool, tenant: bytes = b"") -> list[int]:
        """Put what is not there; the outcomes of `begin_put`. All or nothing is visible when a copy fails."""
        if not blocks:
            return []
        outcomes = self._client.begin_put([(name, parent, depth) for _, name, parent, depth in blocks], tenant)
        writes = []
        try:
            for (device_slot, name, _parent, _depth), host_slot in zip(blocks, outcomes):
                if host_slot >= 0:
                    view = self._client.slot_view(host_slot)  # type: ignore[arg-type]
                    with self._side.after(self._fence):
                        store_slab(self._pool, device_slot, view)
                    writes.append((name, host_slot, digest(view[: self._pool.layout.payload_bytes])))
        except Exception:
            self._client.abort_put([(b[1], slot) for b, slot in zip(blocks, outcomes) if slot >= 0])  # type: ignore[misc]
            raise
        if writes:
            self._client.commit_put(writes, keep_lease=keep_lease)  # type: ignore[arg-type]
        return outcomes
