"""Hit density: the victim is the evictable block from which the fewest hits per second of residence are expected.

How long a block stays unused says when its conversation comes back: a tool loop within seconds, a person within a
minute or two, most abandoned ones never. The policy learns that on line, without settings: blocks fall into classes
(how many turns their chain has lived, how long its last pause was), and for each class two counts are kept per age:
how many blocks reached that age unused, and how many were used at it. From these follows, for a block of that age, the
best ratio of expected hits to expected seconds over every horizon (the index of Gittins; LHD uses the unbounded one).

Evicted blocks are remembered for a while (a sample of them), else ages that the cache is too small to reach would look
hopeless for ever. A block inherits the turns of its parent unless the parent is where many chains part.
"""

import math
import zlib
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from headrace.ids import BlockName
from headrace.kvstore.base import BlockMeta
from headrace.kvstore.policies.order import KeyedHeap

Floats: TypeAlias = "npt.NDArray[np.float64]"

_BINS = 56
_FIRST_S = 0.5
_GROWTH = 1.25
"""Age bins: [0, 0.5 s), then 25% wider each; the last one is open and starts after 29 hours."""
_EDGES = np.concatenate([[0.0], _FIRST_S * _GROWTH ** np.arange(_BINS - 1)])
_WIDTHS = np.append(np.diff(_EDGES), _EDGES[-1])
_LOG_GROWTH = math.log(_GROWTH)
_TURN_LIMITS = (1, 2, 4, 8)
_PAUSE_LIMITS_S = (6.0, 20.0, 60.0, 240.0)
_NUM_PAUSES = len(_PAUSE_LIMITS_S) + 1
_NUM_CLASSES = 1 + len(_TURN_LIMITS) * _NUM_PAUSES
_SAMPLE = 8
"""One block in this many is watched for the counts."""
_GHOSTS_PER_BLOCK = 4
_LEAST_GHOSTS = 8192
"""How many watched blocks are remembered after eviction: a multiple of the watched share of the capacity, and for
small tiers enough to see pauses that are many times longer than a block lives."""
_DECAY = 0.9
_PRIOR = 1e-3


def age_bin(age_s: float) -> int:
    """Index of the age bin that holds `age_s`."""
    if age_s < _FIRST_S:
        return 0
    return min(int(math.log(age_s / _FIRST_S) / _LOG_GROWTH) + 1, _BINS - 1)


def block_class(turns: int, pause_s: float) -> int:
    """Class of a block whose chain was used `turns` times after it was made, the last time after `pause_s`."""
    if turns < _TURN_LIMITS[0]:
        return 0
    turn = sum(turns >= limit for limit in _TURN_LIMITS) - 1
    return 1 + turn * _NUM_PAUSES + sum(pause_s >= limit for limit in _PAUSE_LIMITS_S)


class ReuseCounts:
    """What became of watched blocks: per class and age bin, how many were used then, how many were given up then."""

    def __init__(self) -> None:
        self.used = np.zeros((_NUM_CLASSES, _BINS))
        self.given_up = np.zeros((_NUM_CLASSES, _BINS))

    def index(self, waiting: Floats) -> list[list[float]]:
        """Expected hits per second for a block of each class that has reached each age bin. `waiting` counts the
        watched blocks that wait now, by class and bin."""
        ended = self.used + self.given_up + waiting
        reached = np.cumsum(ended[:, ::-1], axis=1)[:, ::-1]
        overall = (self.used.sum(axis=0) + _PRIOR) / (reached.sum(axis=0) + 1.0)
        # A thin class leans on all classes together: eight watched blocks of pseudo-count.
        hazard = np.minimum((self.used + 8.0 * overall) / (reached + 8.0), 1.0)
        return [_best_ratio(row).tolist() for row in hazard]

    def fade(self) -> None:
        """Halve the weight of the past every few rounds, so that the counts follow the traffic."""
        self.used *= _DECAY
        self.given_up *= _DECAY


def _best_ratio(hazard: Floats) -> Floats:
    """For each bin: max over horizons of (probability of use up to there) / (expected seconds until use or there)."""
    survive = np.concatenate([[1.0], np.cumprod(1.0 - hazard)])
    hits = np.concatenate([[0.0], np.cumsum(survive[:-1] * hazard)])
    seconds = np.concatenate([[0.0], np.cumsum(survive[:-1] * _WIDTHS * (1.0 - hazard / 2.0))])
    gained = hits[None, 1:] - hits[:-1, None]
    waited = seconds[None, 1:] - seconds[:-1, None]
    ratio = np.where(np.tri(_BINS, dtype=bool).T, gained / np.maximum(waited, 1e-12), 0.0)
    best: Floats = ratio.max(axis=1)
    return best


class _Block:
    __slots__ = ("children", "last_s", "parent", "pause_s", "turns", "watched", "which")

    def __init__(self, parent: BlockName | None, now_s: float, turns: int, pause_s: float, watched: bool) -> None:
        self.parent = parent
        self.watched = watched
        self.last_s = now_s
        self.turns = turns
        self.pause_s = pause_s
        self.which = block_class(turns, pause_s)
        self.children = 0


class DensityPolicy:
    """O(classes) an eviction, less when a chain is dropped block by block; O(log n) everything else."""

    def __init__(self, capacity_blocks: int, argument: str = "") -> None:
        self._blocks: dict[BlockName, _Block] = {}
        self._oldest = [KeyedHeap() for _ in range(_NUM_CLASSES)]
        self._newest = [KeyedHeap() for _ in range(_NUM_CLASSES)]
        self._offered: dict[BlockName, int] = {}
        self._ghosts: dict[BlockName, _Block] = {}
        self._max_ghosts = max(capacity_blocks * _GHOSTS_PER_BLOCK // _SAMPLE, _LEAST_GHOSTS)
        self._counts = ReuseCounts()
        self._index = [[0.0] * _BINS for _ in range(_NUM_CLASSES)]
        self._round = max(capacity_blocks // 2, 4096)
        self._events = 0
        self._order = 0
        self._learned = False
        self._last_seen = (0, 0.0)
        self._last_class = 0
        self._best: BlockName | None = None
        self._best_at_s = -math.inf
        self._gone: _Block | None = None

    def on_insert(self, block: BlockMeta, now_s: float) -> None:
        name = block.name
        above = self._blocks.get(block.parent) if block.parent is not None else None
        turns, pause_s = 0, 0.0
        if above is not None:
            above.children += 1
            if above.children <= 2:
                turns, pause_s = above.turns, above.pause_s
        ghost = self._ghosts.pop(name, None)
        if ghost is not None:
            self._counts.used[ghost.which, age_bin(now_s - ghost.last_s)] += 1
            turns, pause_s = max(turns, ghost.turns + 1), now_s - ghost.last_s
        self._blocks[name] = _Block(block.parent, now_s, turns, pause_s, zlib.crc32(name) % _SAMPLE == 0)
        self._events += 1
        if self._events >= self._round:
            self._learn(now_s)

    def on_hit(self, name: BlockName, now_s: float) -> None:
        block = self._blocks[name]
        age_s = now_s - block.last_s
        if block.watched:
            self._counts.used[block.which, age_bin(age_s)] += 1
        if age_s > 0.0:
            turns = block.turns + 1
            # The blocks of a chain mostly share their fate: the class of the one before is right for the next.
            if (turns, age_s) != self._last_seen:
                self._last_seen, self._last_class = (turns, age_s), block_class(turns, age_s)
            block.turns, block.pause_s, block.last_s, block.which = turns, age_s, now_s, self._last_class
        if name in self._offered:
            self.remove_evictable(name)
            self.add_evictable(name, now_s)
        self._events += 1
        if self._events >= self._round:
            self._learn(now_s)

    def add_evictable(self, name: BlockName, now_s: float) -> None:
        block = self._blocks[name]
        self._order += 1
        self._offered[name] = block.which
        self._oldest[block.which].put(name, (block.last_s, self._order))
        self._newest[block.which].put(name, (-block.last_s, self._order))

    def remove_evictable(self, name: BlockName) -> None:
        which = self._offered.pop(name, None)
        if which is not None:
            self._oldest[which].discard(name)
            self._newest[which].discard(name)

    def on_remove(self, name: BlockName) -> None:
        self.remove_evictable(name)
        block = self._blocks.pop(name, None)
        if block is None:
            return
        self._gone = block if name == self._best else None
        above = self._blocks.get(block.parent) if block.parent is not None else None
        if above is not None:
            above.children -= 1
        if block.watched:
            self._ghosts[name] = block

    def victim(self, now_s: float) -> BlockName | None:
        """The evictable block of lowest index. Within a class the index rises and falls once, so the oldest and the
        newest block of each class are the candidates."""
        follower = self._follower(now_s)
        if follower is not None:
            return follower
        best: BlockName | None = None
        best_key = (math.inf, 0.0)
        for which in range(_NUM_CLASSES):
            for queue in (self._oldest[which], self._newest[which]):
                name = queue.first()
                if name is not None:
                    last_s = self._blocks[name].last_s
                    index = self._index[which][age_bin(now_s - last_s)] if self._learned else 0.0
                    if (index, last_s) < best_key:
                        best, best_key = name, (index, last_s)
        self._best = best
        self._best_at_s = now_s
        return best

    def _follower(self, now_s: float) -> BlockName | None:
        """The parent of the victim that just left, if it is as old and of the same class: still the lowest, without a
        look at the others. A chain is dropped at the cost of one search."""
        gone, self._gone = self._gone, None
        if gone is None or now_s != self._best_at_s or gone.parent not in self._offered:
            return None
        block = self._blocks[gone.parent]
        if block.last_s != gone.last_s or block.which != gone.which:
            return None
        self._best = gone.parent
        return gone.parent

    def _learn(self, now_s: float) -> None:
        """Once a round: count what waits now, and draw up the index anew."""
        self._events = 0
        while len(self._ghosts) > self._max_ghosts:
            name = next(iter(self._ghosts))
            ghost = self._ghosts.pop(name)
            self._counts.given_up[ghost.which, age_bin(now_s - ghost.last_s)] += 1
        waiting = np.zeros((_NUM_CLASSES, _BINS))
        for block in self._blocks.values():
            if block.watched:
                waiting[block.which, age_bin(now_s - block.last_s)] += 1
        for block in self._ghosts.values():
            waiting[block.which, age_bin(now_s - block.last_s)] += 1
        self._index = self._counts.index(waiting)
        self._learned = True
        self._gone = None
        self._counts.fade()
