"""Exact top-k of rows of scores in three launches, reading a fraction of the scores.

Scores come with the maximum of every group of 16. The k-th largest of these maxima, T, is a lower bound of the k-th
best score (k groups each hold a score of at least T), so only groups whose maximum reaches T can hold a selected score.
1. `bound_kernel` finds T and lists those groups. 2. `collect_kernel` reads them and keeps the scores from T on, in
order of position: little more than k of them unless scores cluster or tie, all of them at worst. 3. `choose_kernel`
finds the k-th best of these, T', takes everything above T' and of the scores equal to T' the first positions.

Roofline of t rows by n scores: (4/16) n t bytes of maxima + 64 k t of groups: far below the 4 n t that a pass over
the scores would read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.launch import next_power_of_two
from headrace.kernels.numeric import sortable

GROUP = 16
LARGEST_CHUNK = 8192
COLLECT_GROUPS = 256


@triton.jit
def load_keys(source_ptr, start, count, IS_KEY: tl.constexpr, CHUNK: tl.constexpr):
    """int32 [CHUNK] of sortable values; below everything beyond `count`."""
    index = start + tl.arange(0, CHUNK)
    if IS_KEY:
        return tl.load(source_ptr + index, mask=index < count, other=-(2**31))
    return tl.where(index < count, sortable(tl.load(source_ptr + index, mask=index < count, other=0.0)), -(2**31))


@triton.jit
def kth_largest(source_ptr, count, k, IS_KEY: tl.constexpr, CHUNK: tl.constexpr):
    """The largest value that at least k of `count` values reach, bit by bit from the top."""
    one = tl.full((), 1, tl.int32)
    found = one - 1
    keys = load_keys(source_ptr, 0, count, IS_KEY, CHUNK)
    for i in range(32):
        trial = found | (one << (31 - i))
        limit = trial ^ (-(2**31))
        reached = tl.sum(tl.where(keys >= limit, 1, 0), 0)
        for start in range(CHUNK, count, CHUNK):
            more = load_keys(source_ptr, start, count, IS_KEY, CHUNK)
            reached += tl.sum(tl.where(more >= limit, 1, 0), 0)
        found = tl.where(reached >= k, trial, found)
    return found ^ (-(2**31))


@triton.jit
def bound_kernel(
    maxima_ptr, last_row_ptr, bound_ptr, group_ids_ptr, group_count_ptr, first_row, k, width_groups,
    CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    last_row = tl.load(last_row_ptr + row).to(tl.int32)
    if last_row - first_row < k:
        return
    groups = last_row // 16 + 1
    maxima = maxima_ptr + row * width_groups
    bound = -(2**31)
    if groups > k:
        bound = kth_largest(maxima, groups, k, False, CHUNK)
    kept = 0
    for start in range(0, groups, CHUNK):
        index = start + tl.arange(0, CHUNK)
        keep = (load_keys(maxima, start, groups, False, CHUNK) >= bound) & (index < groups)
        place = kept + tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.store(group_ids_ptr + row * width_groups + place, index, mask=keep)
        kept += tl.sum(keep.to(tl.int32), 0)
    tl.store(bound_ptr + row, bound)
    tl.store(group_count_ptr + row, kept)


@triton.jit
def collect_kernel(
    scores_ptr, last_row_ptr, bound_ptr, group_ids_ptr, group_count_ptr, keys_ptr, positions_ptr, count_ptr,
    first_row, k, width, GROUPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    last_row = tl.load(last_row_ptr + row).to(tl.int32)
    if last_row - first_row < k:
        return
    bound = tl.load(bound_ptr + row)
    groups = tl.load(group_count_ptr + row)
    element = tl.arange(0, GROUPS * 16)
    kept = 0
    for start in range(0, groups, GROUPS):
        index = start + element // 16
        group = tl.load(group_ids_ptr + row * (width // 16) + index, mask=index < groups, other=0)
        position = group * 16 + element % 16
        visible = (index < groups) & (position <= last_row) & (position >= first_row)
        key = sortable(tl.load(scores_ptr + row * width + position, mask=visible, other=0.0))
        keep = visible & (key >= bound)
        place = row * width + kept + tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.store(keys_ptr + place, key, mask=keep)
        tl.store(positions_ptr + place, position, mask=keep)
        kept += tl.sum(keep.to(tl.int32), 0)
    tl.store(count_ptr + row, kept)


@triton.jit
def choose_kernel(
    keys_ptr, positions_ptr, count_ptr, last_row_ptr, out_ptr, first_row, k, width,
    CHUNK: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    last_row = tl.load(last_row_ptr + row).to(tl.int32)
    out = out_ptr + row * k
    if last_row - first_row < k:
        index = tl.arange(0, KP)
        everything = tl.where(first_row + index <= last_row, first_row + index, -1)
        tl.store(out + index, everything, mask=index < k)
        return
    count = tl.load(count_ptr + row)
    keys = keys_ptr + row * width
    threshold = kth_largest(keys, count, k, True, CHUNK)
    above = 0
    for start in range(0, count, CHUNK):
        above += tl.sum(tl.where(load_keys(keys, start, count, True, CHUNK) > threshold, 1, 0), 0)
    wanted = k - above
    equals = 0
    kept = 0
    for start in range(0, count, CHUNK):
        index = start + tl.arange(0, CHUNK)
        key = load_keys(keys, start, count, True, CHUNK)
        equal = (key == threshold) & (index < count)
        rank = equals + tl.cumsum(equal.to(tl.int32), 0)
        chosen = ((key > threshold) | (equal & (rank <= wanted))).to(tl.int32)
        place = kept + tl.cumsum(chosen, 0) - 1
        position = tl.load(positions_ptr + row * width + index, mask=chosen != 0, other=0)
        tl.store(out + place, position, mask=chosen != 0)
        equals += tl.sum(equal.to(tl.int32), 0)
        kept += tl.sum(chosen, 0)


def scratch_bytes(width: int) -> int:
    """Of one row of `width` scores: scores, maxima, group ids, keys and positions."""
    return 4 * (3 * width + 2 * (width // GROUP))


def select(
    scores: Tensor, maxima: Tensor, last_row: Tensor, first_row: int, k: int, out: Tensor, chunk: int = 0
) -> None:
    """scores fp32 [t, n] (n a multiple of 16; valid up to the group of last_row, -inf before first_row and beyond
    last_row), maxima fp32 [t, n / 16], last_row int64 [t] -> out int32 [t, k]: ascending positions, -1 padded. Of equal
    scores the lower position wins."""
    rows, width = scores.shape
    if not rows:
        return
    device = scores.device
    bound, groups, count = torch.empty((3, rows), dtype=torch.int32, device=device)
    group_ids = torch.empty(maxima.shape, dtype=torch.int32, device=device)
    keys = torch.empty(scores.shape, dtype=torch.int32, device=device)
    positions = torch.empty(scores.shape, dtype=torch.int32, device=device)
    over_groups = chunk or min(next_power_of_two(max(maxima.shape[1], 64)), LARGEST_CHUNK)
    over_scores = chunk or min(next_power_of_two(max(2 * k, 64)), LARGEST_CHUNK)
    bound_kernel[(rows,)](
        maxima, last_row, bound, group_ids, groups, first_row, k, maxima.shape[1], CHUNK=over_groups, num_warps=8
    )
    collect_kernel[(rows,)](
        scores, last_row, bound, group_ids, groups, keys, positions, count, first_row, k, width,
        GROUPS=COLLECT_GROUPS, num_warps=8,
    )  # fmt: skip
    choose_kernel[(rows,)](
        keys, positions, count, last_row, out, first_row, k, width,
        CHUNK=over_scores, KP=next_power_of_two(k), num_warps=8,
    )  # fmt: skip
