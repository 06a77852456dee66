"""Problems of the index keys: quantised from keys, from the projection, and written into the planes of the cache."""

import functools
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.cases import Case, Tolerance, format_named
from headrace.kernels.norm.reference import ReferenceNorms
from headrace.kernels.rope.reference import ReferenceRope

SLOTS = 9


def write(kernel: Any, device: torch.device, rows: int, name: str, interleaved: bool) -> tuple[Tensor, ...]:
    fmt = format_named(name)
    keys = torch.randn(rows, 128, device=device)
    weight, bias = torch.rand(128, device=device) + 0.5, torch.randn(128, device=device) / 10
    angle = torch.randn(rows, 32, device=device)
    cos, sin = angle.cos(), angle.sin()
    normed = ReferenceNorms().layer(keys, weight, bias, 1e-6)
    turned = ReferenceRope()(normed[:, :64], cos, sin, interleaved=interleaved)
    plane = torch.zeros((SLOTS, fmt.index_plane_bytes), dtype=torch.uint8, device=device)
    cache_rows = (torch.arange(rows, device=device) * 17) % (SLOTS * 64)
    cache_rows[rows // 2] = -1
    fused = torch.zeros_like(plane)
    if hasattr(kernel, "write_projection"):
        kernel.from_projection(keys, weight, bias, 1e-6, cos, sin, interleaved, fmt)
        kernel.write_projection(fused, cache_rows, keys, weight, bias, 1e-6, cos, sin, interleaved, fmt)
    row_bytes = kernel.quantise(torch.cat((turned, normed[:, 64:]), -1), fmt)
    kernel.write(plane, cache_rows, row_bytes, fmt)
    if device.type == "meta":
        return (row_bytes,)
    if not hasattr(kernel, "write_projection"):
        fused.copy_(plane)
    every = torch.arange(SLOTS * 64, device=device)
    return kernel.gather(plane, every, fmt), kernel.gather(fused, every, fmt)


CASES = tuple(
    Case("index_keys", f"{rows} keys, {name}", functools.partial(write, rows=rows, name=name, interleaved=interleaved),
         row_format=name, tolerance=Tolerance(1e-5, 2**-3, 1e-2, outliers=1e-3), tiny=tiny,
         bf16_tolerance=Tolerance(1e-3, 2**-3, 2e-2, outliers=2e-2))
    for name, interleaved in (("tile656", True), ("plain576", False))
    for rows, tiny in ((5, True), (500, False))
)  # fmt: skip
