"""Slab copies on CUDA and HIP: strided 2-D copies by the copy engines (planes x bytes of a plane; the pitch on the
device is the plane stride), on streams of their own, so that no compute kernel is disturbed. The host side should be
pinned (`pinning`); pageable memory works and is slow.
"""

import threading
from collections.abc import Sequence

import torch

from headrace.kvstore.copiers.runtime import DEVICE_TO_HOST, HOST_TO_DEVICE, address_of, gpu_runtime
from headrace.kvstore.pool import DevicePool


class CudaCopier:
    """One stream per device and direction; calls of several threads take turns per direction."""

    def __init__(self) -> None:
        self._runtime = gpu_runtime()
        self._streams: dict[tuple[torch.device, int], torch.cuda.Stream] = {}
        self._locks = {HOST_TO_DEVICE: threading.Lock(), DEVICE_TO_HOST: threading.Lock()}

    def load(self, pool: DevicePool, slots: Sequence[int], views: Sequence[memoryview]) -> None:
        self._run(pool, slots, views, HOST_TO_DEVICE)

    def store(self, pool: DevicePool, slots: Sequence[int], views: Sequence[memoryview]) -> None:
        self._run(pool, slots, views, DEVICE_TO_HOST)

    def _run(self, pool: DevicePool, slots: Sequence[int], views: Sequence[memoryview], kind: int) -> None:
        if not slots:
            return
        device = pool.latent.device
        with self._locks[kind], torch.cuda.device(device):
            stream = self._stream(device, kind)
            compute = torch.cuda.current_stream(device)
            stream.wait_stream(compute)
            try:
                for slot, view in zip(slots, views):
                    self._copy(pool, slot, address_of(view), kind, stream)
            finally:
                # Also after a failure: whatever was queued must have ended before anybody reuses slot or slab.
                stream.synchronize()
                compute.wait_stream(stream)

    def _copy(self, pool: DevicePool, slot: int, host: int, kind: int, stream: torch.cuda.Stream) -> None:
        layout = pool.layout
        legs = (
            (pool.latent, layout.format.latent_plane_bytes, layout.latent_planes, host),
            (pool.index, layout.format.index_plane_bytes, layout.index_planes, host + layout.latent_bytes),
        )
        for tensor, width, planes, slab in legs:
            if not planes:
                continue
            there, here = (tensor.data_ptr() + slot * width, tensor.stride(0)), (slab, width)
            target, source = (there, here) if kind == HOST_TO_DEVICE else (here, there)
            self._runtime.copy_2d(target, source, width, planes, kind, stream.cuda_stream)

    def _stream(self, device: torch.device, kind: int) -> torch.cuda.Stream:
        key = (device, kind)
        if key not in self._streams:
            self._streams[key] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[key]
