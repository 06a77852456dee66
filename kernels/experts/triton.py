"""Routed experts in three launches: gate and up with SiLU * mul and requantisation; down with the row's weight; sum.

Roofline of a rows (each with its expert): 6 a D I FLOP at FP8 rate; 3 D I bytes for each expert that has a row, once;
a D codes in, a I codes out and in again, 2 a D of bf16 parts out and in, 8 N D of fp64 sums.

Rows are not permuted in memory: products read them through a list of (row, expert) pairs sorted by expert, and each
part lands in its pair's place, so the combine needs no inverse. The plan is built on the device, without a
synchronisation; tiles beyond the last are empty programs.
"""

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import tuned
from headrace.kernels.base import KernelContext, Pair
from headrace.kernels.experts.permute import combine
from headrace.kernels.experts.reference import ReferenceExperts, ReferenceExpertWeights
from headrace.kernels.formats import SCALE_TILE
from headrace.kernels.fp8 import readable
from headrace.kernels.launch import Tile, ceil_div, fp8_dtype
from headrace.kernels.linear.triton import quantise
from headrace.kernels.numeric import activation_scale, fp8_gain, to_e4m3
from headrace.kernels.plan import plan_tiles

SMALL_TILE = Tile(64, 128, warps=4, stages=3)
LARGE_TILE = Tile(128, 128, warps=8, stages=3)


@triton.jit
def gate_up_kernel(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, pairs_ptr, tile_expert_ptr, tile_start_ptr, tile_end_ptr,
    hidden_ptr, hidden_scale_ptr, experts, pairs_a_row, D, INNER, x_scale_row, hidden_scale_row,
    EVEN_K: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up of 128 hidden channels, requantised: exactly one group of the next product's input."""
    tile = tl.program_id(1)
    expert = tl.load(tile_expert_ptr + tile).to(tl.int64)
    if expert >= experts:
        return
    place = tl.load(tile_start_ptr + tile) + tl.arange(0, BM)
    inside = place < tl.load(tile_end_ptr + tile)
    row = tl.load(pairs_ptr + place, mask=inside, other=0) // pairs_a_row
    block = tl.program_id(0)
    column = block * 128 + tl.arange(0, 128)
    k = tl.arange(0, 128)
    a_ptr = x_ptr + row.to(tl.int64)[:, None] * D + k[None, :]
    a_scale_ptr = x_scale_ptr + row.to(tl.int64) * x_scale_row
    channel = tl.minimum(column, INNER - 1).to(tl.int64)
    gate_ptr = w_ptr + (expert * 2 * INNER + channel)[None, :] * D + k[:, None]
    up_ptr = gate_ptr + INNER.to(tl.int64) * D
    steps = tl.cdiv(D, 128)
    blocks = tl.cdiv(INNER, 128)
    gate_scale_ptr = w_scale_ptr + (expert * 2 * blocks + block) * steps
    up_scale_ptr = gate_scale_ptr + blocks * steps
    gate = tl.zeros((BM, 128), tl.float32)
    up = tl.zeros((BM, 128), tl.float32)
    for step in range(steps):
        if EVEN_K:
            a = tl.load(a_ptr)
            g = tl.load(gate_ptr)
            u = tl.load(up_ptr)
        else:
            left = step * 128 + k < D
            a = tl.load(a_ptr, mask=left[None, :], other=0.0)
            g = tl.load(gate_ptr, mask=left[:, None], other=0.0)
            u = tl.load(up_ptr, mask=left[:, None], other=0.0)
        scale = tl.load(a_scale_ptr + step)[:, None] * (fp8_gain(x_ptr) * fp8_gain(w_ptr))
        gate += tl.dot(a, g) * (scale * tl.load(gate_scale_ptr + step))
        up += tl.dot(a, u) * (scale * tl.load(up_scale_ptr + step))
        a_ptr += 128
        gate_ptr += 128
        up_ptr += 128
    hidden = gate / (1.0 + tl.exp(-gate)) * up
    hidden = tl.where((column < INNER)[None, :], hidden, 0.0)
    scale = activation_scale(tl.max(tl.abs(hidden), 1))
    codes = tl.div_rn(hidden, tl.broadcast_to(scale[:, None], hidden.shape))
    wide = place.to(tl.int64)
    keep = inside[:, None] & (column < INNER)[None, :]
    tl.store(hidden_ptr + wide[:, None] * INNER + column[None, :], to_e4m3(codes, hidden_ptr), mask=keep)
    tl.store(hidden_scale_ptr + wide * hidden_scale_row + block, scale, mask=inside)


@triton.jit
def down_kernel(
    hidden_ptr, hidden_scale_ptr, w_ptr, w_scale_ptr, gains_ptr, pairs_ptr, tile_expert_ptr, tile_start_ptr,
    tile_end_ptr, out_ptr, experts, D, INNER, hidden_scale_row,
    EVEN_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Down product times the pair's weight, rounded to bf16, into the pair's row of `out` [pairs, D]."""
    tile = tl.program_id(1)
    expert = tl.load(tile_expert_ptr + tile).to(tl.int64)
    if expert >= experts:
        return
    place = tl.load(tile_start_ptr + tile) + tl.arange(0, BM)
    inside = place < tl.load(tile_end_ptr + tile)
    safe = tl.where(inside, place, tl.load(tile_start_ptr + tile)).to(tl.int64)
    block = tl.program_id(0)
    column = block * BN + tl.arange(0, BN)
    k = tl.arange(0, 128)
    a_ptr = hidden_ptr + safe[:, None] * INNER + k[None, :]
    a_scale_ptr = hidden_scale_ptr + safe * hidden_scale_row
    b_ptr = w_ptr + (expert * D + tl.minimum(column, D - 1).to(tl.int64))[None, :] * INNER + k[:, None]
    steps = tl.cdiv(INNER, 128)
    b_scale_ptr = w_scale_ptr + (expert * tl.cdiv(D, 128) + block * BN // 128) * steps
    out = tl.zeros((BM, BN), tl.float32)
    for step in range(steps):
        if EVEN_K:
            a = tl.load(a_ptr)
            b = tl.load(b_ptr)
        else:
            left = step * 128 + k < INNER
            a = tl.load(a_ptr, mask=left[None, :], other=0.0)
            b = tl.load(b_ptr, mask=left[:, None], other=0.0)
        scale = tl.load(a_scale_ptr + step)[:, None] * (fp8_gain(hidden_ptr) * fp8_gain(w_ptr))
        out += tl.dot(a, b) * (scale * tl.load(b_scale_ptr + step))
        a_ptr += 128
        b_ptr += 128
    pair = tl.load(pairs_ptr + place, mask=inside, other=0).to(tl.int64)
    out = out * tl.load(gains_ptr + pair, mask=inside, other=0.0)[:, None]
    to = out_ptr + pair[:, None] * D + column[None, :]
    tl.store(to, out.to(tl.bfloat16), mask=inside[:, None] & (column < D)[None, :])


@dataclasses.dataclass(slots=True)
class TritonExpertWeights:
    gate_up: Tensor
    """e4m3 [E, 2I, D]"""
    gate_up_scale: Tensor
    """fp32 [E, 2, ceil(I/128), ceil(D/128)]"""
    down: Tensor
    """e4m3 [E, D, I]"""
    down_scale: Tensor
    """fp32 [E, ceil(D/128), ceil(I/128)]"""
    quantised: bool = True


class TritonExperts:
    def __init__(self, context: KernelContext) -> None:
        self._deterministic = context.deterministic
        self._plain = ReferenceExperts(context)

    def prepare(
        self, gates: list[Pair], ups: list[Pair], downs: list[Pair]
    ) -> TritonExpertWeights | ReferenceExpertWeights:
        """FP8 experts as they are stored. Float experts are the reference's."""
        if gates[0][1] is None:
            return self._plain.prepare(gates, ups, downs)

        def codes(pair: Pair) -> Tensor:
            return pair[0].view(torch.uint8)

        def scale(pair: Pair) -> Tensor:
            assert pair[1] is not None
            return pair[1].to(torch.float32)

        gate_up = torch.stack([torch.cat((codes(gate), codes(up))) for gate, up in zip(gates, ups)])
        down = torch.stack([codes(pair) for pair in downs])
        return TritonExpertWeights(
            readable(gate_up).view(fp8_dtype(gate_up.device)),
            torch.stack([torch.stack((scale(gate), scale(up))) for gate, up in zip(gates, ups)]).contiguous(),
            readable(down).view(fp8_dtype(down.device)),
            torch.stack([scale(down) for down in downs]).contiguous(),
        )

    def encode(self, x: Tensor, weight: TritonExpertWeights | ReferenceExpertWeights) -> tuple[Tensor, Tensor | None]:
        if isinstance(weight, ReferenceExpertWeights):
            return self._plain.encode(x, weight)
        codes, scales = quantise(x, transposed=False)
        return codes.view(torch.uint8), scales

    def __call__(
        self,
        x: Tensor,
        scales: Tensor | None,
        ids: Tensor,
        weights: Tensor,
        weight: TritonExpertWeights | ReferenceExpertWeights,
        first_expert: int,
    ) -> Tensor:
        if isinstance(weight, ReferenceExpertWeights) or scales is None:
            assert isinstance(weight, ReferenceExpertWeights)
            return self._plain(x, scales, ids, weights, weight, first_expert)
        (rows, width), top = x.shape, ids.shape[1]
        out = torch.empty((rows, width), dtype=torch.float64, device=x.device)
        if rows:
            parts = self._parts(x, scales, ids, weights, weight, first_expert)
            local = ids.flatten() - first_expert
            here = (local >= 0) & (local < weight.down.shape[0])
            pair = torch.arange(rows * top, dtype=torch.int32, device=x.device)
            combine(parts, torch.where(here, pair, -1), out, top)
        return out

    def _tile(self, pairs: int, experts: int, inner: int, device: torch.device) -> Tile:
        if self._deterministic:
            return SMALL_TILE.on(device)
        sizes = {"pairs": pairs, "experts": experts, "inner": inner}
        return tuned.tile("experts", device, "e4m3", sizes, LARGE_TILE if pairs >= 96 * experts else SMALL_TILE)

    def _parts(
        self, x: Tensor, scales: Tensor, ids: Tensor, weights: Tensor, weight: TritonExpertWeights, first_expert: int
    ) -> Tensor:
        """bf16 [N * k, D] weighted outputs; rows of pairs whose expert is elsewhere are never written."""
        experts, width, inner = weight.down.shape
        ids, weights, x = ids.contiguous(), weights.contiguous(), x.contiguous()
        pairs = ids.numel()
        tile = self._tile(pairs, experts, inner, x.device)
        plan = plan_tiles(ids.flatten() - first_expert, experts, tile.m)
        tiles, groups = plan.group.shape[0], ceil_div(inner, SCALE_TILE)
        hidden = torch.empty((pairs, inner), dtype=torch.uint8, device=x.device).view(fp8_dtype(x.device))
        hidden_scales = torch.empty((pairs, groups), dtype=torch.float32, device=x.device)
        parts = torch.empty((pairs, width), dtype=torch.bfloat16, device=x.device)
        where = (plan.members, plan.group, plan.start, plan.end)
        gate_up_kernel[(groups, tiles)](
            x.view(fp8_dtype(x.device)), scales, weight.gate_up, weight.gate_up_scale, *where, hidden, hidden_scales,
            experts, ids.shape[1], width, inner, scales.stride(0), groups,
            EVEN_K=width % SCALE_TILE == 0, BM=tile.m, **tile.options,
        )  # fmt: skip
        down_kernel[(ceil_div(width, tile.n), tiles)](
            hidden, hidden_scales, weight.down, weight.down_scale, weights, *where, parts, experts, width, inner,
            groups, EVEN_K=inner % SCALE_TILE == 0, BM=tile.m, BN=tile.n, **tile.options,
        )  # fmt: skip
        return parts


def create(context: KernelContext) -> TritonExperts:
    return TritonExperts(context)
