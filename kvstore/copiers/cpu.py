"""Slab copies when the device is the CPU: plain strided copies, done when the call returns. By numpy, which moves each
plane as one piece; torch's copies of strided bytes are a third slower.
"""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from headrace.kvstore.copiers.ahead import Loaded, Loading
from headrace.kvstore.layout import SlabLayout
from headrace.kvstore.pool import DevicePool

Bytes: TypeAlias = "npt.NDArray[np.uint8]"


class CpuCopier:
    def load(self, pool: DevicePool, slots: Sequence[int], views: Sequence[memoryview]) -> None:
        here = _planes_of(pool)
        for slot, view in zip(slots, views):
            for planes, part in zip(here, _parts(pool.layout, view)):
                planes[:, slot] = part

    def begin_load(self, pool: DevicePool, slots: Sequence[int], views: Sequence[memoryview], groups: int) -> Loading:
        began = time.perf_counter()
        self.load(pool, slots, views)
        return Loaded(pool, time.perf_counter() - began)

    def store(self, pool: DevicePool, slots: Sequence[int], views: Sequence[memoryview]) -> None:
        here = _planes_of(pool)
        for slot, view in zip(slots, views):
            for planes, part in zip(here, _parts(pool.layout, view)):
                part[:] = planes[:, slot]


class NoSideStream:
    """Work on a CPU is done when it is called."""

    def fence(self) -> object:
        return None

    def after(self, fence: object) -> AbstractContextManager[None]:
        return nullcontext()


def _planes_of(pool: DevicePool) -> tuple[Bytes, Bytes]:
    """The pool's memory as uint8 [planes, slots, plane bytes], latent and index."""
    latent, index = pool.latent.numpy(), pool.index.numpy()
    return latent.reshape(*latent.shape[:2], -1), index.reshape(*index.shape[:2], -1)


def _parts(layout: SlabLayout, view: memoryview) -> tuple[Bytes, Bytes]:
    """The slab's bytes as uint8 [latent planes, plane bytes] and [index planes, plane bytes], without a copy."""
    slab = np.frombuffer(view, dtype=np.uint8, count=layout.payload_bytes)
    latent, index = slab[: layout.latent_bytes], slab[layout.latent_bytes :]
    return (
        latent.reshape(layout.latent_planes, layout.format.latent_plane_bytes),
        index.reshape(layout.index_planes, layout.format.index_plane_bytes),
    )
