"""Who moves bytes between a device pool and slabs, one file per device type."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from headrace.kvstore.base import MapWatcher
from headrace.kvstore.copiers.ahead import Loading
from headrace.kvstore.pool import DevicePool


class Copier(Protocol):
    """Copies whole blocks. Both calls are fenced on both sides: they wait for whoever wrote the source, and the next
    user of the target, on the caller's current stream or on the host, waits for them. On return the views may be read
    (store) or given back (load). `views[i]` has at least `layout.payload_bytes` bytes."""

    def load(self, pool: DevicePool, slots: Sequence[int], views: Sequence[memoryview]) -> None: ...

    def store(self, pool: DevicePool, slots: Sequence[int], views: Sequence[memoryview]) -> None: ...

    def begin_load(self, pool: DevicePool, slots: Sequence[int], views: Sequence[memoryview], groups: int) -> Loading:
        """As `load`, but it may return before the bytes are there; they come in `groups` groups of layers, in the order
        of a forward pass. The views stay leased and the slots private until `finish`."""
        ...


class SideStream(Protocol):
    """For copies beside a loop that keeps the device busy: a thread of its own copies after what the loop had queued
    when it asked, not after what it queued since."""

    def fence(self) -> object:
        """This moment on the calling thread's stream."""
        ...

    def after(self, fence: object) -> AbstractContextManager[None]:
        """Copies inside wait for `fence` alone. None: for nothing."""
        ...


def _cpu() -> Copier:
    from headrace.kvstore.copiers.cpu import CpuCopier

    return CpuCopier()


def _cuda() -> Copier:
    from headrace.kvstore.copiers.cuda import CudaCopier

    return CudaCopier()


_CREATORS: dict[str, Callable[[], Copier]] = {"cpu": _cpu, "cuda": _cuda}
_made: dict[str, Copier] = {}


def copier_for(pool: DevicePool) -> Copier:
    """The copier of this pool's device type, made at first use. Raises ValueError for an unknown type."""
    kind = pool.device.type
    if kind not in _CREATORS:
        raise ValueError(f"no copier for device type {kind!r}; known: {', '.join(_CREATORS)}")
    if kind not in _made:
        _made[kind] = _CREATORS[kind]()
    return _made[kind]


def map_watcher_for(device: torch.device | str) -> MapWatcher | None:
    """What a rank's store client should tell of the host tier it maps: pins it for a GPU; None where plain memory is
    as good."""
    if torch.device(device).type != "cuda":
        return None
    from headrace.kvstore.copiers.pinning import Pinning

    return Pinning()


def side_stream_for(pool: DevicePool) -> SideStream:
    """One a thread."""
    if pool.device.type == "cpu":
        from headrace.kvstore.copiers.cpu import NoSideStream

        return NoSideStream()
    from headrace.kvstore.copiers.cuda import CudaSideStream

    return CudaSideStream(pool.latent.device)
