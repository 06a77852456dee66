"""Reuse distance: how many different blocks are touched between two uses of a block. A block comes back from an LRU
cache exactly when its distance is below the capacity, so the histogram is the LRU curve seen from the side.

Exact for small traces. Larger ones are sampled by block id (every block is in or out for the whole trace, and counted
distances are scaled by the rate), which keeps the shape with an error of a few percent; the result says which it was.
"""

import dataclasses

import numpy as np

from headrace.lab.traces.form import Trace

MAX_EVENTS = 300_000
_MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclasses.dataclass(frozen=True, slots=True)
class ReuseHistogram:
    """`counts[i]` uses have a distance in [edges[i], edges[i+1]) blocks. Counts are scaled up if sampled."""

    edges: tuple[int, ...]
    counts: tuple[float, ...]
    first_uses: float
    sample_rate: float
    """1.0: exact."""

    @property
    def uses(self) -> float:
        return sum(self.counts) + self.first_uses


class _Order:
    """Counts marked positions after a given one: a Fenwick tree over time."""

    def __init__(self, size: int) -> None:
        self._tree = [0] * (size + 1)

    def add(self, position: int, value: int) -> None:
        tree, position = self._tree, position + 1
        while position < len(tree):
            tree[position] += value
            position += position & -position

    def before(self, position: int) -> int:
        """Marks at positions < `position`."""
        tree, total = self._tree, 0
        while position:
            total += tree[position]
            position &= position - 1
        return total


def reuse_histogram(trace: Trace, max_events: int = MAX_EVENTS) -> ReuseHistogram:
    """Histogram over powers of two, in blocks of the trace."""
    total = sum(request.num_blocks for request in trace.requests())
    rate = min(1.0, max_events / total) if total else 1.0
    keep = _sampled(trace.num_blocks, rate)
    events: list[int] = []
    for arrival in trace.arrivals():
        for first, count in arrival.request.runs:
            events += (np.flatnonzero(keep[first : first + count]) + first).tolist()
    distances, first_uses = _distances(events)
    scale = 1.0 / rate
    top = max(trace.num_blocks, 2)
    edges = [0, *(1 << k for k in range(top.bit_length() + 1))]
    counts, _ = np.histogram(np.asarray(distances, dtype=np.float64) * scale, bins=edges)
    return ReuseHistogram(tuple(edges), tuple(float(c) * scale for c in counts), first_uses * scale, rate)


def _sampled(num_blocks: int, rate: float) -> np.ndarray:
    """Which blocks take part: a fixed mix of the id, so that two runs choose alike."""
    ids = np.arange(num_blocks, dtype=np.uint64) * _MIX
    ids ^= ids >> np.uint64(29)
    return (ids * _MIX >> np.uint64(32)).astype(np.float64) < rate * 2.0**32


def _distances(events: list[int]) -> tuple[list[int], int]:
    order = _Order(len(events))
    last: dict[int, int] = {}
    distances: list[int] = []
    for now, block in enumerate(events):
        then = last.get(block)
        if then is not None:
            distances.append(len(last) - order.before(then + 1))
            order.add(then, -1)
        order.add(now, 1)
        last[block] = now
    return distances, len(last)
