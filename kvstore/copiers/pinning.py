"""Keeps the mapped arena registered with the GPU driver, so that the copy engines reach it directly. Implements
`base.MapWatcher` for ranks on a GPU.
"""

import logging
from collections.abc import Callable

from headrace.kvstore.copiers.runtime import GpuError, GpuRuntime, address_of, gpu_runtime

log = logging.getLogger(__name__)
CHUNK_BYTES = 1 << 30
"""Registrations beyond a few GB fail on some drivers."""


class Pinning:
    """Not thread-safe: the client calls it under its lock. `runtime` is given by tests only."""

    def __init__(self, runtime: GpuRuntime | None = None) -> None:
        self._runtime = runtime
        self._chunks: list[int] = []
        self.pinned_bytes = 0

    def mapped(self, region: memoryview, slot_bytes: int, keep_alive: Callable[[], object]) -> None:
        """Register in chunks, all or nothing. If the driver refuses, copies go on from pageable memory, slowly: a
        reason to warn, none to stop serving."""
        runtime = self._runtime = self._runtime or gpu_runtime()
        start = address_of(region)
        # A copy that crosses from one registration into the next is refused: chunks end where slots end.
        chunk = max(CHUNK_BYTES // slot_bytes, 1) * slot_bytes
        try:
            for offset in range(0, region.nbytes, chunk):
                runtime.register(start + offset, min(chunk, region.nbytes - offset))
                self._chunks.append(start + offset)
                keep_alive()
        except GpuError as error:
            log.warning(
                "%d of %d bytes of the host tier were pinned, then: %s (a limit of locked memory, `ulimit -l`?); "
                "copies will be slow",
                len(self._chunks) * chunk, region.nbytes, error,
            )  # fmt: skip
            self.unmapping(region)
        else:
            self.pinned_bytes = region.nbytes

    def unmapping(self, region: memoryview) -> None:
        """Before the region is unmapped: the driver must not keep pages of another mapping for its own."""
        chunks, self._chunks, self.pinned_bytes = self._chunks, [], 0
        assert self._runtime is not None or not chunks
        for chunk in chunks:
            try:
                self._runtime.unregister(chunk)  # type: ignore[union-attr]
            except GpuError as error:
                log.warning("%s", error)
