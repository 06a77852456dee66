"""Cos and sin of the rotary angles, per position, in fp32 (angles too: every framework builds them so)."""

import math

import torch
from torch import Tensor

from headrace.model.spec import RopeSpec

_CHUNK = 4096


def inverse_frequencies(rope: RopeSpec, dim: int) -> Tensor:
    """fp32 [dim / 2]. YaRN blends interpolated and plain frequencies over a linear ramp of dims. Rounded as other
    frameworks round them: a last bit is a hundredth of a turn at a million positions."""
    periods = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    plain = 1.0 / periods
    if rope.yarn_factor <= 1:
        return plain

    def dim_of(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(rope.theta))

    low = max(math.floor(dim_of(rope.beta_fast)), 0)
    high = min(math.ceil(dim_of(rope.beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (rope.yarn_factor * periods) * (1 - kept) + plain * kept


def amplitude(rope: RopeSpec) -> float:
    """Factor YaRN puts on cos and sin: 1 when mscale equals mscale_all_dim."""
    if rope.yarn_factor <= 1:
        return 1.0

    def m(scale: float) -> float:
        return 0.1 * scale * math.log(rope.yarn_factor) + 1.0

    return m(rope.mscale) / m(rope.mscale_all_dim) if rope.mscale and rope.mscale_all_dim else m(1.0)


class RotaryTable:
    """cos and sin by position, computed in fixed chunks when a longer context comes, so that a position's bits never
    depend on which positions were asked for together. 256 bytes a position; room grows by doubling."""

    def __init__(self, rope: RopeSpec, dim: int, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(rope, dim)
        self._amplitude = amplitude(rope)
        self._length = 0
        self._cos = torch.empty((0, dim // 2), device=device)
        self._sin = torch.empty((0, dim // 2), device=device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [t] -> cos, sin fp32 [t, dim / 2]."""
        if positions.numel():
            self._extend(int(positions.max()) + 1)
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def _extend(self, length: int) -> None:
        if length > self._cos.shape[0]:
            room = max(-(-length // _CHUNK) * _CHUNK, 2 * self._cos.shape[0])
            self._cos, self._sin = (self._roomier(table, room) for table in (self._cos, self._sin))
        while self._length < length:
            rows = slice(self._length, self._length + _CHUNK)
            angles = torch.arange(rows.start, rows.stop, dtype=torch.float32).unsqueeze(1) * self._frequencies
            self._cos[rows] = angles.cos() * self._amplitude
            self._sin[rows] = angles.sin() * self._amplitude
            self._length = rows.stop

    def _roomier(self, table: Tensor, room: int) -> Tensor:
        larger = table.new_empty((room, table.shape[1]))
        larger[: self._length] = table[: self._length]
        return larger
