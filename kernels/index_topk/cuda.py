"""Index scores and exact top-k in CUDA C++ for Hopper (`scores.cu`, `select.cu`).

Roofline of t rows with Hi heads over n keys: 256 Hi t n FLOP at FP8 rate (heads are padded to 32); 132 n bytes of keys
for each sequence, once for each 8 of its rows (decode: each 5). Scores go to a buffer of bounded size, 4.25 bytes a
score, of which the selection reads the maxima and the groups that can matter.
"""

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from headrace.errors import KernelUnsupported
from headrace.kernels.base import KernelContext, QueryRows
from headrace.kernels.cuda.driver import byte_rows_map, load
from headrace.kernels.formats import BLOCK_TOKENS, INDEX_DIM, RowFormat
from headrace.kernels.index_topk import select as portable
from headrace.kernels.index_topk.triton import SCRATCH_BYTES, quantise_query
from headrace.kernels.launch import ceil_div, next_power_of_two
from headrace.kernels.plan import TilePlan, plan_tiles

FOLDER = Path(__file__).parent
HEADS = 32
STAGES, STAGE_BYTES = 8, 64 * (128 + 4)
SELECT_SHARED = 73_872
LARGEST_WIDTH = 1 << 20
"""Scores of one row that the selection can number"""
WAVES = 12
MULTIPROCESSORS = 132


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """One way to divide scores among warpgroups (`scores.cu`)."""

    kernel: str
    rows: int
    """Query rows of one sequence that a block holds"""
    threads: int

    @property
    def shared_bytes(self) -> int:
        return self.rows * HEADS * INDEX_DIM + STAGES * (STAGE_BYTES + 16) + 1024


WIDE, FEW = Form("score_wide", 8, 384), Form("score_few", 5, 384)


class CudaIndexTopk:
    def __init__(self, context: KernelContext, scratch: int = SCRATCH_BYTES) -> None:
        device = context.device.index or 0
        self._scratch = scratch
        self._scores = {
            form: load(FOLDER / "scores.cu", form.kernel, form.shared_bytes, device) for form in (WIDE, FEW)
        }
        self._select = load(FOLDER / "select.cu", "select_rows", SELECT_SHARED, device)

    def __call__(self, q: Tensor, weights: Tensor, rows: QueryRows, plane: Tensor, fmt: RowFormat, k: int) -> Tensor:
        count, heads, _ = q.shape
        if heads > HEADS:
            raise KernelUnsupported(f"index_topk: cuda holds {HEADS} index heads a row, the query has {heads}")
        selection = torch.empty((count, k), dtype=torch.int32, device=q.device)
        if not count:
            return selection
        width = rows.block_tables.shape[1] * BLOCK_TOKENS
        codes, scaled = quantise_query(q, weights, HEADS)
        for part, plan in self._passes(rows, width):
            last_row = rows.last_row[part]
            scores = torch.empty((last_row.shape[0], width), dtype=torch.float32, device=q.device)
            maxima = torch.empty((last_row.shape[0], width // portable.GROUP), dtype=torch.float32, device=q.device)
            self._score((codes[part], scaled[part]), rows, last_row, plan, plane, (scores, maxima), k)
            self.select(scores, maxima, last_row, rows.first_row, k, selection[part])
        return selection

    def select(
        self, scores: Tensor, maxima: Tensor, last_row: Tensor, first_row: int, k: int, out: Tensor
    ) -> None:  # fmt: skip
        """As `select.select`, in one launch."""
        rows, width = scores.shape
        if width > LARGEST_WIDTH:
            portable.select(scores, maxima, last_row, first_row, k, out)
        elif rows:
            self._select.launch((rows, 1, 1), 512, scores, maxima, last_row, out, first_row, k, width)

    def _passes(self, rows: QueryRows, width: int) -> list[tuple[slice, TilePlan]]:
        """Cached in `rows.plan`: the layers of a step share it."""
        if rows.plan is None:
            count, sequences = rows.seq.shape[0], rows.block_tables.shape[0]
            step = min(max(self._scratch // (width * 4 + width // 4), 1), count)
            parts = [slice(start, min(start + step, count)) for start in range(0, count, step)]
            form = form_of(rows)
            rows.plan = [(part, plan_tiles(rows.seq[part], sequences, form.rows)) for part in parts]
        passes: list[tuple[slice, TilePlan]] = rows.plan
        return passes

    def _score(
        self, query: tuple[Tensor, Tensor], rows: QueryRows, last_row: Tensor, plan: TilePlan, plane: Tensor,
        out: tuple[Tensor, Tensor], k: int,
    ) -> None:  # fmt: skip
        (codes, weights), (scores, maxima) = query, out
        sequences, blocks = rows.block_tables.shape
        tiles = plan.group.shape[0]
        chunk = chunk_blocks(tiles, blocks)
        keys = byte_rows_map(plane.data_ptr(), plane.numel() // 128, BLOCK_TOKENS)
        form = form_of(rows)
        self._scores[form].launch(
            (tiles, ceil_div(blocks, chunk), 1), form.threads, keys, plane, codes, weights,
            rows.block_tables.contiguous(), last_row, plan.members, plan.group, plan.start, plan.end, scores, maxima,
            sequences, blocks, rows.first_row, k, scores.shape[1], chunk,
        )  # fmt: skip


def form_of(rows: QueryRows) -> Form:
    """By whether there are more query rows a sequence than a verification has."""
    return WIDE if rows.seq.shape[0] > FEW.rows * rows.block_tables.shape[0] else FEW


def chunk_blocks(tiles: int, blocks: int) -> int:
    """Blocks of keys that one block of threads walks over: enough of them to even out the last wave, and not so few
    that starting costs much."""
    wanted = ceil_div(tiles * blocks, WAVES * MULTIPROCESSORS)
    return min(max(next_power_of_two(wanted), 16), 512)


def create(context: KernelContext) -> CudaIndexTopk:
    return CudaIndexTopk(context)
