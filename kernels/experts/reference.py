"""Definition of the routed experts: rows grouped by expert, silu(gate) * up, requantised between the two products.

Weighted outputs are rounded to bf16 and summed in fp64: such sums are exact, so neither the order of experts nor the
split over ranks can change a bit.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels import fp8
from headrace.kernels.base import KernelContext, Pair
from headrace.kernels.tiles import matmul_rows, pad_rows


@dataclasses.dataclass(slots=True)
class ReferenceExpertWeights:
    gate_up: list[Tensor]
    """per local expert fp32 [D, 2I]"""
    down: list[Tensor]
    """per local expert fp32 [I, D]"""
    quantised: bool


class ReferenceExperts:
    combine_dtype = torch.bfloat16
    """What weighted outputs are rounded to before they are summed."""

    def __init__(self, context: KernelContext) -> None:
        self._deterministic = context.deterministic

    def prepare(self, gates: list[Pair], ups: list[Pair], downs: list[Pair]) -> ReferenceExpertWeights:
        plain = fp8.dequantise_weight
        return ReferenceExpertWeights(
            [torch.cat((plain(*gate), plain(*up))).t().contiguous() for gate, up in zip(gates, ups)],
            [plain(*down).t().contiguous() for down in downs],
            gates[0][1] is not None,
        )

    def encode(self, x: Tensor, weight: ReferenceExpertWeights) -> tuple[Tensor, Tensor | None]:
        return fp8.quantise_activation(x) if weight.quantised else (x, None)

    def __call__(
        self,
        x: Tensor,
        scales: Tensor | None,
        ids: Tensor,
        weights: Tensor,
        weight: ReferenceExpertWeights,
        first_expert: int,
    ) -> Tensor:
        total = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        if not x.shape[0]:
            return total
        rows = fp8.dequantise_activation(x, scales) if scales is not None else x
        local = ids.flatten().long() - first_expert
        order = local.argsort(stable=True)
        sizes = torch.bincount(local[(local >= 0) & (local < len(weight.down))], minlength=len(weight.down)).tolist()
        start = int((local < 0).sum())
        source, gain = order // ids.shape[1], weights.flatten()[order]
        for expert, size in enumerate(sizes):
            if size:
                mine = source[start : start + size]
                out = self._expert(rows.index_select(0, mine), weight, expert)
                out = (out * gain[start : start + size].unsqueeze(1)).to(self.combine_dtype)
                total.index_add_(0, mine, out.double())
            start += size
        return total

    def _expert(self, x: Tensor, weight: ReferenceExpertWeights, expert: int) -> Tensor:
        count = x.shape[0]
        if self._deterministic:
            x = pad_rows(x)
        gate, up = matmul_rows(x, weight.gate_up[expert], self._deterministic).chunk(2, -1)
        hidden = F.silu(gate.contiguous()) * up
        if weight.quantised:
            hidden = fp8.dequantise_activation(*fp8.quantise_activation(hidden))
        return matmul_rows(hidden, weight.down[expert], self._deterministic)[:count]


def create(context: KernelContext) -> ReferenceExperts:
    return ReferenceExperts(context)
