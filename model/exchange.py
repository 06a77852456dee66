"""What ranks of a group send each other inside a step (`model.base.Exchange`), over torch.distributed or not at all.

Row counts differ between ranks and may be zero, so every exchange is one uneven all-to-all: the same number of calls on
every rank whatever the counts. (gloo has no fp8 collectives: FP8 travels as bytes; and its all-gather is slower than an
all-to-all of the repeated buffer.)
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

LEGS = ("gather", "reduce", "cache")
"""What crosses between ranks: tokens to the experts, their partial sums back, cache rows of context parallelism."""


def no_bytes() -> dict[str, int]:
    return dict.fromkeys(LEGS, 0)


def row_bytes(rows: Tensor) -> int:
    """Bytes of one row of [n, ...], n may be 0."""
    return math.prod(rows.shape[1:]) * rows.element_size()


class LocalExchange:
    """One rank alone."""

    rank = 0
    size = 1
    splits_layers = False

    def __init__(self) -> None:
        self.collectives = 0
        """Collectives issued so far."""
        self.sent_bytes = no_bytes()
        """Bytes that left this rank for other ranks so far, by leg."""

    def sum_parts(self, part: Tensor) -> Tensor:
        return part

    def gather_rows(self, local: Tensor) -> Tensor:
        return local

    def gather_tokens(self, local: Tensor) -> Tensor:
        return local

    def reduce_scatter(self, partial: Tensor) -> Tensor:
        return partial


class GroupExchange:
    """Ranks of one process group. `begin_step` must be called with the same counts on every rank before each step (or
    part of a step whose row counts differ, such as a draft chain)."""

    splits_layers = False

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.collectives = 0
        self.sent_bytes = no_bytes()
        self._counts = [0] * self.size
        self._row_order: Tensor | None = None

    def begin_step(self, counts: Sequence[int], row_lists: Sequence[Tensor] | None = None) -> None:
        """Agree on the step's shape: `counts[r]` rows on rank r. `row_lists[r]` (context parallel) are the step rows
        rank r computes, int64 ascending; together they are 0..T-1. None: every rank keeps its own cache."""
        if len(counts) != self.size:
            raise ValueError(f"{len(counts)} row counts for {self.size} ranks")
        self._counts = list(counts)
        self._row_order = None
        if row_lists is not None:
            dealt = torch.cat(list(row_lists))
            if dealt.shape[0] != sum(counts):
                raise ValueError(f"row lists hold {dealt.shape[0]} rows, counts {list(counts)}")
            self._row_order = torch.empty_like(dealt)
            self._row_order[dealt] = torch.arange(dealt.shape[0], device=dealt.device)

    def sum_parts(self, part: Tensor) -> Tensor:
        return part

    def gather_rows(self, local: Tensor) -> Tensor:
        if self._row_order is None:
            return local
        return self._all_gather(local, "cache").index_select(0, self._row_order)

    def gather_tokens(self, local: Tensor) -> Tensor:
        return self._all_gather(local, "gather")

    def reduce_scatter(self, partial: Tensor) -> Tensor:
        """Partial sums go to the rank that owns the rows, which adds them in rank order."""
        self.collectives += 1
        mine = self._counts[self.rank]
        if partial.shape[0] != sum(self._counts):
            raise ValueError(f"{partial.shape[0]} rows to reduce, counts {self._counts}")
        self.sent_bytes["reduce"] += (partial.shape[0] - mine) * row_bytes(partial)
        received = partial.new_empty((self.size * mine, *partial.shape[1:]))
        dist.all_to_all_single(received, partial.contiguous(), [mine] * self.size, self._counts, group=self._group)
        return received.view(self.size, mine, *partial.shape[1:]).sum(0)

    def _all_gather(self, local: Tensor, leg: str) -> Tensor:
        self.collectives += 1
        mine = self._counts[self.rank]
        if local.shape[0] != mine:
            raise ValueError(f"rank {self.rank} has {local.shape[0]} rows, {mine} were agreed")
        self.sent_bytes[leg] += (self.size - 1) * mine * row_bytes(local)
        repeated = local.contiguous().repeat(self.size, *[1] * (local.dim() - 1))
        gathered = local.new_empty((sum(self._counts), *local.shape[1:]))
        dist.all_to_all_single(gathered, repeated, self._counts, [mine] * self.size, group=self._group)
        return gathered


class SplitExchange:
    """Ranks that hold a part of every layer and compute all rows of every step (`Placement.head_split`): nothing is
    gathered, outputs are summed. One all-reduce after the attention, one after the MLP or the experts.

    `dtype` is what travels: bf16 as tensor-parallel engines do (2 D bytes a token and sum), fp32 to compare exactly.
    """

    splits_layers = True

    def __init__(self, group: dist.ProcessGroup | None = None, dtype: torch.dtype = torch.bfloat16) -> None:
        self._group, self._dtype = group, dtype
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.collectives = 0

    def sum_parts(self, part: Tensor) -> Tensor:
        self.collectives += 1
        # Always a new tensor: the sum is made in place.
        total = part.to(self._dtype, copy=True)
        dist.all_reduce(total, group=self._group)
        return total.to(part.dtype)

    def gather_rows(self, local: Tensor) -> Tensor:
        return local

    def gather_tokens(self, local: Tensor) -> Tensor:
        return local

    def reduce_scatter(self, partial: Tensor) -> Tensor:
        return self.sum_parts(partial)
