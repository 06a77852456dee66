"""FP8 rounding as the serving path does it, for export (bytes and scales) and for training (round trip, straight-through).

e4m3 has 3 mantissa bits and ends at 448. Every function treats the last dimension as channels.
"""

import torch
from torch import Tensor
from torch.nn import functional

from headrace.model.nano.train.shape import BLOCK

E4M3_MAX = 448.0


def _round(x: Tensor) -> Tensor:
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).to(torch.float32)


def straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """Value of `rounded`, gradient of `x`."""
    return x + (rounded - x).detach()


def weight_scales(weight: Tensor) -> Tensor:
    """fp32 [..., ceil(out/128), ceil(in/128)]: amax/448 of each block of `weight` fp32 [..., out, in]."""
    out, inner = weight.shape[-2:]
    padded = functional.pad(weight, (0, -inner % BLOCK, 0, -out % BLOCK))
    rows, cols = padded.shape[-2] // BLOCK, padded.shape[-1] // BLOCK
    amax = padded.unflatten(-1, (cols, BLOCK)).unflatten(-3, (rows, BLOCK)).abs().amax((-3, -1))
    return amax.clamp_min(1e-12) / E4M3_MAX


def spread_scales(scales: Tensor, out: int, inner: int) -> Tensor:
    """The scale of every element: fp32 [..., out, in]."""
    return scales.repeat_interleave(BLOCK, -2)[..., :out, :].repeat_interleave(BLOCK, -1)[..., :inner]


def round_weight(weight: Tensor) -> Tensor:
    """Straight-through round trip of a weight through e4m3 with 128 × 128 scales."""
    scales = spread_scales(weight_scales(weight.detach()), *weight.shape[-2:])
    return straight_through(weight, _round(weight / scales) * scales)


def _grouped(x: Tensor, group: int) -> Tensor:
    return functional.pad(x.float(), (0, -x.shape[-1] % group)).unflatten(-1, (-1, group))


def round_activation(x: Tensor, group: int = BLOCK) -> Tensor:
    """Straight-through round trip with one dynamic fp32 scale per row and `group` channels (the last may be partial)."""
    grouped = _grouped(x, group)
    scales = grouped.abs().amax(-1, keepdim=True).clamp_min(1e-10) / E4M3_MAX
    rounded = (_round(grouped / scales) * scales).flatten(-2)[..., : x.shape[-1]]
    return straight_through(x, rounded.to(x.dtype))


def round_cache(x: Tensor) -> Tensor:
    """Straight-through round trip through a cache row: power-of-two scales 2^ceil(log2(max(amax, 1e-4)/448)) per 128."""
    grouped = _grouped(x, BLOCK)
    amax = grouped.abs().amax(-1, keepdim=True).clamp_min(1e-4)
    scales = torch.exp2(torch.ceil(torch.log2(amax / E4M3_MAX)))
    rounded = (_round(grouped / scales) * scales).flatten(-2)[..., : x.shape[-1]]
    return straight_through(x, rounded.to(x.dtype))


def quantise_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 [out, in] and fp32 scales [ceil(out/128), ceil(in/128)] of a weight fp32 [out, in]."""
    scales = weight_scales(weight)
    scaled = weight / spread_scales(scales, *weight.shape)
    return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scales


def dequantise_weight(stored: Tensor, scales: Tensor) -> Tensor:
    """fp32 [out, in]."""
    return stored.to(torch.float32) * spread_scales(scales, *stored.shape)
