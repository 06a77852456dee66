"""Sparse MLA in CUDA C++ for Hopper (`rows.cu`): gather, dequantise, scores and values overlap in one block of threads.

Roofline as in `triton.py`: 2 t H K (576 + 512) FLOP at bf16 rate, 656 (or 576) bytes for each different cache row.
Heads are worked on 64 at a time; what a row lacks of that is padding.
"""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from headrace.kernels.base import KernelContext, QueryRows
from headrace.kernels.cuda.driver import load
from headrace.kernels.formats import LATENT_DIM, RowFormat
from headrace.kernels.launch import ceil_div, next_power_of_two
from headrace.kernels.sparse_mla.triton import merge_kernel

SOURCE = Path(__file__).parent / "rows.cu"
SHARED, THREADS = 230_784, 512
HEADS, KEYS = 64, 64
MULTIPROCESSORS = 132
MAX_SPLITS = 16
START_TILES = 4
"""What starting and ending a block costs, in tiles"""


class CudaSparseMla:
    def __init__(self, context: KernelContext) -> None:
        device = context.device.index or 0
        self._deterministic = context.deterministic
        self._kernels = {
            tiled: load(SOURCE, name, SHARED, device)
            for tiled, name in ((True, "attend_tile656"), (False, "attend_plain576"))
        }

    def __call__(
        self,
        q: Tensor,
        plane: Tensor,
        selection: Tensor,
        rows: QueryRows,
        fmt: RowFormat,
        scale: float,
        splits: int = 0,
    ) -> Tensor:
        """`splits` forces into how many parts a selection is cut. In deterministic mode it is never cut."""
        count, heads, _ = q.shape
        out = torch.empty((count, heads, LATENT_DIM), dtype=torch.float32, device=q.device)
        if not count:
            return out
        k, blocks = selection.shape[1], ceil_div(heads, HEADS)
        tiles = ceil_div(k, KEYS)
        if not splits:
            splits = 1 if self._deterministic else choose_splits(count * blocks, tiles)
        parts, lse = out, out
        if splits > 1:
            parts = torch.empty((count, splits, heads, LATENT_DIM), dtype=torch.float32, device=q.device)
            lse = torch.empty((count, splits, heads), dtype=torch.float32, device=q.device)
        if q.stride(2) != 1 or q.stride(0) % 4 or q.stride(1) % 4 or q.data_ptr() % 16:
            q = q.contiguous()
        self._kernels[fmt.tiled].launch(
            (count * blocks, splits, 1), THREADS, q, plane, selection.contiguous(), rows.seq,
            rows.block_tables.contiguous(), parts, lse, heads, rows.block_tables.shape[1],
            ctypes.c_longlong(q.stride(0)), ctypes.c_longlong(q.stride(1)), scale * 1.4426950408889634, k,
            ceil_div(tiles, splits) * KEYS, splits, blocks,
        )  # fmt: skip
        if splits > 1:
            merge_kernel[(count, heads)](parts, lse, out, heads, SPLITS=splits, SP=next_power_of_two(splits))
        return out


def choose_splits(blocks: int, tiles: int) -> int:
    """Into how many parts each selection is cut so that the last wave of blocks ends first."""

    def cost(splits: int) -> int:
        return ceil_div(blocks * splits, MULTIPROCESSORS) * (ceil_div(tiles, splits) + START_TILES)

    return min(range(1, max(1, min(MAX_SPLITS, tiles // 2)) + 1), key=cost)


def create(context: KernelContext) -> CudaSparseMla:
    return CudaSparseMla(context)
