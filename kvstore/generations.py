"""Whether a slot of another process's pool still holds what it held: one counter a slot, in shared memory. Pure.

The owner counts a slot up *before* its bytes may change. A reader is told the count when the block is promised to it,
copies, and looks again: if the count is the same, no writer had begun when the copy ended: the bytes are the block's.
The counters live in an anonymous file of the owner: they end with it, and nothing is left behind.
"""

import mmap
import os
from collections.abc import Sequence
from typing import Self

import numpy as np

from headrace.errors import LeaseExpired

_BYTES = 8


class Generations:
    """`create`d by the owner of the slots, `attach`ed by readers on the same host. Close it once."""

    def __init__(self, fd: int, slots: int) -> None:
        self._fd = fd
        self._map = mmap.mmap(fd, slots * _BYTES)
        self._counts = np.frombuffer(self._map, dtype=np.uint64)

    @classmethod
    def create(cls, slots: int) -> Self:
        fd = os.memfd_create("headrace-generations", os.MFD_CLOEXEC)
        os.ftruncate(fd, slots * _BYTES)
        return cls(fd, slots)

    @classmethod
    def attach(cls, path: str, slots: int) -> Self:
        """Raises LeaseExpired if the owner is gone."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise LeaseExpired(f"the owner of {path} is gone: {error.strerror}") from error
        if os.fstat(fd).st_size != slots * _BYTES:
            os.close(fd)
            raise LeaseExpired(f"{path} does not hold the counters of {slots} slots: its owner is gone")
        return cls(fd, slots)

    @property
    def path(self) -> str:
        """Where another process of this host (and pid namespace) finds it."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def of(self, slots: Sequence[int]) -> list[int]:
        """Current counts: what the owner promises, what a reader compares."""
        counts: list[int] = self._counts[list(slots)].tolist()
        return counts

    def advance(self, slots: Sequence[int]) -> None:
        """The owner is about to reuse these slots."""
        for slot in slots:
            self._counts[slot] += np.uint64(1)

    def changed(self, slots: Sequence[int], promised: Sequence[int]) -> list[int]:
        """Those of `slots` that no longer hold what was promised."""
        return [slot for slot, now, then in zip(slots, self.of(slots), promised) if now != then]

    def close(self) -> None:
        if self._fd >= 0:
            del self._counts
            self._map.close()
            os.close(self._fd)
            self._fd = -1
