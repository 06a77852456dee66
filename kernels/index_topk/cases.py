"""Problems of the indexer's selection: verification rows of many sequences, and a chunk of a long prefill."""

import functools
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.cases import Case, Tolerance, format_named, query_rows
from headrace.kernels.index_keys.reference import ReferenceIndexKeys

MATRIX = {"score_kernel": ("fp8",)}
ROW_DIFFERS = Tolerance(0.0, 0.0, 0.0, outliers=2e-3)
"""Share of the visible keys whose membership differs: sums in another order may swap nearly equal scores."""


def select(
    kernel: Any, device: torch.device, lengths: list[int], rows_each: int, heads: int, k: int, name: str
) -> tuple[Tensor, ...]:
    """Membership of every cache row in each row's selection, and the selection's form."""
    fmt = format_named(name)
    rows, slots = query_rows(lengths, rows_each, device)
    count, width = rows.seq.shape[0], rows.block_tables.shape[1] * 64
    q = torch.randn(count, heads, 128, device=device)
    weights = torch.randn(count, heads, device=device)
    if device.type == "meta":
        plane = torch.empty((slots, fmt.index_plane_bytes), dtype=torch.uint8, device=device)
        return (kernel(q, weights, rows, plane, fmt, k),)
    plane = torch.zeros((slots, fmt.index_plane_bytes), dtype=torch.uint8, device=device)
    keys = ReferenceIndexKeys()
    every = torch.arange(slots * 64, device=device)
    keys.write(plane, every, keys.quantise(torch.randn(slots * 64, 128, device=device), fmt), fmt)
    selection = kernel(q, weights, rows, plane, fmt, k).long()
    member = torch.zeros((count, width + 1), device=device).scatter_(1, selection.where(selection >= 0, width), 1.0)
    ordered = torch.where(selection < 0, width, selection)
    return member[:, :width], (ordered.diff(dim=1) >= 0).float()


CASES = tuple(
    Case("index_topk", what, functools.partial(select, lengths=lengths, rows_each=each, heads=heads, k=k, name=name),
         row_format=name, shape={"index_topk": k, "index_heads": heads}, tiny=tiny, tolerance=ROW_DIFFERS,
         bf16_tolerance=ROW_DIFFERS)
    for what, lengths, each, heads, k, name, tiny in (
        ("2 sequences, 3 rows each", [150, 40], 3, 4, 64, "tile656", True),
        ("16 sequences, 5 rows each", [6000, 8000, 1500, 4096] * 4, 5, 32, 2048, "tile656", False),
        ("chunk of 512 rows over 16,384 keys", [16384], 512, 32, 2048, "plain576", False),
    )
)  # fmt: skip
