"""How often blocks were asked for, roughly, in fixed memory: a count-min sketch that forgets. Pure.

The idea is that of TinyLFU (Einziger, Friedman, Manes, ACM Transactions on Storage 2017): small counters, the least of
several rows is the estimate, and all counters are halved after a while so that old popularity fades.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.ids import BlockName

_ROWS = 4
_TOP = 255
_HASH_BYTES = 4 * _ROWS
_AGE_FACTOR = 10
"""Counters are halved after so many additions per capacity block."""


class CountSketch:
    """Estimates are never below the true count since the last halving (up to 255), and above it only by collisions.
    16 to 32 bytes of memory a block. Deterministic: block names are digests, so their own bytes are the hashes."""

    def __init__(self, capacity_blocks: int) -> None:
        """`capacity_blocks`: how many blocks are told apart well."""
        self._width = 1 << max(6, (4 * capacity_blocks - 1).bit_length())
        self._counts = np.zeros((_ROWS, self._width), np.uint8)
        self._rows = np.arange(_ROWS)[:, None]
        self._period = _AGE_FACTOR * max(capacity_blocks, 1)
        self._added = 0

    def add(self, names: Sequence[BlockName]) -> npt.NDArray[np.uint8]:
        """Count one use of each name; returns the new estimates. A name twice in one call counts once."""
        if not names:
            return np.zeros(0, np.uint8)
        where = self._where(names)
        counts = self._counts[self._rows, where]
        least = counts.min(axis=0)
        # Only the least counters grow: the others are too high already.
        grown = np.where((counts == least) & (counts < _TOP), counts + 1, counts)
        np.maximum.at(self._counts, (self._rows, where), grown)
        self._added += len(names)
        if self._added >= self._period:
            self._counts >>= 1
            self._added //= 2
        return self.estimate(names)

    def estimate(self, names: Sequence[BlockName]) -> npt.NDArray[np.uint8]:
        if not names:
            return np.zeros(0, np.uint8)
        least: npt.NDArray[np.uint8] = self._counts[self._rows, self._where(names)].min(axis=0)
        return least

    def _where(self, names: Sequence[BlockName]) -> npt.NDArray[np.intp]:
        # The end of a name: private names begin alike.
        hashes = np.frombuffer(b"".join(names), np.uint8).reshape(len(names), -1)[:, -_HASH_BYTES:]
        return np.ascontiguousarray(hashes).view("<u4").T.astype(np.intp) & (self._width - 1)
