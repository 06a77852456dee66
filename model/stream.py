"""Reads tensors ahead of the builder, in parallel, with a bound on the bytes held; counts every byte."""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from headrace.model.source import SafetensorsSource

READERS = 4
WINDOW_BYTES = 2 << 30


@dataclasses.dataclass(frozen=True, slots=True)
class LoadReport:
    """State of a load; the last one has `read_bytes == rank_bytes`, and every byte of the files in one of the three:
    `rank_bytes + other_ranks_bytes + copies_bytes == file_bytes` (headers excluded)."""

    read_tensors: int
    rank_tensors: int
    read_bytes: int
    rank_bytes: int
    """What this rank needs"""
    other_ranks_bytes: int
    """Experts that other ranks own, never read"""
    copies_bytes: int
    """Embedding and head repeated under the MTP layer, never read"""
    file_bytes: int
    peak_bytes: int
    """Most bytes read and not yet taken by the builder"""
    seconds: float

    @property
    def done(self) -> bool:
        return self.read_tensors == self.rank_tensors


class TensorStream:
    """A TensorSource that reads `names` in that order with a few threads. A tensor the readers have not begun is read
    by the caller, so any order of asking works and the caller never waits for room in the window."""

    def __init__(
        self,
        source: SafetensorsSource,
        names: Sequence[str],
        *,
        readers: int = READERS,
        window_bytes: int = WINDOW_BYTES,
        progress: Callable[[LoadReport], None] | None = None,
        copies: Sequence[str] = (),
    ) -> None:
        self._source, self._window, self._progress = source, window_bytes, progress
        self._order = collections.deque(dict.fromkeys(names))
        self._pending = set(self._order)
        self._reading: set[str] = set()
        self._ready: dict[str, Tensor] = {}
        self._failed: BaseException | None = None
        self._held = self._peak = 0
        self._closed = False
        self._changed = threading.Condition()
        self._began = time.perf_counter()
        self._rank = (len(self._pending), sum(source.nbytes(name) for name in self._order))
        self._copies = sum(source.nbytes(name) for name in copies)
        self._file_bytes = sum(source.nbytes(name) for name in source.names())
        self._taken = [0, 0]
        self._threads = [threading.Thread(target=self._read_ahead, name=f"reader-{i}") for i in range(readers)]
        for thread in self._threads:
            thread.start()

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def get(self, name: str) -> Tensor:
        """Raises CheckpointError, also for a read that failed ahead."""
        with self._changed:
            self._changed.wait_for(lambda: name not in self._reading or self._failed is not None)
            if self._failed is not None:
                raise self._failed
            tensor = self._ready.pop(name, None)
            wanted = tensor is not None or name in self._pending
            if tensor is not None:
                self._held -= tensor.nbytes
                self._changed.notify_all()
            self._pending.discard(name)
        if tensor is None:
            tensor = self._source.get(name)
        if wanted:
            self._taken[0] += 1
            self._taken[1] += tensor.nbytes
            if self._progress is not None:
                self._progress(self.report())
        return tensor

    def report(self) -> LoadReport:
        tensors, size = self._rank
        return LoadReport(
            read_tensors=self._taken[0],
            rank_tensors=tensors,
            read_bytes=self._taken[1],
            rank_bytes=size,
            other_ranks_bytes=self._file_bytes - size - self._copies,
            copies_bytes=self._copies,
            file_bytes=self._file_bytes,
            peak_bytes=self._peak,
            seconds=time.perf_counter() - self._began,
        )

    def close(self) -> None:
        """Ends the readers and forgets what they read. The source stays open: its owner closes it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._ready.clear()

    def _read_ahead(self) -> None:
        while (name := self._next()) is not None:
            try:
                tensor = self._source.get(name)
            except BaseException as error:
                with self._changed:
                    self._failed = self._failed or error
                    self._changed.notify_all()
                return
            with self._changed:
                self._ready[name] = tensor
                self._reading.discard(name)
                self._changed.notify_all()

    def _next(self) -> str | None:
        """Takes the next tensor once it fits the window; None: there is nothing left to do."""
        with self._changed:
            while not self._closed and self._failed is None and self._pending:
                name = self._order[0]
                if name not in self._pending:  # the builder came first
                    self._order.popleft()
                    continue
                size = self._source.nbytes(name)
                if not self._held or self._held + size <= self._window:
                    self._pending.remove(self._order.popleft())
                    self._reading.add(name)
                    self._held += size
                    self._peak = max(self._peak, self._held)
                    return name
                self._changed.wait()
            return None
