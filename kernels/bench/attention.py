"""Cases of sparse MLA: prefill rows of one sequence, and verification rows of many."""

from typing import Any

import torch

from headrace.kernels.bench import inputs
from headrace.kernels.bench.case import Case, Work
from headrace.kernels.bench.measure import Call
from headrace.kernels.formats import BLOCK_TOKENS, FORMATS, LATENT_DIM, ROPE_DIM

WIDTH = LATENT_DIM + ROPE_DIM


def sparse_mla(
    sequences: int, rows_each: int, context: int, heads: int, k: int, drifting: bool, fmt_name: str = "tile656",
    goal_us: float = 0.0, goal_ratio: float = 0.0,
) -> Case:  # fmt: skip
    """q and output are fp32, as the op's interface has them."""
    fmt, rows = FORMATS[fmt_name], sequences * rows_each

    def build(kernel: Any, device: torch.device, seed: int) -> Call:
        query = inputs.query_rows(sequences, rows_each, context, device, seed)
        pool = inputs.latent_pool(sequences * -(-context // BLOCK_TOKENS), fmt, device, seed)
        if drifting:
            chosen = inputs.drifting_selection(sequences, rows_each, context, k, device, seed)
        else:
            chosen = inputs.uniform_selection(rows, context, k, device, seed)
        q = torch.randn((rows, heads, WIDTH), device=device, generator=inputs.generator(device, seed + 1))
        return lambda: kernel(q, pool, chosen, query, fmt, 1 / 16)

    kept = 0.2 * (rows_each - 1) + 1 if drifting else rows_each
    touched = sequences * min(context, k * kept)
    moved = touched * fmt.latent_row_bytes + 4 * rows * (k + heads * (WIDTH + LATENT_DIM))
    flop = 2.0 * rows * heads * k * (WIDTH + LATENT_DIM)
    name = f"{sequences}x{rows_each} rows, {heads} heads, k {k}, {context >> 10}K, {fmt_name}, "
    name += "80 % shared" if drifting else "uniform"
    return Case("sparse_mla", name, build, Work(bf16_flop=flop, bytes=moved), goal_us, goal_ratio, sets=2,
                shape={"heads": heads})  # fmt: skip


def cases() -> list[Case]:
    long = 131_072
    return [
        sparse_mla(1, 4096, long, 64, 2048, drifting=True, goal_ratio=0.8),
        sparse_mla(1, 4096, long, 64, 2048, drifting=False, goal_ratio=0.8),
        sparse_mla(1, 4096, long, 64, 2048, drifting=True, fmt_name="plain576", goal_ratio=0.8),
        sparse_mla(1, 4096, long, 16, 2048, drifting=True),
        sparse_mla(1, 4096, long, 128, 2048, drifting=True),
        sparse_mla(128, 5, long, 64, 2048, drifting=True, goal_us=400),
        sparse_mla(128, 5, long, 64, 2048, drifting=False, goal_us=400),
        sparse_mla(128, 1, long, 64, 2048, drifting=False),
        sparse_mla(16, 5, long, 64, 2048, drifting=True),
        sparse_mla(16, 1, long, 64, 2048, drifting=False),
        sparse_mla(1, 5, long, 64, 2048, drifting=True),
    ]
