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
from headrace.kernels.tiles import ROW_TILE


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
        order = order[(local[order] >= 0) & (local[order] < len(weight.down))]
        sizes = torch.bincount(local[order], minlength=len(weight.down)).tolist()
        source = order // ids.shape[1]
        tile = ROW_TILE if self._deterministic else 1
        out = self._experts(rows.index_select(0, source), sizes, tile, weight)
        out = (out * weights.flatten()[order].unsqueeze(1)).to(self.combine_dtype)
        return total.index_add_(0, source, out.double())

    def _experts(self, x: Tensor, sizes: list[int], tile: int, weight: ReferenceExpertWeights) -> Tensor:
        """x [a, D] ordered by expert, `sizes[e]` rows each -> [a, D]. Every expert's rows start on a tile, so that the
        element-wise work between the products is done on all of them at once."""
        starts, place = [], []
        end = 0
        for size in sizes:
            starts.append(end)
            place.append(torch.arange(end, end + size))
            end += -(-size // tile) * tile
        where = torch.cat(place).to(x.device)
        padded = x.new_zeros((end, x.shape[1])).index_copy_(0, where, x)
        both = self._products(padded, weight.gate_up, starts, sizes, tile)
        gate, up = both.chunk(2, -1)
        hidden = F.silu(gate.contiguous()) * up
        if weight.quantised:
            hidden = fp8.dequantise_activation(*fp8.quantise_activation(hidden))
        return self._products(hidden, weight.down, starts, sizes, tile).index_select(0, where)

    def _products(
        self, x: Tensor, matrices: list[Tensor], starts: list[int], sizes: list[int], tile: int
    ) -> Tensor:
        out = x.new_empty((x.shape[0], matrices[0].shape[1]))
        for matrix, start, size in zip(matrices, starts, sizes):
            step = tile if self._deterministic else max(size, 1)
            for row in range(start, start + size, step):
                torch.mm(x[row : row + step], matrix, out=out[row : row + step])
        return out


def create(context: KernelContext) -> ReferenceExperts:
    return ReferenceExperts(context)
