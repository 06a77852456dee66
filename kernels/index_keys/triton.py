"""Index keys in one launch: (LayerNorm, RoPE of the first 64 dims,) quantise, and write to rows of bytes or straight
into the planes of the cache.

Roofline: 512 bytes in and 132 out a key: bound by bandwidth, or by the launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.base import KernelContext
from headrace.kernels.formats import INDEX_DIM, RowFormat
from headrace.kernels.index_keys.reference import ReferenceIndexKeys
from headrace.kernels.launch import ceil_div, fp8_dtype
from headrace.kernels.numeric import power_of_two_scale, to_e4m3

ROWS = 16
ROW_BYTES = INDEX_DIM + 4
Projection = tuple[Tensor, Tensor, float, Tensor, Tensor, bool]


@triton.jit
def pairs(x, R: tl.constexpr):
    """[R, 64] -> even and odd dims [R, 32]"""
    return tl.split(tl.reshape(x, (R, 32, 2)))


@triton.jit
def index_key_kernel(
    keys_ptr, weight_ptr, bias_ptr, cos_ptr, sin_ptr, cache_rows_ptr, codes_ptr, scales_ptr, rows, key_stride, eps,
    FROM_PROJECTION: tl.constexpr, INTERLEAVED: tl.constexpr, SCATTER: tl.constexpr, TILED: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * R + tl.arange(0, R)
    inside = (row < rows)[:, None]
    pair = tl.arange(0, 32)
    rest = 64 + tl.arange(0, 64)
    first = pair
    second = 32 + pair
    source = keys_ptr + row.to(tl.int64)[:, None] * key_stride
    both = tl.arange(0, 64)
    if INTERLEAVED:
        # Whole lines: addresses in steps of two would not be joined into wide accesses.
        a, b = pairs(tl.load(source + both[None, :], mask=inside, other=0.0), R)
    else:
        a = tl.load(source + first[None, :], mask=inside, other=0.0)
        b = tl.load(source + second[None, :], mask=inside, other=0.0)
    c = tl.load(source + rest[None, :], mask=inside, other=0.0)
    if FROM_PROJECTION:
        mean = (tl.sum(a, 1) + tl.sum(b, 1) + tl.sum(c, 1)) / 128
        a -= mean[:, None]
        b -= mean[:, None]
        c -= mean[:, None]
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1) + tl.sum(c * c, 1)) / 128 + eps)[:, None]
        if INTERLEAVED:
            weight_a, weight_b = pairs(tl.load(weight_ptr + both)[None, :], 1)
            bias_a, bias_b = pairs(tl.load(bias_ptr + both)[None, :], 1)
        else:
            weight_a = tl.load(weight_ptr + first)[None, :]
            weight_b = tl.load(weight_ptr + second)[None, :]
            bias_a = tl.load(bias_ptr + first)[None, :]
            bias_b = tl.load(bias_ptr + second)[None, :]
        a = a * scale * weight_a + bias_a
        b = b * scale * weight_b + bias_b
        c = c * scale * tl.load(weight_ptr + rest)[None, :] + tl.load(bias_ptr + rest)[None, :]
        angle = row.to(tl.int64)[:, None] * 32 + pair[None, :]
        cos = tl.load(cos_ptr + angle, mask=inside, other=0.0)
        sin = tl.load(sin_ptr + angle, mask=inside, other=0.0)
        turned = a * cos - b * sin
        b = b * cos + a * sin
        a = turned
    scale = tl.full((R,), 1.0, tl.float32)
    if TILED:
        amax = tl.maximum(tl.maximum(tl.max(tl.abs(a), 1), tl.max(tl.abs(b), 1)), tl.max(tl.abs(c), 1))
        scale, inverse = power_of_two_scale(amax)
        a = a * inverse[:, None]
        b = b * inverse[:, None]
        c = c * inverse[:, None]
    if SCATTER:
        cache_row = tl.load(cache_rows_ptr + row, mask=row < rows, other=-1).to(tl.int64)
        keep = cache_row >= 0
        slot = cache_row // 64
        to = codes_ptr + slot * 8448 + (cache_row % 64) * 128
        scale_to = scales_ptr + slot * 2112 + 2048 + cache_row % 64
    else:
        keep = row < rows
        to = codes_ptr + row.to(tl.int64) * 132
        scale_to = scales_ptr + row.to(tl.int64) * 33 + 32
    if INTERLEAVED:
        turned = tl.reshape(tl.join(a, b), (R, 64))
        tl.store(to[:, None] + both[None, :], to_e4m3(turned, codes_ptr), mask=keep[:, None])
    else:
        tl.store(to[:, None] + first[None, :], to_e4m3(a, codes_ptr), mask=keep[:, None])
        tl.store(to[:, None] + second[None, :], to_e4m3(b, codes_ptr), mask=keep[:, None])
    tl.store(to[:, None] + rest[None, :], to_e4m3(c, codes_ptr), mask=keep[:, None])
    tl.store(scale_to, scale, mask=keep)


@triton.jit
def index_scatter_kernel(source_ptr, cache_rows_ptr, plane_ptr, rows, source_stride, R: tl.constexpr):
    """Rows of 33 words (32 of key, 1 of scale) into planes of 64 keys, then 64 scales."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    cache_row = tl.load(cache_rows_ptr + row, mask=row < rows, other=-1).to(tl.int64)
    keep = cache_row >= 0
    source = source_ptr + row.to(tl.int64) * source_stride
    word = tl.arange(0, 32)
    plane = plane_ptr + (cache_row // 64) * 2112
    line = cache_row % 64
    key = tl.load(source[:, None] + word[None, :], mask=keep[:, None], other=0)
    tl.store(plane[:, None] + line[:, None] * 32 + word[None, :], key, mask=keep[:, None])
    tl.store(plane + 2048 + line, tl.load(source + 32, mask=keep, other=0), mask=keep)


class TritonIndexKeys(ReferenceIndexKeys):
    """Gathering is the reference's: no step of a model does it."""

    def quantise(self, keys: Tensor, fmt: RowFormat) -> Tensor:
        return self._rows(keys, None, fmt)

    def from_projection(
        self, keys: Tensor, weight: Tensor, bias: Tensor, eps: float, cos: Tensor, sin: Tensor, interleaved: bool,
        fmt: RowFormat,
    ) -> Tensor:  # fmt: skip
        """fp32 [t, 128] as the projection leaves it -> row bytes: LayerNorm, RoPE of the first 64 dims, quantised, in
        one launch."""
        return self._rows(keys, (weight, bias, eps, cos, sin, interleaved), fmt)

    def write_projection(
        self, plane: Tensor, cache_rows: Tensor, keys: Tensor, weight: Tensor, bias: Tensor, eps: float, cos: Tensor,
        sin: Tensor, interleaved: bool, fmt: RowFormat,
    ) -> None:  # fmt: skip
        """`from_projection` and `write` in one launch."""
        self._launch(keys, (weight, bias, eps, cos, sin, interleaved), plane, cache_rows, fmt)

    def write(self, plane: Tensor, cache_rows: Tensor, row_bytes: Tensor, fmt: RowFormat) -> None:
        rows = row_bytes.shape[0]
        if rows:
            source = row_bytes.view(torch.int32)
            index_scatter_kernel[(ceil_div(rows, ROWS),)](
                source, cache_rows, plane.view(torch.int32), rows, source.stride(0), R=ROWS
            )

    def _rows(self, keys: Tensor, projection: Projection | None, fmt: RowFormat) -> Tensor:
        out = torch.empty((keys.shape[0], ROW_BYTES), dtype=torch.uint8, device=keys.device)
        self._launch(keys, projection, out, None, fmt)
        return out

    def _launch(
        self, keys: Tensor, projection: Projection | None, out: Tensor, cache_rows: Tensor | None, fmt: RowFormat
    ) -> None:
        rows = keys.shape[0]
        if not rows:
            return
        weight, bias, eps, cos, sin, interleaved = projection or (keys, keys, 0.0, keys, keys, True)
        codes = out.view(fp8_dtype(out.device))
        index_key_kernel[(ceil_div(rows, ROWS),)](
            keys, weight, bias, cos, sin, codes if cache_rows is None else cache_rows, codes, out.view(torch.float32),
            rows, keys.stride(0), eps,
            FROM_PROJECTION=projection is not None, INTERLEAVED=interleaved, SCATTER=cache_rows is not None,
            TILED=fmt.tiled, R=ROWS,
        )  # fmt: skip


def create(context: KernelContext) -> TritonIndexKeys:
    return TritonIndexKeys()
