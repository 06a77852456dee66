"""Problems of query quantisation: a decode step's queries, one row, each granularity."""

import functools
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.base import Granularity
from headrace.kernels.cases import EXACT, Case, Tolerance
from headrace.kernels.fp8 import decode


def quantise(
    kernel: Any, device: torch.device, shape: tuple[int, ...], dtype: torch.dtype, granularity: Granularity
) -> tuple[Tensor, ...]:
    """Values of the codes, and the scales."""
    codes, scales = kernel(torch.randn(shape, device=device).to(dtype), granularity)
    return (codes, scales) if device.type == "meta" else (decode(codes.view(torch.uint8)), scales)


CASES = tuple(
    Case("quantise", f"{'x'.join(map(str, shape))} {dtype}, a scale a {granularity.value}", functools.partial(
            quantise, shape=shape, dtype=dtype, granularity=granularity), tiny=tiny,
         tolerance=EXACT, bf16_tolerance=Tolerance(1e-3, 2**-3, 1e-2))
    for shape, tiny in (((3, 2, 200), True), ((640, 64, 576), False))
    for dtype in (torch.float32, torch.bfloat16)
    for granularity in Granularity
)  # fmt: skip
