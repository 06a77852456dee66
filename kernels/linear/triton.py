"""Linear layers: block-scaled FP8 (1 x 128 activations by 128 x 128 weights, on FP8 tensor cores) and bf16.

Roofline of the FP8 product [M, K] x [N, K]: 2 M N K FLOP at FP8 rate; N K bytes of weight (once, if M is small) +
M K of codes + 4 M N of output. One fp32 accumulator; every 128 channels a partial sum is scaled into it, so a tensor
core's short accumulator never holds more than 128 products.

A row's sum runs over K in one order whatever M is, as long as the tile is one: deterministic mode has one tile.
"""

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import tuned
from headrace.kernels.base import KernelContext, Pair
from headrace.kernels.formats import SCALE_TILE
from headrace.kernels.fp8 import dequantise_weight, readable
from headrace.kernels.launch import Tile, ceil_div, fp8_dtype
from headrace.kernels.numeric import fp8_gain
from headrace.kernels.quantise.triton import quantise_groups

SCALE_PAD = 256
"""Scales of activations are read for whole tiles of rows: their last stride is a multiple of the largest tile"""
GROUP_M = 8
"""Row tiles that share a column of weight tiles while it is in the L2 cache"""
DETERMINISTIC_TILE = Tile(64, 64, warps=4, stages=4)
FLOAT_TILE = Tile(64, 64, warps=4, stages=3)


@triton.jit
def tile_of(program, tiles_m, tiles_n, G: tl.constexpr):
    """Program -> (row tile, column tile), G row tiles side by side before the next column."""
    group = program // (G * tiles_n)
    first = group * G
    size = tl.minimum(tiles_m - first, G)
    rest = program % (G * tiles_n)
    return first + rest % size, rest // size


@triton.jit
def fp8_linear_kernel(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, out_ptr, M, N, K, x_scale_stride, w_scale_stride,
    SCALE_ROWS: tl.constexpr, EVEN_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    m_tile, n_tile = tile_of(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), G)
    m = m_tile * BM + tl.arange(0, BM)
    n = n_tile * BN + tl.arange(0, BN)
    k = tl.arange(0, 128)
    a_ptr = x_ptr + tl.minimum(m, M - 1).to(tl.int64)[:, None] * K + k[None, :]
    b_ptr = w_ptr + tl.minimum(n, N - 1).to(tl.int64)[None, :] * K + k[:, None]
    a_scale_ptr = x_scale_ptr + tl.minimum(m, M - 1)
    if SCALE_ROWS == 128:
        b_scale_ptr = w_scale_ptr + (n_tile * BN // 128) * w_scale_stride
    else:
        b_scale_ptr = w_scale_ptr + tl.minimum(n, N - 1) * w_scale_stride
    out = tl.zeros((BM, BN), tl.float32)
    for step in range(tl.cdiv(K, 128)):
        if EVEN_K:
            a = tl.load(a_ptr)
            b = tl.load(b_ptr)
        else:
            inside = step * 128 + k < K
            a = tl.load(a_ptr, mask=inside[None, :], other=0.0)
            b = tl.load(b_ptr, mask=inside[:, None], other=0.0)
        scale = tl.load(a_scale_ptr)[:, None] * tl.load(b_scale_ptr + step) * (fp8_gain(x_ptr) * fp8_gain(w_ptr))
        out += tl.dot(a, b) * scale
        a_ptr += 128
        b_ptr += 128
        a_scale_ptr += x_scale_stride
    to = out_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(to, out.to(out_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def float_linear_kernel(
    x_ptr, w_ptr, out_ptr, M, N, K, x_row, x_head, w_head, w_n, w_k, out_row, out_head,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """x [M, heads, K] by w (head, n, k strides) -> out [M, heads, N]; bf16 products, fp32 sums."""
    head = tl.program_id(1).to(tl.int64)
    m_tile, n_tile = tile_of(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), G)
    m = m_tile * BM + tl.arange(0, BM)
    n = n_tile * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    a_ptr = x_ptr + head * x_head + m.to(tl.int64)[:, None] * x_row + k[None, :]
    b_ptr = w_ptr + head * w_head + n.to(tl.int64)[None, :] * w_n + k.to(tl.int64)[:, None] * w_k
    out = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        inside = start + k < K
        a = tl.load(a_ptr, mask=(m < M)[:, None] & inside[None, :], other=0.0).to(tl.bfloat16)
        b = tl.load(b_ptr, mask=(n < N)[None, :] & inside[:, None], other=0.0).to(tl.bfloat16)
        out += tl.dot(a, b)
        a_ptr += BK
        b_ptr += BK * w_k
    to = out_ptr + m.to(tl.int64)[:, None] * out_row + head * out_head + n[None, :]
    tl.store(to, out, mask=(m < M)[:, None] & (n < N)[None, :])


@dataclasses.dataclass(slots=True)
class TritonWeight:
    matrix: Tensor
    """[out, in]: e4m3 codes or bf16"""
    scale: Tensor | None
    """fp32: one row a block of `scale_rows` output rows, one column a block of 128 channels"""
    scale_rows: int

    @property
    def quantised(self) -> bool:
        return self.scale is not None

    @property
    def out_features(self) -> int:
        return self.matrix.shape[0]

    @property
    def in_features(self) -> int:
        return self.matrix.shape[1]


def stack_fp8(parts: tuple[Pair, ...] | list[Pair]) -> TritonWeight:
    """Matrices stacked by rows. If a border between them lies inside a scale block, every row gets its own scale."""
    matrix = torch.cat([part.view(torch.uint8) for part, _ in parts])
    matrix = readable(matrix).view(fp8_dtype(matrix.device))
    grids = [scale.to(torch.float32) for _, scale in parts if scale is not None]
    assert len(grids) == len(parts)
    if all(part.shape[0] % SCALE_TILE == 0 for part, _ in parts[:-1]):
        return TritonWeight(matrix, torch.cat(grids).contiguous(), SCALE_TILE)
    rows = [g.repeat_interleave(SCALE_TILE, 0)[: part.shape[0]] for g, (part, _) in zip(grids, parts)]
    return TritonWeight(matrix, torch.cat(rows).contiguous(), 1)


def quantise(x: Tensor, transposed: bool = True) -> tuple[Tensor, Tensor]:
    """fp32 or bf16 [t, D] -> (codes e4m3 [t, D], scales fp32 [ceil(D / 128), t] as products read them, or
    [t, ceil(D / 128)] when not transposed)."""
    rows, width = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    tiles = ceil_div(width, SCALE_TILE)
    codes = torch.empty((rows, width), dtype=torch.uint8, device=x.device).view(fp8_dtype(x.device))
    if transposed:
        padded = ceil_div(rows, SCALE_PAD) * SCALE_PAD
        scales = torch.empty((tiles, padded), dtype=torch.float32, device=x.device)[:, :rows]
    else:
        scales = torch.empty((rows, tiles), dtype=torch.float32, device=x.device)
    quantise_groups(x, codes, scales, transposed)
    return codes, scales


def choose_tile(rows: int, out: int) -> Tile:
    """By shape alone; measured on an H200 (docs/results/kernels-h200.md)."""
    if rows <= 64:
        return Tile(64, 32 if out < 8192 else 64, warps=4, stages=6)
    if rows <= 512:
        return Tile(64, 128, warps=4, stages=4)
    return Tile(128, 128, warps=8, stages=4)


def fp8_product(codes: Tensor, scales: Tensor, weight: TritonWeight, tile: Tile, dtype: torch.dtype) -> Tensor:
    """codes [M, K], scales [K / 128, M] -> [M, out]."""
    rows, inner = codes.shape
    outer = weight.out_features
    assert weight.scale is not None
    out = torch.empty((rows, outer), dtype=dtype, device=codes.device)
    if rows:
        fp8_linear_kernel[(ceil_div(rows, tile.m) * ceil_div(outer, tile.n),)](
            codes, scales, weight.matrix, weight.scale, out, rows, outer, inner, scales.stride(0),
            weight.scale.stride(0) if weight.scale_rows == SCALE_TILE else weight.scale.shape[1],
            SCALE_ROWS=weight.scale_rows, EVEN_K=inner % SCALE_TILE == 0, BM=tile.m, BN=tile.n, G=GROUP_M,
            **tile.options,
        )  # fmt: skip
    return out


class TritonLinear:
    def __init__(self, context: KernelContext) -> None:
        self._deterministic = context.deterministic

    def prepare(self, *parts: Pair) -> TritonWeight:
        if parts[0][1] is not None:
            return stack_fp8(parts)
        return TritonWeight(torch.cat([dequantise_weight(*part).to(torch.bfloat16) for part in parts]), None, 0)

    def __call__(self, x: Tensor, weight: TritonWeight, dtype: torch.dtype = torch.float32) -> Tensor:
        if not weight.quantised:
            return self._float(x.unsqueeze(1), weight.matrix.unsqueeze(0)).squeeze(1)
        return self.product(*self.encode(x), weight, dtype)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What `product` takes of activations: codes [t, in] and scales [in / 128, t]."""
        return quantise(x)

    def product(self, codes: Tensor, scales: Tensor, weight: TritonWeight, dtype: torch.dtype) -> Tensor:
        """Quantised activations by an FP8 weight -> [t, out] in fp32 or bf16."""
        return fp8_product(codes, scales, weight, self._tile(codes, weight), dtype)

    def _tile(self, x: Tensor, weight: TritonWeight) -> Tile:
        if self._deterministic:
            return DETERMINISTIC_TILE.on(x.device)
        sizes = {"rows": x.shape[0], "out": weight.out_features, "inner": weight.in_features}
        return tuned.tile("linear", x.device, "e4m3", sizes, choose_tile(sizes["rows"], sizes["out"]))

    def per_head(self, x: Tensor, matrix: Tensor) -> Tensor:
        return self._float(x, matrix.transpose(1, 2))

    @staticmethod
    def _float(x: Tensor, weight: Tensor) -> Tensor:
        """x [t, H, a], weight [H, b, a] of any strides -> fp32 [t, H, b]."""
        rows, heads, inner = x.shape
        outer, tile = weight.shape[1], FLOAT_TILE.on(x.device)
        x = x if x.stride(2) == 1 else x.contiguous()
        out = torch.empty((rows, heads, outer), dtype=torch.float32, device=x.device)
        if rows:
            float_linear_kernel[(ceil_div(rows, tile.m) * ceil_div(outer, tile.n), heads)](
                x, weight, out, rows, outer, inner, x.stride(0), x.stride(1), *weight.stride(), *out.stride()[:2],
                BM=tile.m, BN=tile.n, BK=64, G=GROUP_M, **tile.options,
            )  # fmt: skip
        return out


def create(context: KernelContext) -> TritonLinear:
    return TritonLinear(context)
