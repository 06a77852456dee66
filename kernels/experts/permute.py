"""Rows brought together by expert, and their weighted outputs summed: what lies around grouped products.

The plan is made on the device and asks it for no number; buffers have room for the worst case.
Roofline of a local pairs out of N rows: N D + a D bytes of codes moved, 2 a D of bf16 parts and 8 N D of sums.
"""

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.launch import ceil_div

COLUMNS = 2048


@dataclasses.dataclass(slots=True)
class Places:
    """Where pairs (row, expert) go. All int32, on the device."""

    place: Tensor
    """[pairs] row in the buffer that lies by expert, -1: the expert is not here"""
    expert: Tensor
    """[tiles] expert of each tile of rows; 0 beyond the last"""
    tiles: Tensor
    """[1] tiles in use"""
    rows: int
    """Rows the buffer needs at worst"""


def plan_places(expert: Tensor, experts: int, tile: int) -> Places:
    """`expert` integers [pairs]; outside 0..experts-1: not here. Every expert's rows start on a multiple of `tile` and
    are in the order of their pairs."""
    pairs = expert.shape[0]
    expert = torch.where((expert >= 0) & (expert < experts), expert, experts).long()
    sorted_expert, order = expert.sort(stable=True)
    sizes = torch.zeros(experts + 1, dtype=torch.int64, device=expert.device)
    sizes = sizes.scatter_add_(0, expert, torch.ones_like(expert))
    first = sizes.cumsum(0) - sizes
    tiles = (sizes + tile - 1) // tile
    tiles[experts] = 0
    tile_end = tiles.cumsum(0)
    rank = torch.arange(pairs, device=expert.device) - first[sorted_expert]
    target = (tile_end - tiles)[sorted_expert] * tile + rank
    target = torch.where(sorted_expert < experts, target, -1)
    place = torch.empty_like(target).scatter_(0, order, target)
    most = pairs // tile + min(experts, pairs)
    owner = torch.searchsorted(tile_end[:experts].contiguous(), torch.arange(most, device=expert.device), right=True)
    owner = torch.where(owner < experts, owner, 0)
    return Places(place.int(), owner.int(), tile_end[experts : experts + 1].int(), most * tile)


@triton.jit
def permute_kernel(
    codes_ptr, scales_ptr, gains_ptr, place_ptr, out_ptr, out_scales_ptr, out_gains_ptr, words, tiles,
    TOP: tl.constexpr, W: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Program: a row; its codes (as `words` int32), scales and gain to each of its places."""
    row = tl.program_id(0).to(tl.int64)
    inside = tl.arange(0, W)
    scale = tl.load(scales_ptr + row * tiles + tl.arange(0, T), mask=tl.arange(0, T) < tiles, other=0.0)
    for j in range(TOP):
        place = tl.load(place_ptr + row * TOP + j).to(tl.int64)
        if place >= 0:
            for start in range(0, words, W):
                keep = start + inside < words
                code = tl.load(codes_ptr + row * words + start + inside, mask=keep, other=0)
                tl.store(out_ptr + place * words + start + inside, code, mask=keep)
            tl.store(out_scales_ptr + place * tiles + tl.arange(0, T), scale, mask=tl.arange(0, T) < tiles)
            tl.store(out_gains_ptr + place, tl.load(gains_ptr + row * TOP + j))


@triton.jit
def combine_kernel(parts_ptr, place_ptr, out_ptr, D, TOP: tl.constexpr, W: tl.constexpr):
    """fp64 sum of a row's parts; exact, so its order is of no account."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * W + tl.arange(0, W)
    total = tl.zeros((W,), tl.float64)
    for j in range(TOP):
        place = tl.load(place_ptr + row * TOP + j).to(tl.int64)
        keep = (place + column * 0 >= 0) & (column < D)
        total += tl.load(parts_ptr + place * D + column, mask=keep, other=0.0).to(tl.float64)
    tl.store(out_ptr + row * D + column, total, mask=column < D)


def permute(codes: Tensor, scales: Tensor, gains: Tensor, places: Places) -> tuple[Tensor, Tensor, Tensor]:
    """codes uint8 [N, D] (D a multiple of 4), scales fp32 [N, D / 128], gains fp32 [N, k] -> the same three by place:
    e4m3 [places.rows, D], [places.rows, D / 128], [places.rows]. Rows without a pair are not written."""
    (rows, width), top, tiles = codes.shape, gains.shape[1], scales.shape[1]
    out = torch.empty((places.rows, width), dtype=torch.uint8, device=codes.device)
    out_scales = torch.empty((places.rows, tiles), dtype=torch.float32, device=codes.device)
    out_gains = torch.empty(places.rows, dtype=torch.float32, device=codes.device)
    permute_kernel[(rows,)](
        codes.view(torch.int32), scales, gains, places.place, out.view(torch.int32), out_scales, out_gains, width // 4,
        tiles, TOP=top, W=COLUMNS, T=triton.next_power_of_2(tiles), num_warps=4,
    )  # fmt: skip
    return out.view(torch.float8_e4m3fn), out_scales, out_gains


def combine(parts: Tensor, place: Tensor, out: Tensor, top: int) -> None:
    """parts bf16 [places, D], place int32 [N * top] -> out fp64 [N, D]."""
    rows, width = out.shape
    if rows:
        combine_kernel[(rows, ceil_div(width, COLUMNS))](parts, place, out, width, TOP=top, W=COLUMNS, num_warps=4)
