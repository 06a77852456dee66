"""Cos and sin of the rotary angles, per position, in fp32 (angles too: every framework builds them so)."""

import math

import torch
from torch import Tensor

from headrace.model.spec import RopeSpec

_CHUNK = 4096


def inverse_frequencies(rope: RopeSpec, dim: int) -> Tensor:
    """fp32 [dim / 2]. YaRN blends interpolated and plain frequencies over a linear ramp of dims."""
    plain = 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if rope.yarn_factor <= 1:
        return plain

    def dim_of(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(rope.theta))

    low = max(math.floor(dim_of(rope.beta_fast)), 0)
    high = min(math.ceil(dim_of(rope.beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain / rope.yarn_factor * ramp + plain * (1 - ramp)


def amplitude(rope: RopeSpec) -> float:
    """Factor YaRN puts on cos and sin: 1 when mscale equals mscale_all_dim."""
    if rope.yarn_factor <= 1:
        return 1.0

    def m(scale: float) -> float:
        return 0.1 * scale * math.log(rope.yarn_factor) + 1.0

    return m(rope.mscale) / m(rope.mscale_all_dim) if rope.mscale and rope.mscale_all_dim else m(1.0)


class RotaryTable:
    """cos and sin by position, extended in fixed chunks when a longer context comes, so that a position's bits never
    depend on which positions were asked for together."""

    def __init__(self, rope: RopeSpec, dim: int, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(rope, dim)
        self._amplitude = amplitude(rope)
        self._device = device
        self._cos = torch.empty((0, dim // 2), device=device)
        self._sin = torch.empty((0, dim // 2), device=device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [t] -> cos, sin fp32 [t, dim / 2]."""
        if positions.numel():
            self._extend(int(positions.max()) + 1)
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def _extend(self, length: int) -> None:
        while self._cos.shape[0] < length:
            start = self._cos.shape[0]
            angles = torch.arange(start, start + _CHUNK, dtype=torch.float32).unsqueeze(1) * self._frequencies
            cos, sin = angles.cos() * self._amplitude, angles.sin() * self._amplitude
            self._cos = torch.cat((self._cos, cos.to(self._device)))
            self._sin = torch.cat((self._sin, sin.to(self._device)))
