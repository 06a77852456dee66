"""How long answers are: what a reservation is sized by when it is not the whole lifetime. Used by routers for all ranks
and by each rank for its own. Pure."""

import bisect
from collections import deque

ENOUGH = 32
"""Fewer answers longer than the one in question say nothing about it: the whole lifetime is reserved then."""


class AnswerLengths:
    """A sliding window of the lengths of finished answers, and quantiles of what is left of one that runs."""

    def __init__(self, *, window: int = 512, quantile: float = 0.95) -> None:
        self._quantile = quantile
        self._window = window
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def add(self, tokens: int) -> None:
        """An answer of so many tokens ended (by itself or by its own limit)."""
        if len(self._recent) == self._window:
            del self._sorted[bisect.bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(tokens)
        bisect.insort(self._sorted, tokens)

    def expect(self, tokens: int, limit: int) -> int:
        """Tokens that an answer of `tokens` so far is expected to add, at most `limit`: the quantile of the lengths of
        those answers of the window that were longer than that. O(log window)."""
        first = bisect.bisect_right(self._sorted, tokens)
        longer = len(self._sorted) - first
        if longer < ENOUGH:
            return limit
        at = min(len(self._sorted) - 1, first + int(longer * self._quantile))
        return min(limit, self._sorted[at] - tokens)
