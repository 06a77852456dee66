"""Reading blocks straight from the device pool of another process of this host, by IPC handles of the GPU runtime.

A pool lives as long as its process, a slot as long as its generation (`kvstore/generations.py`). `read` is all or
nothing: it checks owner and generations before the copy and after it, and what it cannot vouch for is LeaseExpired,
never bytes that count. The reader's slots must be unnamed ones: after an error their contents are garbage.
"""

import os
from collections.abc import Sequence

import torch

from headrace.errors import IncompatiblePeer, LeaseExpired
from headrace.kvstore.copiers.runtime import DEVICE_TO_DEVICE, gpu_runtime
from headrace.kvstore.daemon.peers import PeerProcess
from headrace.kvstore.generations import Generations
from headrace.kvstore.legs import legs
from headrace.kvstore.pool import DevicePool
from headrace.messages import message


@message
class PoolExport:
    """A pool as its owner describes it to processes of the same host."""

    pid: int
    generations: str
    fingerprint: bytes
    """`SlabLayout.fingerprint`"""
    slots: int
    latent: bytes
    """IPC handle of the allocation that holds the latent planes."""
    latent_offset: int
    """Bytes from its start to plane 0, slot 0."""
    index: bytes
    index_offset: int


def export_pool(pool: DevicePool, generations: Generations) -> PoolExport:
    """Raises GpuError where the driver cannot share this memory (an allocator of expandable segments, a container that
    hides other processes)."""
    runtime = gpu_runtime()
    handles, offsets = [], []
    for planes in (pool.latent, pool.index):
        start = runtime.allocation(planes.data_ptr())
        handles.append(runtime.export(start))
        offsets.append(planes.data_ptr() - start)
    return PoolExport(
        pid=os.getpid(),
        generations=generations.path,
        fingerprint=pool.layout.fingerprint(),
        slots=pool.slots,
        latent=handles[0],
        latent_offset=offsets[0],
        index=handles[1],
        index_offset=offsets[1],
    )


class ForeignPool:
    """Another process's pool, mapped. Close it before this process ends its GPU context. One reader thread."""

    def __init__(self, export: PoolExport, pool: DevicePool) -> None:
        """`pool` is this process's own, where blocks are read to. Raises IncompatiblePeer, LeaseExpired, GpuError."""
        if export.fingerprint != pool.layout.fingerprint():
            raise IncompatiblePeer(f"the pool of process {export.pid} has another slab layout")
        self._export, self._pool = export, pool
        self._owner = PeerProcess(export.pid)
        self._generations = Generations.attach(export.generations, export.slots)
        self._runtime = gpu_runtime()
        self._opened: dict[bytes, int] = {}
        with torch.cuda.device(pool.device):
            self._latent = self._open(export.latent) + export.latent_offset
            self._index = self._open(export.index) + export.index_offset
            self._stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]

    def read(self, theirs: Sequence[int], promised: Sequence[int], mine: Sequence[int]) -> None:
        """Copy their slots to mine; `promised` are the owner's `Generations.of(theirs)` from when it promised them.
        Fenced like `Copier.load`. Raises LeaseExpired."""
        self._check(theirs, promised)
        layout, pool = self._pool.layout, self._pool
        legs_of = (
            (self._latent, pool.latent, layout.format.latent_plane_bytes),
            (self._index, pool.index, layout.format.index_plane_bytes),
        )
        with legs.copy("device_to_device", len(theirs) * layout.payload_bytes), torch.cuda.device(pool.device):
            compute = torch.cuda.current_stream(pool.device)
            self._stream.wait_stream(compute)
            try:
                for source, target in zip(theirs, mine):
                    for base, planes, width in legs_of:
                        there = (base + source * width, self._export.slots * width)
                        here = (planes.data_ptr() + target * width, planes.stride(0))
                        self._runtime.copy_2d(
                            here, there, width, planes.shape[0], DEVICE_TO_DEVICE, self._stream.cuda_stream
                        )
            finally:
                self._stream.synchronize()
                compute.wait_stream(self._stream)
        self._check(theirs, promised)

    def close(self) -> None:
        for address in self._opened.values():
            self._runtime.close(address)
        self._opened.clear()
        self._generations.close()
        self._owner.close()

    def _open(self, handle: bytes) -> int:
        # Both kinds of planes may lie in one allocation, and a handle can be opened only once.
        if handle not in self._opened:
            self._opened[handle] = self._runtime.open(handle)
        return self._opened[handle]

    def _check(self, slots: Sequence[int], promised: Sequence[int]) -> None:
        if not self._owner.alive():
            raise LeaseExpired(f"process {self._export.pid}, whose pool is read, has ended")
        changed = self._generations.changed(slots, promised)
        if changed:
            raise LeaseExpired(f"slots {changed} of process {self._export.pid} no longer hold what was promised")
