"""Slab copies when the device is the CPU: plain strided copies, done when the call returns."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.kvstore.copiers.ahead import Loaded, Loading
from headrace.kvstore.pool import DevicePool


class CpuCopier:
    def load(self, pool: DevicePool, slots: Sequence[int], views: Sequence[memoryview]) -> None:
        for slot, view in zip(slots, views):
            latent, index = _planes(pool, view)
            pool.latent[:, slot].copy_(latent)
            pool.index[:, slot].copy_(index)

    def begin_load(self, pool: DevicePool, slots: Sequence[int], views: Sequence[memoryview], groups: int) -> Loading:
        began = time.perf_counter()
        self.load(pool, slots, views)
        return Loaded(pool, time.perf_counter() - began)

    def store(self, pool: DevicePool, slots: Sequence[int], views: Sequence[memoryview]) -> None:
        for slot, view in zip(slots, views):
            latent, index = _planes(pool, view)
            latent.copy_(pool.latent[:, slot])
            index.copy_(pool.index[:, slot])


def _planes(pool: DevicePool, view: memoryview) -> tuple[Tensor, Tensor]:
    """The slab's bytes as uint8 [latent planes, 64, row bytes] and [index planes, plane bytes], without a copy."""
    layout = pool.layout
    slab = torch.frombuffer(view, dtype=torch.uint8, count=layout.payload_bytes)
    latent = slab[: layout.latent_bytes].view(layout.latent_planes, -1, layout.format.latent_row_bytes)
    return latent, slab[layout.latent_bytes :].view(layout.index_planes, layout.format.index_plane_bytes)
