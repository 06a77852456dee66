"""Index scores on FP8 tensor cores over the paged key planes, then an exact selection (`select.py`).

Roofline of t rows with Hi heads over n keys: 256 Hi t n FLOP at FP8 rate; 132 n bytes of keys for each sequence (once
for each 128 of its rows), 4 t n bytes of scores out. Scores are computed for as many rows at a time as fit a buffer
of bounded size.

A program holds a tile of keys of one sequence and walks over that sequence's query rows: many in prefill, the few of
a verification in decode; both are one form, and keys are read once for up to 128 rows. A score's sum runs over the
channels of one product and the heads of one row, so it depends on its row and key alone.
"""

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import tuned
from headrace.kernels.base import KernelContext, QueryRows
from headrace.kernels.formats import BLOCK_TOKENS, INDEX_DIM, RowFormat
from headrace.kernels.index_topk.select import GROUP, scratch_bytes, select
from headrace.kernels.launch import Tile, ceil_div, fp8_dtype, next_power_of_two
from headrace.kernels.numeric import fp8_gain, power_of_two_scale, to_e4m3
from headrace.kernels.plan import TilePlan, plan_tiles

SCRATCH_BYTES = 1 << 30
CHUNK_ROWS = 128
"""Query rows of one sequence that a program walks over"""
QUANTISE_LINES = 16


@triton.jit
def quantise_query_kernel(q_ptr, weights_ptr, codes_ptr, out_ptr, lines, heads, padded, L: tl.constexpr):
    """A power-of-two scale for each row and head, folded into the head's weight; heads are padded with zeros."""
    line = tl.program_id(0) * L + tl.arange(0, L)
    row = (line // padded).to(tl.int64)
    head = line % padded
    real = (line < lines) & (head < heads)
    dim = tl.arange(0, 128)
    source = (row * heads + head)[:, None] * 128 + dim[None, :]
    x = tl.load(q_ptr + source, mask=real[:, None], other=0.0)
    scale, inverse = power_of_two_scale(tl.max(tl.abs(x), 1))
    to = codes_ptr + line.to(tl.int64)[:, None] * 128 + dim[None, :]
    tl.store(to, to_e4m3(x * inverse[:, None], codes_ptr), mask=(line < lines)[:, None])
    weight = tl.load(weights_ptr + row * heads + head, mask=real, other=0.0) * scale
    tl.store(out_ptr + line, weight, mask=line < lines)


@triton.jit
def score_kernel(
    q_ptr, weights_ptr, codes_ptr, scales_ptr, table_ptr, last_row_ptr, members_ptr, chunk_seq_ptr, chunk_start_ptr,
    chunk_end_ptr, scores_ptr, maxima_ptr, sequences, table_blocks, first_row, k, width,
    HEADS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(1)
    seq = tl.load(chunk_seq_ptr + chunk)
    if seq >= sequences:
        return
    start = tl.load(chunk_start_ptr + chunk)
    end = tl.minimum(tl.load(chunk_end_ptr + chunk), start + CHUNK)
    place = start + tl.arange(0, CHUNK)
    member = tl.load(members_ptr + place, mask=place < end, other=0)
    furthest = tl.max(tl.load(last_row_ptr + member, mask=place < end, other=-1).to(tl.int32), 0)
    key0 = tl.program_id(0) * BN
    if key0 > furthest:
        return
    if furthest - first_row < k:
        return
    position = key0 + tl.arange(0, BN)
    slot = tl.load(table_ptr + seq.to(tl.int64) * table_blocks + position // 64, mask=position <= furthest, other=-1)
    there = slot >= 0
    slot = slot.to(tl.int64)
    dim = tl.arange(0, 128)
    where = codes_ptr + (slot * 8448 + (position % 64) * 128)[:, None] + dim[None, :]
    keys = tl.load(where, mask=there[:, None], other=0.0)
    key_scale = tl.load(scales_ptr + slot * 2112 + 2048 + position % 64, mask=there, other=0.0)
    key_scale = key_scale * (fp8_gain(codes_ptr) * fp8_gain(q_ptr))
    line = tl.arange(0, ROWS * HEADS)
    for first in range(start, end, ROWS):
        index = first + line // HEADS
        row = tl.load(members_ptr + index, mask=index < end, other=0).to(tl.int64)
        q = tl.load(q_ptr + (row * HEADS + line % HEADS)[:, None] * 128 + dim[None, :])
        weight = tl.load(weights_ptr + row * HEADS + line % HEADS)
        product = tl.dot(keys, tl.trans(q))
        product = tl.maximum(product, 0.0) * weight[None, :]
        score = tl.sum(tl.reshape(product, (BN, ROWS, HEADS)), 2) * key_scale[:, None]
        index = first + tl.arange(0, ROWS)
        row = tl.load(members_ptr + index, mask=index < end, other=0).to(tl.int64)
        last_row = tl.load(last_row_ptr + row, mask=index < end, other=-1).to(tl.int32)
        visible = (position[:, None] <= last_row[None, :]) & (position >= first_row)[:, None]
        score = tl.where(visible, score, float("-inf"))
        keep = (index < end)[None, :] & (position < width)[:, None]
        tl.store(scores_ptr + row[None, :] * width + position[:, None], score, mask=keep)
        largest = tl.max(tl.reshape(score, (BN // 16, 16, ROWS)), 1)
        group = key0 // 16 + tl.arange(0, BN // 16)
        keep = (index < end)[None, :] & (group * 16 < width)[:, None]
        tl.store(maxima_ptr + row[None, :] * (width // 16) + group[:, None], largest, mask=keep)


@dataclasses.dataclass(slots=True)
class Pass:
    """Query rows whose scores are computed together."""

    rows: slice
    plan: TilePlan


def plan_passes(rows: QueryRows, width: int, scratch: int) -> list[Pass]:
    """Cached in `rows.plan`: the layers of a step share it."""
    if rows.plan is None:
        count = rows.seq.shape[0]
        step = min(max(scratch // scratch_bytes(width), 1), count)
        parts = [slice(start, min(start + step, count)) for start in range(0, count, step)]
        rows.plan = [Pass(part, plan_tiles(rows.seq[part], rows.block_tables.shape[0], CHUNK_ROWS)) for part in parts]
    passes: list[Pass] = rows.plan
    return passes


def choose_tile(heads: int, rows: int, sequences: int, deterministic: bool) -> Tile:
    """Query rows (m) by keys (n) of one product. Few rows a sequence: fewer at a time, so that few are padding."""
    wanted = 128 if deterministic or rows > 8 * sequences else 64
    return Tile(max(wanted // heads, 1), 128, warps=4, stages=3)


class TritonIndexTopk:
    def __init__(self, context: KernelContext, scratch: int = SCRATCH_BYTES) -> None:
        self._deterministic, self._scratch = context.deterministic, scratch

    def __call__(
        self,
        q: Tensor,
        weights: Tensor,
        rows: QueryRows,
        plane: Tensor,
        fmt: RowFormat,
        k: int,
        tile: Tile | None = None,
    ) -> Tensor:
        count = q.shape[0]
        selection = torch.empty((count, k), dtype=torch.int32, device=q.device)
        if not count:
            return selection
        sequences, blocks = rows.block_tables.shape
        width = blocks * BLOCK_TOKENS
        codes, scaled = quantise_query(q, weights)
        tile = tile or self._tile(codes.shape[1], count, sequences, q.device)
        for part in plan_passes(rows, width, self._scratch):
            last_row = rows.last_row[part.rows]
            scores = torch.empty((last_row.shape[0], width), dtype=torch.float32, device=q.device)
            maxima = torch.empty((last_row.shape[0], width // GROUP), dtype=torch.float32, device=q.device)
            self._score((codes[part.rows], scaled[part.rows]), rows, part, plane, (scores, maxima), k, tile)
            select(scores, maxima, last_row, rows.first_row, k, selection[part.rows])
        return selection

    def _tile(self, heads: int, count: int, sequences: int, device: torch.device) -> Tile:
        if self._deterministic:
            return choose_tile(heads, count, sequences, True).on(device)
        sizes = {"heads": heads, "rows_each": max(count // sequences, 1)}
        return tuned.tile("index_topk", device, "e4m3", sizes, choose_tile(heads, count, sequences, False))

    @staticmethod
    def _score(
        query: tuple[Tensor, Tensor], rows: QueryRows, part: Pass, plane: Tensor, out: tuple[Tensor, Tensor], k: int,
        tile: Tile,
    ) -> None:  # fmt: skip
        (codes, weights), (scores, maxima), plan = query, out, part.plan
        width = scores.shape[1]
        score_kernel[(ceil_div(width, tile.n), plan.group.shape[0])](
            codes, weights, plane.view(codes.dtype), plane.view(torch.float32), rows.block_tables.contiguous(),
            rows.last_row[part.rows], plan.members, plan.group, plan.start, plan.end, scores, maxima,
            *rows.block_tables.shape, rows.first_row, k, width,
            HEADS=codes.shape[1], ROWS=tile.m, CHUNK=CHUNK_ROWS, BN=tile.n, **tile.options,
        )  # fmt: skip


def quantise_query(q: Tensor, weights: Tensor, padded: int = 0) -> tuple[Tensor, Tensor]:
    """fp32 [t, Hi, 128] and [t, Hi] -> (codes e4m3 [t, P, 128], weights times scale fp32 [t, P]); P: `padded`, or Hi
    padded to a power of two; the rest zero."""
    rows, heads, _ = q.shape
    padded = padded or next_power_of_two(heads)
    codes = torch.empty((rows, padded, INDEX_DIM), dtype=torch.uint8, device=q.device).view(fp8_dtype(q.device))
    scaled = torch.empty((rows, padded), dtype=torch.float32, device=q.device)
    if rows:
        lines = rows * padded
        quantise_query_kernel[(ceil_div(lines, QUANTISE_LINES),)](
            q.contiguous(), weights.contiguous(), codes, scaled, lines, heads, padded, L=QUANTISE_LINES
        )
    return codes, scaled


def create(context: KernelContext) -> TritonIndexTopk:
    return TritonIndexTopk(context)
