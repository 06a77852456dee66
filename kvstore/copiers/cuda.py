"""Slab copies on CUDA and HIP: strided 2-D copies by the copy engines (planes x bytes of a plane; the pitch on the
device is the plane stride), on streams of their own, so that no compute kernel is disturbed. The host side should be
pinned (`pinning`); pageable memory works and is slow.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from headrace.kvstore.copiers.ahead import AwaitedPlanes, Loading, PlaneGroup, group_of_plane, plane_groups
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

    def begin_load(self, pool: DevicePool, slots: Sequence[int], views: Sequence[memoryview], groups: int) -> Loading:
        device = pool.latent.device
        plan = plane_groups(pool.layout, groups)
        with self._locks[HOST_TO_DEVICE], torch.cuda.device(device):
            stream = self._stream(device, HOST_TO_DEVICE)
            stream.wait_stream(torch.cuda.current_stream(device))
            start = stream.record_event(_event())
            events = []
            try:
                for group in plan:
                    for slot, view in zip(slots, views):
                        self._copy(pool, slot, address_of(view), HOST_TO_DEVICE, stream, group)
                    events.append(stream.record_event(_event()))
            except BaseException:
                stream.synchronize()
                raise
        return _CudaLoading(pool, plan, start, events)

    def _run(self, pool: DevicePool, slots: Sequence[int], views: Sequence[memoryview], kind: int) -> None:
        if not slots:
            return
        device = pool.latent.device
        (whole,) = plane_groups(pool.layout, 1)
        with self._locks[kind], torch.cuda.device(device):
            stream = self._stream(device, kind)
            compute = torch.cuda.current_stream(device)
            stream.wait_stream(compute)
            try:
                for slot, view in zip(slots, views):
                    self._copy(pool, slot, address_of(view), kind, stream, whole)
            finally:
                # Also after a failure: whatever was queued must have ended before anybody reuses slot or slab.
                stream.synchronize()
                compute.wait_stream(stream)

    def _copy(
        self, pool: DevicePool, slot: int, host: int, kind: int, stream: torch.cuda.Stream, group: PlaneGroup
    ) -> None:
        layout = pool.layout
        legs = (
            (pool.latent, layout.format.latent_plane_bytes, group.latent, host),
            (pool.index, layout.format.index_plane_bytes, group.index, host + layout.latent_bytes),
        )
        for tensor, width, (first, end), slab in legs:
            if first == end:
                continue
            pitch = tensor.stride(0)
            there, here = (tensor.data_ptr() + first * pitch + slot * width, pitch), (slab + first * width, width)
            target, source = (there, here) if kind == HOST_TO_DEVICE else (here, there)
            self._runtime.copy_2d(target, source, width, end - first, kind, stream.cuda_stream)

    def _stream(self, device: torch.device, kind: int) -> torch.cuda.Stream:
        key = (device, kind)
        if key not in self._streams:
            self._streams[key] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[key]


class CudaSideStream:
    """A stream that copies take for their caller's own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def fence(self) -> object:
        return torch.cuda.current_stream(self._device).record_event()

    @contextmanager
    def after(self, fence: object) -> Iterator[None]:
        if isinstance(fence, torch.cuda.Event):
            self._stream.wait_event(fence)
        with torch.cuda.stream(self._stream):
            yield


class _CudaLoading:
    """One event a group, recorded in order on one stream: having waited for one is having waited for all before it."""

    def __init__(
        self, pool: DevicePool, plan: list[PlaneGroup], start: torch.cuda.Event, events: list[torch.cuda.Event]
    ) -> None:
        self._start, self._events = start, events
        self._awaited = -1
        self._device = pool.latent.device
        latent, index = group_of_plane(plan)
        self.latent: Tensor | AwaitedPlanes = AwaitedPlanes(pool.latent, lambda plane: self._await(latent[plane]))
        self.index: Tensor | AwaitedPlanes = AwaitedPlanes(pool.index, lambda plane: self._await(index[plane]))

    def finish(self) -> float:
        self._await(len(self._events) - 1)
        self._events[-1].synchronize()
        milliseconds: float = self._start.elapsed_time(self._events[-1])
        return milliseconds / 1e3

    def _await(self, group: int) -> None:
        if group > self._awaited:
            torch.cuda.current_stream(self._device).wait_event(self._events[group])
            self._awaited = group


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
