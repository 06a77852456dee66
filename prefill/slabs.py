"""A rank's own copies between its pool and the mapped host tier (`prefill.base.Slabs`)."""

import logging
import random
from collections.abc import Sequence

from headrace.errors import DaemonUnavailable
from headrace.ids import SlotIndex
from headrace.kvstore.base import StoreClient
from headrace.kvstore.checksum import digest
from headrace.kvstore.copiers.ahead import Loaded, Loading
from headrace.kvstore.pool import DevicePool
from headrace.kvstore.transfer import begin_load, store_slabs
from headrace.prefill.base import Restoring
from headrace.prefill.plan import RestorePlan, StorePlan

log = logging.getLogger(__name__)


class ArenaRestoring:
    def __init__(self, loading: Loading, bad: list[int]) -> None:
        self.latent, self.index = loading.latent, loading.index
        self._loading, self._bad = loading, bad

    def finish(self) -> list[int]:
        self._loading.finish()
        return self._bad


class ArenaSlabs:
    """`verify_share` (0..1) of the loads are checked against their digest. `groups`: how many groups of layers a load
    comes in (`prefill.restore_groups`). Which slots may be read or written is the
    leader's business: it holds the leases."""

    def __init__(self, pool: DevicePool, client: StoreClient, verify_share: float, groups: int = 1) -> None:
        self._pool, self._client, self._verify_share, self._groups = pool, client, verify_share, groups
        self._dice = random.Random()

    def enter(self, arena: str) -> bool:
        # The leader is there already: its client gave the slots. A follower learns here that the daemon is a new one.
        try:
            self._client.follow(arena)
        except DaemonUnavailable as error:
            log.warning("the host tier of this step cannot be reached: %s", error)
            return False
        return True

    def begin_load(self, restores: Sequence[RestorePlan], *, reachable: bool) -> Restoring:
        if not reachable:
            return ArenaRestoring(Loaded(self._pool), list(range(len(restores))))
        views = [self._payload(restore.host_slot) for restore in restores]
        loading = begin_load(self._pool, [restore.device_slot for restore in restores], views, self._groups)
        # The copy engine needs no processor: the digests are computed meanwhile.
        bad = [
            i
            for i, (restore, view) in enumerate(zip(restores, views))
            if self._dice.random() < self._verify_share and digest(view) != restore.digest
        ]
        return ArenaRestoring(loading, bad)

    def store(self, stores: Sequence[StorePlan]) -> list[bytes]:
        views = [self._payload(store.host_slot) for store in stores]
        store_slabs(self._pool, [store.device_slot for store in stores], views)
        return [digest(view) for view in views]

    def _payload(self, host_slot: int) -> memoryview:
        return self._client.slot_view(SlotIndex(host_slot))[: self._pool.layout.payload_bytes]
