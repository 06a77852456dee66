"""Absorbed attention over selected FP8 cache rows, read where they lie in the paged cache.

Roofline of t rows with H heads and K selected rows: 2 t H K (576 + 512) FLOP at bf16 rate; 656 (or 576) bytes for each
different cache row, 4 t K of selection, 4 t H (576 + 512) of queries and outputs.

A program owns one query row, some heads and a share of the selection. A tile of cache rows is dequantised to bf16
(exact: 4 significant bits times a power of two) in four pieces of 128 values, the unit of a scale, and serves as keys
and as values. Softmax runs online in fp32. With few rows the selection is split over programs and the parts are
merged by their log-sum-exp in a second launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import tuned
from headrace.kernels.base import KernelContext, QueryRows
from headrace.kernels.formats import LATENT_DIM, RowFormat
from headrace.kernels.launch import Tile, ceil_div, fp8_dtype, next_power_of_two

MAX_SPLITS = 16
WANTED_PROGRAMS = 264
"""Two for each multiprocessor of an H200"""


@triton.jit
def doubled_if_fnuz(values, codes_ptr):
    """What was read through a fnuz pointer is half of what the byte means (`numeric.py`). Stays bf16: the type of a
    product with a plain number differs between versions of Triton."""
    if codes_ptr.dtype.element_ty == tl.float8e4b8:
        values = (values * 2.0).to(tl.bfloat16)
    return values


@triton.jit
def piece(codes_ptr, base, valid, scale, TILED: tl.constexpr):
    """bf16 [rows, 128] of cache rows; rows that are not valid are zero, whatever lies there."""
    codes = tl.load(codes_ptr + base[:, None] + tl.arange(0, 128)[None, :], mask=valid[:, None], other=0.0)
    values = doubled_if_fnuz(codes.to(tl.bfloat16), codes_ptr)
    if TILED:
        values = values * scale[:, None]
    return values


@triton.jit
def sparse_mla_kernel(
    q_ptr, codes_ptr, scales_ptr, halves_ptr, selection_ptr, seq_ptr, table_ptr, out_ptr, lse_ptr,
    heads, table_blocks, row_stride, head_stride, scale_log2, share,
    TILED: tl.constexpr, ROW_BYTES: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, SPLITS: tl.constexpr,
    BH: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    real = (head < heads)[:, None]
    dim = tl.arange(0, 128)
    rope = tl.arange(0, 64)
    every = tl.arange(0, KP)
    chosen = tl.load(selection_ptr + row * K + every, mask=every < K, other=-1)
    end = tl.minimum(tl.max(tl.where(chosen >= 0, every + 1, 0), 0), (split + 1) * share)
    table = table_ptr + tl.load(seq_ptr + row).to(tl.int64) * table_blocks
    query = q_ptr + row * row_stride + head[:, None] * head_stride
    q0 = tl.load(query + dim[None, :], mask=real, other=0.0).to(tl.bfloat16)
    q1 = tl.load(query + 128 + dim[None, :], mask=real, other=0.0).to(tl.bfloat16)
    q2 = tl.load(query + 256 + dim[None, :], mask=real, other=0.0).to(tl.bfloat16)
    q3 = tl.load(query + 384 + dim[None, :], mask=real, other=0.0).to(tl.bfloat16)
    qr = tl.load(query + 512 + rope[None, :], mask=real, other=0.0).to(tl.bfloat16)
    largest = tl.full((BH,), float("-inf"), tl.float32)
    total = tl.zeros((BH,), tl.float32)
    out0 = tl.zeros((BH, 128), tl.float32)
    out1 = tl.zeros((BH, 128), tl.float32)
    out2 = tl.zeros((BH, 128), tl.float32)
    out3 = tl.zeros((BH, 128), tl.float32)
    for start in range(split * share, end, BN):
        index = start + tl.arange(0, BN)
        sel = tl.load(selection_ptr + row * K + index, mask=index < end, other=-1)
        slot = tl.load(table + sel // 64, mask=sel >= 0, other=-1).to(tl.int64)
        valid = slot >= 0
        place = slot * 64 + sel % 64
        base = place * ROW_BYTES
        s0 = tl.full((BN,), 1.0, tl.float32).to(tl.bfloat16)
        s1 = s0
        s2 = s0
        s3 = s0
        if TILED:
            scales = scales_ptr + place * (ROW_BYTES // 4) + 128
            s0 = tl.load(scales, mask=valid, other=0.0).to(tl.bfloat16)
            s1 = tl.load(scales + 1, mask=valid, other=0.0).to(tl.bfloat16)
            s2 = tl.load(scales + 2, mask=valid, other=0.0).to(tl.bfloat16)
            s3 = tl.load(scales + 3, mask=valid, other=0.0).to(tl.bfloat16)
            where = halves_ptr + place[:, None] * (ROW_BYTES // 2) + 264 + rope[None, :]
            kr = tl.load(where, mask=valid[:, None], other=0.0)
        else:
            where = codes_ptr + base[:, None] + 512 + rope[None, :]
            kr = tl.load(where, mask=valid[:, None], other=0.0)
            kr = doubled_if_fnuz(kr.to(tl.bfloat16), codes_ptr)
        k0 = piece(codes_ptr, base, valid, s0, TILED)
        k1 = piece(codes_ptr + 128, base, valid, s1, TILED)
        k2 = piece(codes_ptr + 256, base, valid, s2, TILED)
        k3 = piece(codes_ptr + 384, base, valid, s3, TILED)
        score = tl.dot(qr, tl.trans(kr))
        score = tl.dot(q0, tl.trans(k0), score)
        score = tl.dot(q1, tl.trans(k1), score)
        score = tl.dot(q2, tl.trans(k2), score)
        score = tl.dot(q3, tl.trans(k3), score)
        score = tl.where(valid[None, :], score * scale_log2, float("-inf"))
        new = tl.maximum(largest, tl.max(score, 1))
        finite = tl.where(new == float("-inf"), 0.0, new)
        shrink = tl.exp2(largest - finite)
        p = tl.exp2(score - finite[:, None])
        total = total * shrink + tl.sum(p, 1)
        largest = new
        p = p.to(tl.bfloat16)
        out0 = tl.dot(p, k0, out0 * shrink[:, None])
        out1 = tl.dot(p, k1, out1 * shrink[:, None])
        out2 = tl.dot(p, k2, out2 * shrink[:, None])
        out3 = tl.dot(p, k3, out3 * shrink[:, None])
    share_of = 1.0 / tl.where(total == 0, 1.0, total)[:, None]
    line = (row * SPLITS + split) * heads + head
    to = out_ptr + line[:, None] * 512 + dim[None, :]
    tl.store(to, out0 * share_of, mask=real)
    tl.store(to + 128, out1 * share_of, mask=real)
    tl.store(to + 256, out2 * share_of, mask=real)
    tl.store(to + 384, out3 * share_of, mask=real)
    if SPLITS > 1:
        lse = tl.where(total == 0, float("-inf"), largest + tl.log2(total))
        tl.store(lse_ptr + line, lse, mask=head < heads)


@triton.jit
def merge_kernel(parts_ptr, lse_ptr, out_ptr, heads, SPLITS: tl.constexpr, SP: tl.constexpr):
    """Weighted mean of the parts of one (row, head) by 2^lse; a head without a selection gives 0."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.arange(0, SP)
    dim = tl.arange(0, 512)
    line = (row * SPLITS + split) * heads + head
    real = split < SPLITS
    lse = tl.load(lse_ptr + line, mask=real, other=float("-inf"))
    largest = tl.max(lse, 0)
    weight = tl.exp2(lse - tl.where(largest == float("-inf"), 0.0, largest))
    parts = tl.load(parts_ptr + line[:, None] * 512 + dim[None, :], mask=real[:, None], other=0.0)
    total = tl.sum(weight, 0)
    out = tl.sum(parts * weight[:, None], 0) / tl.where(total == 0, 1.0, total)
    tl.store(out_ptr + (row * heads + head) * 512 + dim, out)


def choose_tile(heads: int) -> Tile:
    """Heads by cache rows of one program. On AMD 64 by 64 spills hundreds of registers: its tables have tiles of 16
    cache rows."""
    if heads <= 16:
        return Tile(16, 64, warps=4, stages=2)
    if heads <= 32:
        return Tile(32, 64, warps=4, stages=2)
    return Tile(64, 64, warps=8, stages=2)


def choose_splits(rows: int, head_blocks: int, k: int, block: int) -> int:
    """Enough programs to fill the device, none with less than two tiles of the selection."""
    most = max(1, min(MAX_SPLITS, k // (2 * block)))
    return max(1, min(most, WANTED_PROGRAMS // max(rows * head_blocks, 1)))


class TritonSparseMla:
    def __init__(self, context: KernelContext) -> None:
        self._deterministic = context.deterministic

    def __call__(
        self,
        q: Tensor,
        plane: Tensor,
        selection: Tensor,
        rows: QueryRows,
        fmt: RowFormat,
        scale: float,
        tile: Tile | None = None,
        splits: int = 0,
    ) -> Tensor:
        """`tile` and `splits` force a launch shape. In deterministic mode the selection is never split, because how
        far would depend on the number of rows."""
        count, heads, _ = q.shape
        out = torch.empty((count, heads, LATENT_DIM), dtype=torch.float32, device=q.device)
        if not count:
            return out
        k = selection.shape[1]
        tile = tile or tuned.tile("sparse_mla", q.device, fmt.name, {"heads": heads}, choose_tile(heads))
        blocks = ceil_div(heads, tile.m)
        if not splits:
            splits = 1 if self._deterministic else choose_splits(count, blocks, k, tile.n)
        share = ceil_div(ceil_div(k, tile.n), splits) * tile.n
        parts, lse = out, out
        if splits > 1:
            parts = torch.empty((count, splits, heads, LATENT_DIM), dtype=torch.float32, device=q.device)
            lse = torch.empty((count, splits, heads), dtype=torch.float32, device=q.device)
        q = q if q.stride(2) == 1 else q.contiguous()
        codes = plane.view(fp8_dtype(plane.device))
        sparse_mla_kernel[(count, blocks, splits)](
            q, codes, plane.view(torch.float32) if fmt.tiled else codes,
            plane.view(torch.bfloat16) if fmt.tiled else codes, selection.contiguous(), rows.seq,
            rows.block_tables.contiguous(), parts, lse, heads, rows.block_tables.shape[1], q.stride(0), q.stride(1),
            scale * 1.4426950408889634, share,
            TILED=fmt.tiled, ROW_BYTES=fmt.latent_row_bytes, K=k, KP=next_power_of_two(k), SPLITS=splits,
            BH=tile.m, BN=tile.n, **tile.options,
        )  # fmt: skip
        if splits > 1:
            merge_kernel[(count, heads)](parts, lse, out, heads, SPLITS=splits, SP=next_power_of_two(splits))
        return out


def create(context: KernelContext) -> TritonSparseMla:
    return TritonSparseMla(context)
