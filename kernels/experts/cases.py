"""Problems of the routed experts: few and many rows on a rank's share of the experts."""

import functools
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.cases import Case, Tolerance, fp8_matrix

MATRIX = {"gate_up_kernel": ("fp8",), "down_kernel": ("fp8",), "grouped_kernel": ("fp8",)}


def experts(
    kernel: Any, device: torch.device, rows: int, local: int, every: int, hidden: int, inner: int, top: int
) -> tuple[Tensor, ...]:
    """`every` experts exist, `local` of them here, from expert `local` on."""
    gates, ups, downs = ([fp8_matrix(*size, device) for _ in range(local)] for size in (
        (inner, hidden), (inner, hidden), (hidden, inner)))  # fmt: skip
    weight = kernel.prepare(gates, ups, downs)
    codes, scales = kernel.encode(torch.randn(rows, hidden, device=device), weight)
    ids = torch.rand(rows, every, device=device).argsort(-1)[:, :top].sort(-1).values.int()
    gains = torch.rand(rows, top, device=device)
    return (kernel(codes, scales, ids, gains, weight, local),)


CASES = tuple(
    Case("experts", f"{rows} rows, {local} of {every} experts", functools.partial(
            experts, rows=rows, local=local, every=every, hidden=hidden, inner=inner, top=top), tiny=tiny,
         shape={"hidden": hidden, "experts": every, "inner": inner, "top_k": top},
         tolerance=Tolerance(1e-4, 3e-2, 3e-2), bf16_tolerance=Tolerance(4e-3, 5e-2, 0.15))
    for rows, local, every, hidden, inner, top, tiny in (
        (6, 2, 5, 256, 128, 3, True),
        (5, 8, 16, 6144, 2048, 8, False),
        (2048, 8, 16, 6144, 2048, 8, False),
    )
)  # fmt: skip
