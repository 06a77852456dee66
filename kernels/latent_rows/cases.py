"""Problems of the latent rows: quantised from parts, from the projection, and written into the cache."""

import functools
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.cases import Case, Tolerance, format_named
from headrace.kernels.norm.reference import ReferenceNorms
from headrace.kernels.rope.reference import ReferenceRope

SLOTS = 9


def write(kernel: Any, device: torch.device, rows: int, name: str) -> tuple[Tensor, ...]:
    """Decoded rows, so that a code that is off by one step counts as little as it is."""
    fmt = format_named(name)
    kv = torch.randn(rows, 576, device=device)
    weight = torch.rand(512, device=device) + 0.5
    angle = torch.randn(rows, 32, device=device)
    cos, sin = angle.cos(), angle.sin()
    latent = ReferenceNorms().rms(kv[:, :512], weight, 1e-5)
    rope = ReferenceRope()(kv[:, 512:], cos, sin, interleaved=True)
    plane = torch.zeros((SLOTS, 64, fmt.latent_row_bytes), dtype=torch.uint8, device=device)
    cache_rows = (torch.arange(rows, device=device) * 17) % (SLOTS * 64)
    cache_rows[rows // 2] = -1
    fused = torch.zeros_like(plane)
    if hasattr(kernel, "write_projection"):
        kernel.from_projection(kv, weight, 1e-5, cos, sin, fmt)
        kernel.write_projection(fused, cache_rows, kv, weight, 1e-5, cos, sin, fmt)
    row_bytes = kernel.quantise(latent.contiguous(), rope, fmt)
    if device.type == "meta":
        kernel.write(plane, cache_rows, row_bytes)
        return (row_bytes,)
    kernel.write(plane, cache_rows, row_bytes)
    if not hasattr(kernel, "write_projection"):
        fused.copy_(plane)
    every = torch.arange(SLOTS * 64, device=device)
    return kernel.gather(plane, every, fmt), kernel.gather(fused, every, fmt)


CASES = tuple(
    Case("latent_rows", f"{rows} rows, {name}", functools.partial(write, rows=rows, name=name), row_format=name,
         tolerance=Tolerance(1e-5, 2**-3, 1e-2, outliers=1e-3), tiny=tiny,
         bf16_tolerance=Tolerance(1e-3, 2**-3, 2e-2, outliers=2e-2))
    for name in ("tile656", "plain576")
    for rows, tiny in ((5, True), (500, False))
)  # fmt: skip
