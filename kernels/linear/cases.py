"""Problems of the linear layers: GLM-5.2's matrices at few and many rows, stacked parts, bf16, per-head products."""

import functools
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.cases import Case, Tolerance, fp8_matrix

QUANTISED_OTHERWISE = Tolerance(2e-3, 5e-2, 0.12)
"""Of a backend that quantises activations by another maximum (240 for fnuz codes): other codes, the same expectation"""
MATRIX = {"fp8_linear_kernel": ("fp8",), "float_linear_kernel": ("bf16",), "dense_kernel": ("fp8",)}


def fp8(kernel: Any, device: torch.device, rows: int, parts: tuple[int, ...], inner: int) -> tuple[Tensor, ...]:
    weight = kernel.prepare(*(fp8_matrix(out, inner, device) for out in parts))
    return (kernel(torch.randn(rows, inner, device=device), weight),)


def bf16(kernel: Any, device: torch.device, rows: int, out: int, inner: int) -> tuple[Tensor, ...]:
    weight = kernel.prepare((torch.randn(out, inner, device=device).bfloat16() / 8, None))
    return (kernel(torch.randn(rows, inner, device=device).bfloat16().float(), weight),)


def heads(kernel: Any, device: torch.device, rows: int, count: int, inner: int, out: int) -> tuple[Tensor, ...]:
    x = torch.randn(rows, count, inner, device=device).bfloat16().float()
    return (kernel.per_head(x, torch.randn(count, inner, out, device=device).bfloat16().float() / 8),)


def _case(name: str, run: Any, tiny: bool = False) -> Case:
    return Case(
        "linear",
        name,
        run,
        tiny=tiny,
        tolerance=Tolerance(1e-5, 2e-2, 1e-2),
        bf16_tolerance=QUANTISED_OTHERWISE,
    )


_FP8 = (
    (3, (130, 32), 200, True),
    (20, (128, 256), 256, True),
    (5, (2048, 576), 6144, False),
    (128, (2048, 576), 6144, False),
    (1024, (12288, 12288), 6144, False),
    (1024, (6144,), 16384, False),
    (80, (16384,), 2048, False),
)
CASES = (
    *(_case(f"fp8 {rows} x {'+'.join(map(str, parts))} x {inner}", functools.partial(
        fp8, rows=rows, parts=parts, inner=inner), tiny) for rows, parts, inner, tiny in _FP8),
    _case("bf16 3 x 40 x 72", functools.partial(bf16, rows=3, out=40, inner=72), True),
    _case("bf16 80 x 6144 x 6144", functools.partial(bf16, rows=80, out=6144, inner=6144)),
    _case("3 x 2 heads, 24 to 40", functools.partial(heads, rows=3, count=2, inner=24, out=40), True),
    _case("80 x 64 heads, 192 to 512", functools.partial(heads, rows=80, count=64, inner=192, out=512)),
    _case("80 x 64 heads, 512 to 256", functools.partial(heads, rows=80, count=64, inner=512, out=256)),
)  # fmt: skip
