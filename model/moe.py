"""Feed-forward layers: the dense MLP and the mixture of experts over an exchange.

Routing, top-k and FP8 quantisation come before the gather, so FP8 bytes travel, not hidden states. Two collectives a
layer: one gather of (codes, scales, ids, weights) packed into bytes, one reduce-scatter of fp64 partial sums.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.base import RouterRule
from headrace.kernels.bytewise import as_bytes, from_bytes
from headrace.kernels.registry import KernelSet
from headrace.kernels.tiles import pad_rows
from headrace.model.base import Exchange


@dataclasses.dataclass(slots=True)
class MlpWeights:
    gate_up: object
    """[2I, D], gate rows first"""
    down: object


class Mlp:
    """down(silu(gate x) * up x). Its width may be split over ranks, `weights` None where a rank has nothing of it."""

    def __init__(self, weights: MlpWeights | None, kernels: KernelSet) -> None:
        self._w, self._k = weights, kernels

    def forward(self, x: Tensor, exchange: Exchange) -> Tensor:
        return exchange.sum_parts(self.part(x))

    def part(self, x: Tensor) -> Tensor:
        """What this rank's share of the width adds to the output; all of it where the width is whole."""
        if self._w is None:
            return torch.zeros_like(x)
        # Whole tiles keep the vectorised silu off its scalar tail, which may round differently.
        gate, up = pad_rows(self._k.linear(x, self._w.gate_up)).chunk(2, -1)
        hidden = F.silu(gate.contiguous()) * up
        return self._k.linear(hidden[: x.shape[0]], self._w.down)


@dataclasses.dataclass(slots=True)
class MoeWeights:
    gate: Tensor
    """fp32 [experts, D]"""
    bias: Tensor
    """fp32 [experts]"""
    experts: object
    first_expert: int
    shared: Mlp | None


class Moe:
    def __init__(self, weights: MoeWeights, rule: RouterRule, kernels: KernelSet) -> None:
        self._w, self._rule, self._k = weights, rule, kernels

    def forward(self, x: Tensor, exchange: Exchange) -> Tensor:
        ids, gains = self._k.router(x, self._w.gate, self._w.bias, self._rule)
        codes, scales = self._k.experts.encode(x, self._w.experts)
        parts = [codes, ids, gains] if scales is None else [codes, ids, gains, scales]
        gathered = unpack(exchange.gather_tokens(pack(parts)), parts)
        partial = self._k.experts(
            gathered[0],
            gathered[3] if scales is not None else None,
            gathered[1],
            gathered[2],
            self._w.experts,
            self._w.first_expert,
        )
        shared = self._w.shared.part(x) if self._w.shared is not None else None
        if shared is not None and exchange.splits_layers:
            # Every rank has every row, and a part of the shared experts too: one sum does for both.
            return exchange.reduce_scatter(partial + shared).to(torch.float32)
        total = exchange.reduce_scatter(partial)
        return (total if shared is None else total + shared).to(torch.float32)


def pack(parts: list[Tensor]) -> Tensor:
    """Rows of several dtypes -> uint8 [t, bytes]."""
    return torch.cat([as_bytes(part) for part in parts], -1)


def unpack(packed: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Inverse of `pack`; `like` gives dtypes and widths."""
    pieces = packed.split([part.shape[1] * part.element_size() for part in like], -1)
    return [from_bytes(piece, part.dtype) for piece, part in zip(pieces, like)]
