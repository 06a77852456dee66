"""Problems of RoPE: rope dims of queries and index queries, and the single head of a key."""

import functools
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.cases import Case, Tolerance


def turn(kernel: Any, device: torch.device, rows: int, heads: int) -> tuple[Tensor, ...]:
    x = torch.randn(rows, heads, 192 + 64, device=device)[..., 192:]
    angle = torch.randn(rows, 32, device=device)
    both = (kernel(x, angle.cos(), angle.sin(), interleaved=interleaved) for interleaved in (True, False))
    return (*both, kernel(x[:, 0], angle.cos(), angle.sin(), interleaved=True))


CASES = tuple(
    Case("rope", f"{rows} rows of {heads} heads", functools.partial(turn, rows=rows, heads=heads), tiny=tiny,
         tolerance=Tolerance(1e-9, 1e-5, 1e-5))
    for rows, heads, tiny in ((3, 2, True), (640, 64, False), (640, 32, False))
)  # fmt: skip
