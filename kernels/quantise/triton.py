"""FP8 codes and scales in one launch, into buffers that stay where they are.

Roofline: every value in once (4 or 2 bytes), one byte out, 4 bytes a scale. With one scale for the whole tensor the
values are read twice, the second time from the L2 cache if they fit: programs, no more than there are SMs so that all
run at once, agree on the largest value and wait for each other.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.base import Granularity, KernelContext
from headrace.kernels.formats import SCALE_TILE
from headrace.kernels.launch import ceil_div, compute_units, fp8_dtype, next_power_of_two
from headrace.kernels.numeric import activation_scale, to_e4m3

TILE = 4096
"""Values a program keeps at once"""
GROUPS = 4
"""Groups of a row in a program's tile, which leaves 8 rows: 8 scales that lie together fill a sector"""
TENSOR_STEP = 16384


@triton.jit
def group_kernel(
    x_ptr, codes_ptr, scales_ptr, rows, width, row_stride, scale_row_stride, scale_tile_stride,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Codes [rows, width] and one scale a row and 128 channels."""
    row = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    column = tl.program_id(1) * (C * 128) + tl.arange(0, C * 128)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    x = tl.load(x_ptr + row[:, None] * row_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    x = tl.reshape(x, (R, C, 128))
    scale = activation_scale(tl.max(tl.abs(x), 2))
    codes = tl.reshape(tl.div_rn(x, tl.broadcast_to(scale[:, :, None], x.shape)), (R, C * 128))
    to = codes_ptr + row[:, None] * width + column[None, :]
    tl.store(to, to_e4m3(codes, codes_ptr), mask=inside)
    tile = tl.program_id(1) * C + tl.arange(0, C)
    at = scales_ptr + row[:, None] * scale_row_stride + tile[None, :] * scale_tile_stride
    tl.store(at, scale, mask=(row < rows)[:, None] & (tile * 128 < width)[None, :])


@triton.jit
def token_kernel(x_ptr, codes_ptr, scales_ptr, rows, width, R: tl.constexpr, W: tl.constexpr):
    """Codes [rows, width] and one scale a row; R rows a program, each read once if it is no longer than W."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    inside = tl.arange(0, W)
    here = row < rows
    at = row.to(tl.int64)[:, None] * width + inside[None, :]
    x = tl.load(x_ptr + at, mask=here[:, None] & (inside < width)[None, :], other=0.0).to(tl.float32)
    most = tl.max(tl.abs(x), 1)
    for start in range(W, width, W):
        more = tl.load(x_ptr + at + start, mask=here[:, None] & (start + inside < width)[None, :], other=0.0)
        most = tl.maximum(most, tl.max(tl.abs(more.to(tl.float32)), 1))
    scale = activation_scale(most)
    tl.store(scales_ptr + row, scale, mask=here)
    for start in range(0, width, W):
        keep = here[:, None] & (start + inside < width)[None, :]
        if start > 0:
            x = tl.load(x_ptr + at + start, mask=keep, other=0.0).to(tl.float32)
        codes = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
        tl.store(codes_ptr + at + start, to_e4m3(codes, codes_ptr), mask=keep)


@triton.jit
def tensor_kernel(x_ptr, codes_ptr, scale_ptr, state_ptr, count, STEP: tl.constexpr):
    """Codes of `count` values and one scale. `state_ptr` int32 [3], zeros before and after: bits of the largest value,
    programs that have added theirs, programs that have read it."""
    inside = tl.arange(0, STEP).to(tl.int64)
    program, programs = tl.program_id(0), tl.num_programs(0)
    most = tl.zeros((STEP,), tl.float32)
    for tile in range(program, tl.cdiv(count, STEP), programs):
        at = (inside * 0 + tile) * STEP + inside
        most = tl.maximum(most, tl.abs(tl.load(x_ptr + at, mask=at < count, other=0.0).to(tl.float32)))
    # Bits of floats that are not negative have the order of the floats.
    tl.atomic_max(state_ptr, tl.max(most, 0).to(tl.int32, bitcast=True))
    tl.atomic_add(state_ptr + 1, 1, sem="acq_rel")
    while tl.atomic_add(state_ptr + 1, 0, sem="acq_rel") < programs:
        pass
    bits = tl.atomic_add(state_ptr, 0)
    scale = activation_scale(bits.to(tl.float32, bitcast=True) + tl.zeros((1,), tl.float32))
    if tl.atomic_add(state_ptr + 2, 1, sem="acq_rel") == programs - 1:
        tl.store(scale_ptr + tl.arange(0, 1), scale)
        tl.store(state_ptr + tl.arange(0, 4), tl.zeros((4,), tl.int32), mask=tl.arange(0, 4) < 3)
    for tile in range(program, tl.cdiv(count, STEP), programs):
        at = (inside * 0 + tile) * STEP + inside
        x = tl.load(x_ptr + at, mask=at < count, other=0.0).to(tl.float32)
        codes = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
        tl.store(codes_ptr + at, to_e4m3(codes, codes_ptr), mask=at < count)


def quantise_groups(x: Tensor, codes: Tensor, scales: Tensor, transposed: bool) -> None:
    """x fp32 or bf16 [t, D] -> codes e4m3 [t, D], scales fp32 [t, ceil(D / 128)] or, transposed, [ceil(D / 128), t]."""
    rows, width = x.shape
    if rows:
        row_stride, tile_stride = scales.stride()[::-1] if transposed else scales.stride()
        tiles = ceil_div(width, SCALE_TILE)
        groups = GROUPS if tiles % GROUPS == 0 else min(2 * GROUPS, next_power_of_two(tiles))
        step = TILE // (groups * SCALE_TILE)
        group_kernel[(ceil_div(rows, step), ceil_div(tiles, groups))](
            x, codes, scales, rows, width, x.stride(0), row_stride, tile_stride, R=step, C=groups, num_warps=4
        )


class TritonQuantise:
    """What it returns is valid until its next call, and at the same addresses for as long as no call is larger: a
    captured graph may use it. Calls must follow each other on one stream."""

    def __init__(self, context: KernelContext) -> None:
        device = context.device
        self._programs = compute_units(device)
        self._codes = torch.empty(0, dtype=torch.uint8, device=device)
        self._scales = torch.empty(1, dtype=torch.float32, device=device)
        self._state = torch.zeros(3, dtype=torch.int32, device=device)

    def __call__(self, x: Tensor, granularity: Granularity) -> tuple[Tensor, Tensor]:
        width = x.shape[-1]
        flat = x.reshape(-1, width).contiguous()
        rows = flat.shape[0]
        tiles = ceil_div(width, SCALE_TILE)
        if self._codes.numel() < flat.numel():
            self._codes = torch.empty(flat.numel(), dtype=torch.uint8, device=x.device)
        if self._scales.numel() < rows * tiles:
            self._scales = torch.empty(rows * tiles, dtype=torch.float32, device=x.device)
        codes = self._codes[: flat.numel()].view(fp8_dtype(x.device)).view(x.shape)
        if granularity is Granularity.GROUP:
            scales = self._scales[: rows * tiles].view(rows, tiles)
            quantise_groups(flat, codes, scales, transposed=False)
            return codes, scales.view(*x.shape[:-1], tiles)
        if granularity is Granularity.TOKEN:
            if rows:
                wide = min(TILE, next_power_of_two(width))
                grid = (ceil_div(rows, TILE // wide),)
                token_kernel[grid](flat, codes, self._scales, rows, width, R=TILE // wide, W=wide, num_warps=4)
            return codes, self._scales[:rows].view(x.shape[:-1])
        grid = (max(1, min(self._programs, ceil_div(flat.numel(), TENSOR_STEP))),)
        tensor_kernel[grid](flat, codes, self._scales, self._state, flat.numel(), STEP=TENSOR_STEP, num_warps=16)
        return codes, self._scales[:1]


def create(context: KernelContext) -> TritonQuantise:
    return TritonQuantise(context)
