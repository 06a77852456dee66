"""Deals the rows of one step to the ranks of a group. Pure numpy: knows positions, not tokens, caches or processes.

A row at position p scores p + 1 index keys in every full-indexer layer and costs a constant elsewhere, so the ranks are
balanced both in rows and in positions: rows are ordered by position and dealt in a snake (0 1 .. n-1 n-1 .. 1 0 0 ..).
Every rank computes the same deal from the same plan; nobody sends it.
"""

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]


def deal_rows(positions: Rows, ranks: int) -> Rows:
    """The owner of each row: int64 [T] in 0..ranks-1. Rows per rank differ by at most one; with fewer rows than ranks
    some ranks get none. Ties in position are broken by row order, so the deal is a function of its arguments."""
    rows = len(positions)
    lap, place = np.divmod(np.arange(rows, dtype=np.int64), ranks)
    snake = np.where(lap % 2 == 0, place, ranks - 1 - place)
    owner = np.empty(rows, dtype=np.int64)
    owner[np.argsort(positions, kind="stable")] = snake
    return owner


def rows_of(owner: Rows, rank: int) -> Rows:
    """Ascending indices of the rows that `rank` owns: `StepRows.local`."""
    return np.nonzero(owner == rank)[0].astype(np.int64)


def index_work(positions: Rows, owner: Rows, ranks: int) -> Rows:
    """Index keys each rank scores per full-indexer layer: int64 [ranks]."""
    work = np.zeros(ranks, dtype=np.int64)
    np.add.at(work, owner, positions + 1)
    return work


def spread(work: Rows) -> float:
    """(most - least) / mean: 0 when perfectly balanced, 0 when there is no work."""
    total = int(work.sum())
    return 0.0 if total == 0 else float(work.max() - work.min()) * len(work) / total
