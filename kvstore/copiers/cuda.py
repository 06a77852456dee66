"""Slab copies on CUDA: strided 2-D copies by the copy engines (planes x bytes of a plane; the pitch on the device is
the plane stride), on streams of their own, so that no compute kernel is disturbed. The host side should be pinned
(`pin`); pageable memory works and is slow.
"""

import ctypes
import threading
from collections.abc import Sequence

import torch

from headrace.kvstore.pool import DevicePool

_HOST_TO_DEVICE = 1
_DEVICE_TO_HOST = 2
_PIN_CHUNK_BYTES = 1 << 30
"""Registrations beyond a few GB fail on some drivers, so the arena is pinned in chunks."""


class CudaCopier:
    """One pair of streams per device; calls of several threads take turns per direction."""

    def __init__(self) -> None:
        self._runtime = _runtime()
        self._streams: dict[tuple[torch.device, int], torch.cuda.Stream] = {}
        self._locks = {_HOST_TO_DEVICE: threading.Lock(), _DEVICE_TO_HOST: threading.Lock()}

    def load(self, pool: DevicePool, slots: Sequence[int], views: Sequence[memoryview]) -> None:
        self._run(pool, slots, views, _HOST_TO_DEVICE)

    def store(self, pool: DevicePool, slots: Sequence[int], views: Sequence[memoryview]) -> None:
        self._run(pool, slots, views, _DEVICE_TO_HOST)

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
                    self._copy(pool, slot, _address(view), kind, stream)
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
            device = tensor.data_ptr() + slot * width
            pitch = tensor.stride(0)
            target, source = (
                ((device, pitch), (slab, width)) if kind == _HOST_TO_DEVICE else ((slab, width), (device, pitch))
            )
            code = self._runtime.cudaMemcpy2DAsync(
                *_pointer(*target), *_pointer(*source), width, planes, kind, ctypes.c_void_p(stream.cuda_stream)
            )
            if code:
                raise RuntimeError(f"cudaMemcpy2DAsync of {planes} x {width} bytes failed with CUDA error {code}")

    def _stream(self, device: torch.device, kind: int) -> torch.cuda.Stream:
        key = (device, kind)
        if key not in self._streams:
            self._streams[key] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[key]


def pin(region: memoryview) -> None:
    """Register mapped host memory with the driver, in chunks. All or nothing. Raises RuntimeError with the size."""
    runtime, address = _runtime(), _address(region)
    done: list[int] = []
    for start in range(0, region.nbytes, _PIN_CHUNK_BYTES):
        size = min(_PIN_CHUNK_BYTES, region.nbytes - start)
        code = runtime.cudaHostRegister(ctypes.c_void_p(address + start), ctypes.c_size_t(size), 0)
        if code:
            for chunk in done:
                runtime.cudaHostUnregister(ctypes.c_void_p(chunk))
            raise RuntimeError(f"cannot pin {size} bytes at offset {start} of {region.nbytes}: CUDA error {code}")
        done.append(address + start)


def unpin(region: memoryview) -> None:
    """Undo `pin` before the memory is unmapped."""
    runtime, address = _runtime(), _address(region)
    for start in range(0, region.nbytes, _PIN_CHUNK_BYTES):
        runtime.cudaHostUnregister(ctypes.c_void_p(address + start))


def _pointer(address: int, pitch: int) -> tuple[ctypes.c_void_p, ctypes.c_size_t]:
    return ctypes.c_void_p(address), ctypes.c_size_t(pitch)


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _runtime() -> ctypes.CDLL:
    """The CUDA runtime that torch itself has loaded (a second one would have its own context)."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "libcudart" in line}
    if not paths:
        raise RuntimeError("torch has CUDA, but no libcudart is mapped in this process")
    runtime = ctypes.CDLL(sorted(paths)[0])
    runtime.cudaMemcpy2DAsync.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t,
        ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p,
    ]  # fmt: skip
    return runtime
