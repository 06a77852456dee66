"""Feed-forward layers: the dense MLP and the mixture of experts over an exchange.

Routing, top-k and FP8 quantisation come before the gather, so FP8 bytes travel, not hidden states. Two collectives a
layer: one gather of (codes, scales, ids, weights) packed into bytes, one reduce-scatter of fp64 partial sums.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.base import RouterRule
from headrace.kernels.registry import KernelSet
from headrace.kernels.tiles import pad_rows
from headrace.model.base import Exchange


@dataclasses.dataclass(slots=True)
class MlpWeights:
    gate_up: object
    """[2I, D], gate rows first"""
    down: object


class Mlp:
    """down(silu(gate x) * up x)"""

    def __init__(self, weights: MlpWeights, kernels: KernelSet) -> None:
        self._w, self._k = weights, kernels

    def forward(self, x: Tensor, exchange: Exchange) -> Tensor:
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
    shared: MlpWeights | None


class Moe:
    def __init__(self, weights: MoeWeights, rule: RouterRule, kernels: KernelSet) -> None:
        self._w, self._rule, self._k = weights, rule, kernels
        self._shared = Mlp(weights.shared, kernels) if weights.shared is not None else None

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
        total = exchange.reduce_scatter(partial)
        if self._shared is not None:
            total = total + self._shared.forward(x, exchange)
        return total.to(torch.float32)


def pack(parts: list[Tensor]) -> Tensor:
    """Rows of several dtypes -> uint8 [t, bytes]. t may be 0: then strides say nothing, so parts are flattened first."""
    flat = [part.contiguous().flatten().view(torch.uint8) for part in parts]
    return torch.cat([bytes_.view(part.shape[0], row_bytes(part)) for bytes_, part in zip(flat, parts)], -1)


def unpack(packed: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Inverse of `pack`; `like` gives dtypes and widths."""
    pieces = packed.split([row_bytes(part) for part in like], -1)
    return [piece.contiguous().view(part.dtype) for piece, part in zip(pieces, like)]


def row_bytes(part: Tensor) -> int:
    return part.shape[1] * part.element_size()
