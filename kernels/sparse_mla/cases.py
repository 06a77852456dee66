"""Problems of sparse attention: verification rows and a prefill chunk, 64 heads and shares of them."""

import functools
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.cases import Case, Tolerance, format_named, latent_plane, query_rows

MATRIX = {"sparse_mla_kernel": ("bf16",)}


def attend(
    kernel: Any, device: torch.device, lengths: list[int], rows_each: int, heads: int, k: int, name: str
) -> tuple[Tensor, ...]:
    fmt = format_named(name)
    rows, slots = query_rows(lengths, rows_each, device)
    count = rows.seq.shape[0]
    plane = latent_plane(slots, fmt, device)
    q = torch.randn(count, heads, 576, device=device).bfloat16().float()
    if device.type == "meta":
        selection = torch.empty((count, k), dtype=torch.int32, device=device)
    else:
        # Every second row from a start of its own; what lies beyond the last row is not selected.
        start = torch.arange(count, device=device) % 7
        selection = start[:, None] + 2 * torch.arange(k, device=device)[None, :]
        selection = torch.where(selection <= rows.last_row[:, None], selection, -1).int()
    return (kernel(q, plane, selection, rows, fmt, 1 / 16),)


CASES = tuple(
    Case("sparse_mla", f"{what}, {heads} heads, {name}", functools.partial(
            attend, lengths=lengths, rows_each=each, heads=heads, k=k, name=name),
         row_format=name, shape={"heads": heads}, tiny=tiny,
         tolerance=Tolerance(5e-6, 2.01 / 128, 1e-3), bf16_tolerance=Tolerance(5e-5, 2**-6, 4e-3))
    for what, lengths, each, heads, k, name, tiny in (
        ("3 rows", [150], 3, 8, 64, "tile656", True),
        ("3 rows", [150], 3, 8, 64, "plain576", True),
        ("16 x 5 rows", [6000, 8000, 1500, 5000] * 4, 5, 64, 2048, "tile656", False),
        ("16 x 5 rows", [6000, 8000, 1500, 5000] * 4, 5, 64, 2048, "plain576", False),
        ("16 x 5 rows", [6000, 8000, 1500, 5000] * 4, 5, 16, 2048, "plain576", False),
        ("16 x 5 rows", [6000, 8000, 1500, 5000] * 4, 5, 8, 2048, "tile656", False),
        ("512 rows", [16384], 512, 64, 2048, "tile656", False),
        ("512 rows", [16384], 512, 64, 2048, "plain576", False),
        ("64 rows", [8192], 64, 32, 2048, "tile656", False),
        ("64 rows", [8192], 64, 128, 2048, "plain576", False),
    )
)  # fmt: skip
