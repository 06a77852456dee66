"""Cases of the indexer: scores fused with the exact selection, and the selection alone."""

from typing import Any

import torch

from headrace.kernels.bench import inputs
from headrace.kernels.bench.case import Case, Work
from headrace.kernels.bench.measure import Call
from headrace.kernels.formats import BLOCK_TOKENS, FORMATS, INDEX_DIM

HEADS = 32


def index_topk(sequences: int, rows_each: int, context: int, k: int, heads: int = HEADS, goal_us: float = 0.0) -> Case:
    """Query quantisation, scores and selection. The floor is that of the scores with their keys read once and nothing
    but the selection written."""
    fmt, rows = FORMATS["tile656"], sequences * rows_each

    def build(kernel: Any, device: torch.device, seed: int) -> Call:
        query = inputs.query_rows(sequences, rows_each, context, device, seed)
        pool = inputs.index_pool(sequences * -(-context // BLOCK_TOKENS), fmt, device, seed)
        source = inputs.generator(device, seed + 1)
        q = torch.randn((rows, heads, INDEX_DIM), device=device, generator=source)
        weights = torch.randn((rows, heads), device=device, generator=source)
        return lambda: kernel(q, weights, query, pool, fmt, k)

    moved = sequences * context * (INDEX_DIM + 4) + 4 * rows * (heads * (INDEX_DIM + 1) + k)
    visible = rows * (context - (rows_each - 1) / 2)
    work = Work(fp8_flop=2.0 * visible * heads * INDEX_DIM, bytes=moved)
    return Case(
        "index_topk", f"{sequences}x{rows_each} rows, {heads} heads, {context >> 10}K, k {k}", build, work, goal_us,
        sets=2, shape={"index_heads": heads},
    )  # fmt: skip


def select_alone(rows: int, context: int, k: int, goal_us: float = 0.0) -> Case:
    """The selection from scores and group maxima that are already there."""

    def build(kernel: Any, device: torch.device, seed: int) -> Call:
        from headrace.kernels.index_topk import select as portable

        select = getattr(kernel, "select", portable.select)
        scores = torch.randn((rows, context), device=device, generator=inputs.generator(device, seed))
        maxima = scores.view(rows, -1, portable.GROUP).amax(-1)
        last = torch.full((rows,), context - 1, device=device)
        out = torch.empty((rows, k), dtype=torch.int32, device=device)
        return lambda: select(scores, maxima, last, 0, k, out)

    return Case(
        "index_topk", f"selection alone, {rows} rows of {context >> 10}K, k {k}", build,
        Work(bytes=4.0 * rows * (context + k)), goal_us, sets=2,
    )  # fmt: skip


def cases() -> list[Case]:
    long, k = 131_072, 2048
    return [
        index_topk(1, 4096, long, k, goal_us=4000),
        index_topk(128, 5, long, k, goal_us=980),
        index_topk(128, 1, long, k),
        index_topk(32, 5, long, k),
        select_alone(4096, long, k),
        select_alone(640, long, k, goal_us=180),
    ]
