"""Definition of the FP8 linear: quantise activations, dequantise both sides, fp32 product.

The weight is dequantised once at load and kept in fp32, transposed, because a CPU has no use for the codes.
"""

import dataclasses

import torch
from torch import Tensor

from headrace.kernels import fp8
from headrace.kernels.base import KernelContext, Pair
from headrace.kernels.tiles import matmul_heads, matmul_rows


@dataclasses.dataclass(slots=True)
class ReferenceWeight:
    matrix: Tensor
    """fp32 [in, out]"""
    quantised: bool

    @property
    def out_features(self) -> int:
        return self.matrix.shape[1]

    @property
    def in_features(self) -> int:
        return self.matrix.shape[0]


class ReferenceLinear:
    def __init__(self, context: KernelContext) -> None:
        self._deterministic = context.deterministic

    def prepare(self, *parts: Pair) -> ReferenceWeight:
        matrix = torch.cat([fp8.dequantise_weight(*part) for part in parts])
        return ReferenceWeight(matrix.t().contiguous(), parts[0][1] is not None)

    def __call__(self, x: Tensor, weight: ReferenceWeight) -> Tensor:
        if weight.quantised:
            x = fp8.dequantise_activation(*fp8.quantise_activation(x))
        return matmul_rows(x, weight.matrix, self._deterministic)

    def per_head(self, x: Tensor, matrix: Tensor) -> Tensor:
        return matmul_heads(x, matrix, self._deterministic)


def create(context: KernelContext) -> ReferenceLinear:
    return ReferenceLinear(context)
