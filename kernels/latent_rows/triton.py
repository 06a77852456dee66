"""Latent rows in one launch: (RMSNorm, RoPE,) quantise, and write to rows of bytes or straight into the cache.

Roofline: 2,304 bytes in (576 fp32) and 656 or 576 out a row, no arithmetic to speak of: bound by bandwidth.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.base import KernelContext
from headrace.kernels.formats import LATENT_DIM, ROPE_DIM, RowFormat
from headrace.kernels.latent_rows.reference import ReferenceLatentRows
from headrace.kernels.launch import ceil_div, fp8_dtype, next_power_of_two
from headrace.kernels.numeric import power_of_two_scale, to_e4m3

ROWS = 4
"""Rows of one program"""


@triton.jit
def latent_kernel(
    latent_ptr, rope_ptr, weight_ptr, cos_ptr, sin_ptr, cache_rows_ptr, codes_ptr, scales_ptr, halves_ptr,
    rows, latent_stride, rope_stride, eps,
    FROM_PROJECTION: tl.constexpr, SCATTER: tl.constexpr, TILED: tl.constexpr, ROW_BYTES: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * R + tl.arange(0, R)
    inside = row < rows
    to = row.to(tl.int64)
    if SCATTER:
        to = tl.load(cache_rows_ptr + row, mask=inside, other=-1).to(tl.int64)
    keep = inside & (to >= 0)
    place = (tl.arange(0, 4) * 128)[None, :, None] + tl.arange(0, 128)[None, None, :]
    x = tl.load(
        latent_ptr + row.to(tl.int64)[:, None, None] * latent_stride + place, mask=inside[:, None, None], other=0.0
    )
    pair = tl.arange(0, 32)
    both = tl.arange(0, 64)[None, :]
    source = rope_ptr + row.to(tl.int64)[:, None] * rope_stride + both
    a, b = tl.split(tl.reshape(tl.load(source, mask=inside[:, None], other=0.0), (R, 32, 2)))
    if FROM_PROJECTION:
        mean = tl.sum(tl.sum(x * x, 2), 1) / 512
        x = x * tl.rsqrt(mean + eps)[:, None, None] * tl.load(weight_ptr + place)
        angle = row.to(tl.int64)[:, None] * 32 + pair[None, :]
        cos = tl.load(cos_ptr + angle, mask=inside[:, None], other=0.0)
        sin = tl.load(sin_ptr + angle, mask=inside[:, None], other=0.0)
        turned = a * cos - b * sin
        b = b * cos + a * sin
        a = turned
    turned_pairs = tl.reshape(tl.join(a, b), (R, 64))
    if TILED:
        scale, inverse = power_of_two_scale(tl.max(tl.abs(x), 2))
        x = x * inverse[:, :, None]
        where = scales_ptr + to[:, None] * (ROW_BYTES // 4) + 128 + tl.arange(0, 4)[None, :]
        tl.store(where, scale, mask=keep[:, None])
        half = halves_ptr + to[:, None] * (ROW_BYTES // 2) + 264 + both
        tl.store(half, turned_pairs.to(tl.bfloat16), mask=keep[:, None])
    else:
        tail = codes_ptr + to[:, None] * ROW_BYTES + 512 + both
        tl.store(tail, to_e4m3(turned_pairs, codes_ptr), mask=keep[:, None])
    tl.store(codes_ptr + to[:, None, None] * ROW_BYTES + place, to_e4m3(x, codes_ptr), mask=keep[:, None, None])


@triton.jit
def scatter_kernel(
    source_ptr, rows_ptr, target_ptr, rows, source_stride, WORDS: tl.constexpr, W: tl.constexpr, R: tl.constexpr
):
    """Copy rows of WORDS 4-byte words to the rows of `target` that `rows` names."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    to = tl.load(rows_ptr + row, mask=row < rows, other=-1).to(tl.int64)
    word = tl.arange(0, W)
    keep = (to >= 0)[:, None] & (word < WORDS)[None, :]
    value = tl.load(source_ptr + row.to(tl.int64)[:, None] * source_stride + word[None, :], mask=keep, other=0)
    tl.store(target_ptr + to[:, None] * WORDS + word[None, :], value, mask=keep)


class TritonLatentRows(ReferenceLatentRows):
    """Gathering is the reference's: no step of a model does it."""

    def quantise(self, latent: Tensor, rope: Tensor, fmt: RowFormat) -> Tensor:
        return self._rows(latent, rope, None, fmt)

    def from_projection(
        self, kv: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, fmt: RowFormat
    ) -> Tensor:
        """fp32 [t, 576] as the projection leaves it -> row bytes: RMSNorm of the latent part, interleaved RoPE of the
        rest, quantised, in one launch."""
        return self._rows(kv[:, :LATENT_DIM], kv[:, LATENT_DIM:], (weight, eps, cos, sin), fmt)

    def write_projection(
        self, plane: Tensor, cache_rows: Tensor, kv: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor,
        fmt: RowFormat,
    ) -> None:  # fmt: skip
        """`from_projection` and `write` in one launch."""
        parts = (kv[:, :LATENT_DIM], kv[:, LATENT_DIM:])
        self._launch(*parts, (weight, eps, cos, sin), plane.view(-1, plane.shape[-1]), cache_rows, fmt)

    def write(self, plane: Tensor, cache_rows: Tensor, row_bytes: Tensor) -> None:
        rows, width = row_bytes.shape
        if rows:
            words = width // 4
            source = row_bytes.view(torch.int32)
            scatter_kernel[(ceil_div(rows, ROWS),)](
                source, cache_rows, plane.view(torch.int32), rows, source.stride(0),
                WORDS=words, W=next_power_of_two(words), R=ROWS,
            )  # fmt: skip

    def _rows(
        self, latent: Tensor, rope: Tensor, projection: tuple[Tensor, float, Tensor, Tensor] | None, fmt: RowFormat
    ) -> Tensor:
        out = torch.empty((latent.shape[0], fmt.latent_row_bytes), dtype=torch.uint8, device=latent.device)
        self._launch(latent, rope, projection, out, None, fmt)
        return out

    def _launch(
        self,
        latent: Tensor,
        rope: Tensor,
        projection: tuple[Tensor, float, Tensor, Tensor] | None,
        out: Tensor,
        cache_rows: Tensor | None,
        fmt: RowFormat,
    ) -> None:
        rows = latent.shape[0]
        if not rows:
            return
        assert (latent.shape[1], rope.shape[1]) == (LATENT_DIM, ROPE_DIM)
        weight, eps, cos, sin = projection or (latent, 0.0, latent, latent)
        codes = out.view(fp8_dtype(out.device))
        latent_kernel[(ceil_div(rows, ROWS),)](
            latent, rope, weight, cos, sin, codes if cache_rows is None else cache_rows, codes,
            out.view(torch.float32) if fmt.tiled else codes, out.view(torch.bfloat16) if fmt.tiled else codes,
            rows, latent.stride(0), rope.stride(0), eps,
            FROM_PROJECTION=projection is not None, SCATTER=cache_rows is not None, TILED=fmt.tiled,
            ROW_BYTES=fmt.latent_row_bytes, R=ROWS,
        )  # fmt: skip


def create(context: KernelContext) -> TritonLatentRows:
    return TritonLatentRows()
