"""Moves blocks between a device pool (plane-major) and slabs in mapped memory (slab-major). Knows layout and fences, no
names, leases or tiers: `mover.py` adds those."""

from collections.abc import Sequence

from headrace.kvstore.checksum import digest
from headrace.kvstore.copiers import copier_for, side_stream_for
from headrace.kvstore.copiers.ahead import Loaded, Loading
from headrace.kvstore.legs import legs
from headrace.kvstore.pool import DevicePool

__all__ = ["begin_load", "digest", "load_slab", "load_slabs", "side_stream_for", "store_slab", "store_slabs"]


def load_slabs(pool: DevicePool, slots: Sequence[int], views: Sequence[memoryview]) -> None:
    """Copy slab `views[i]` into device slot `slots[i]`. Fenced as `copiers.Copier` says. Raises ValueError before the
    first byte moves if a view is too short or a slot is outside the pool."""
    _check(pool, slots, views)
    with legs.copy("host_to_device", len(slots) * pool.layout.payload_bytes):
        copier_for(pool).load(pool, slots, views)


def begin_load(pool: DevicePool, slots: Sequence[int], views: Sequence[memoryview], groups: int) -> Loading:
    """As `load_slabs`, layer-ahead: see `copiers.Copier.begin_load`. Counted as a leg when it is finished."""
    _check(pool, slots, views)
    if not slots:
        return Loaded(pool)
    return _Counted(copier_for(pool).begin_load(pool, slots, views, groups), len(slots) * pool.layout.payload_bytes)


class _Counted:
    def __init__(self, loading: Loading, size: int) -> None:
        self.latent, self.index = loading.latent, loading.index
        self._loading, self._size = loading, size

    def finish(self) -> float:
        seconds = self._loading.finish()
        legs.add("host_to_device", self._size, seconds)
        return seconds


def store_slabs(pool: DevicePool, slots: Sequence[int], views: Sequence[memoryview]) -> None:
    """Copy device slot `slots[i]` into slab `views[i]` (writable). Errors and fences as for `load_slabs`."""
    _check(pool, slots, views)
    with legs.copy("device_to_host", len(slots) * pool.layout.payload_bytes):
        copier_for(pool).store(pool, slots, views)


def load_slab(pool: DevicePool, slot: int, view: memoryview) -> None:
    load_slabs(pool, [slot], [view])


def store_slab(pool: DevicePool, slot: int, view: memoryview) -> None:
    store_slabs(pool, [slot], [view])


def _check(pool: DevicePool, slots: Sequence[int], views: Sequence[memoryview]) -> None:
    if len(slots) != len(views):
        raise ValueError(f"{len(slots)} slots but {len(views)} slabs")
    for slot, view in zip(slots, views):
        if not 0 <= slot < pool.slots:
            raise ValueError(f"slot {slot} is outside a pool of {pool.slots}")
        if view.nbytes < pool.layout.payload_bytes:
            raise ValueError(f"a slab has {pool.layout.payload_bytes} bytes, this view only {view.nbytes}")
