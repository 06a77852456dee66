"""Problems of the router: GLM-5.2's one group of 256 experts, and groups."""

import functools
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.base import RouterRule
from headrace.kernels.cases import Case, Tolerance


def route(
    kernel: Any, device: torch.device, rows: int, experts: int, inner: int, rule: RouterRule
) -> tuple[Tensor, ...]:
    """A dense matrix of weights: an expert that only one side chose shows as a value of its size."""
    x = torch.randn(rows, inner, device=device)
    gate = torch.randn(experts, inner, device=device) / inner**0.5
    bias = torch.rand(experts, device=device) / 10
    ids, weights = kernel(x, gate, bias, rule)
    if device.type == "meta":
        return ids, weights
    dense = torch.zeros((rows, experts), device=device).scatter_(1, ids.long(), weights)
    return dense, (ids.diff(dim=1) > 0).float()


MATRIX = {"router_kernel": ("f32",)}
CASES = tuple(
    Case("router", name, functools.partial(route, rows=rows, experts=experts, inner=inner, rule=rule), tiny=tiny,
         shape={"experts": experts}, tolerance=Tolerance(1e-3, 1e-3, 1e-4, outliers=1e-4),
         bf16_tolerance=Tolerance(1e-2, 1e-2, 1e-3, outliers=2e-3))
    for name, rows, experts, inner, rule, tiny in (
        ("5 rows, 16 experts", 5, 16, 64, RouterRule(4, 1, 1, True, 2.5), True),
        ("640 rows, 256 experts", 640, 256, 6144, RouterRule(8, 1, 1, True, 2.5), False),
        ("4096 rows, 256 experts", 4096, 256, 6144, RouterRule(8, 1, 1, True, 2.5), False),
        ("640 rows, 8 groups of 32", 640, 256, 7168, RouterRule(8, 8, 4, True, 2.5), False),
    )
)  # fmt: skip
