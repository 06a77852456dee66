"""Block-scaled FP8 linear on NVIDIA Hopper; what it does not take (bf16, borders inside a scale block, channels no
multiple of 16) is the Triton backend's.

A row's products are summed in the same order whatever the tile, so all uncut tiles give the same bits; deterministic
mode has one tile all the same, because nothing but observation says so.
"""

import torch
from torch import Tensor

from headrace.kernels.base import KernelContext
from headrace.kernels.formats import SCALE_TILE
from headrace.kernels.hopper.launch import Shape, Workspace, dense
from headrace.kernels.linear.triton import TritonLinear, TritonWeight
from headrace.kernels.tuned import Table, load

DETERMINISTIC = Shape(p=1, q=128, sub=1, narrow=False, stages=6)


def choose_shape(table: Table, rows: int, out: int, inner: int) -> Shape:
    """The nearest tuned one; without a table, by how many rows there are."""
    config = table.lookup({"rows": rows, "out": out, "inner": inner}, "e4m3")
    if config is not None:
        return Shape.of(config)
    if rows <= 128:
        return Shape(1, 16 if rows <= 16 else 64 if rows <= 64 else 128, 1, True, 6, cut=1, staged=False)
    return Shape(1, 128, 2, False, 4)


class GluonLinear(TritonLinear):
    """Products of one object must follow each other on one stream: cut tiles share a workspace."""

    def __init__(self, context: KernelContext) -> None:
        super().__init__(context)
        self._fixed_order = context.deterministic
        self._workspace = Workspace()
        self._table = load("linear", "sm_90")
        self._shapes: dict[tuple[int, int, int], Shape] = {}

    def product(self, codes: Tensor, scales: Tensor, weight: TritonWeight, dtype: torch.dtype) -> Tensor:
        rows = codes.shape[0]
        if weight.scale is None or weight.scale_rows != SCALE_TILE or weight.in_features % 16 or not rows:
            return super().product(codes, scales, weight, dtype)
        out = torch.empty((rows, weight.out_features), dtype=dtype, device=codes.device)
        return dense(codes, scales, weight.matrix, weight.scale, self._shape(rows, weight), out, self._workspace)

    def _shape(self, rows: int, weight: TritonWeight) -> Shape:
        if self._fixed_order:
            return DETERMINISTIC
        key = rows, weight.out_features, weight.in_features
        shape = self._shapes.get(key)
        if shape is None:
            shape = self._shapes[key] = choose_shape(self._table, *key)
        return shape


def create(context: KernelContext) -> GluonLinear:
    return GluonLinear(context)
