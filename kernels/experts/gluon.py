"""Routed experts on NVIDIA Hopper: rows brought together by expert, two grouped products, the sum.

Takes what the Triton backend takes and leaves to it what does not fit: sizes that are no multiples of 128, and
deterministic mode, where one tile serves every batch.
"""

import torch
from torch import Tensor

from headrace.kernels.base import KernelContext
from headrace.kernels.experts.permute import combine, permute, plan_places
from headrace.kernels.experts.reference import ReferenceExpertWeights
from headrace.kernels.experts.triton import TritonExperts, TritonExpertWeights
from headrace.kernels.hopper.launch import NARROW, WIDE, GroupedRows, GroupedShape, down, gated

CHUNK_PAIRS = 1 << 17
"""Rows are taken so many pairs at a time: buffers have room for all of them to be local, at about 18 KB a pair"""


def choose_shape(pairs: int, experts: int) -> GroupedShape:
    """By the rows of an expert if pairs spread evenly over all `experts` there are, here and elsewhere. On an H200
    with 32 local experts, at a mean of 33 rows 64 a tile beat 16 (206 to 315 us), at 164 wide tiles (364 to 442)."""
    mean = pairs / experts
    return NARROW[16] if mean <= 12 else NARROW[64] if mean <= 96 else WIDE


class GluonExperts(TritonExperts):
    def __init__(self, context: KernelContext) -> None:
        super().__init__(context)
        self._fixed_order = context.deterministic
        self._every_expert = context.shape.get("experts", 0)

    def __call__(
        self,
        x: Tensor,
        scales: Tensor | None,
        ids: Tensor,
        weights: Tensor,
        weight: TritonExpertWeights | ReferenceExpertWeights,
        first_expert: int,
    ) -> Tensor:
        if self._fixed_order or isinstance(weight, ReferenceExpertWeights) or scales is None or not fits(weight):
            return super().__call__(x, scales, ids, weights, weight, first_expert)
        out = torch.empty(x.shape, dtype=torch.float64, device=x.device)
        step = max(1, CHUNK_PAIRS // ids.shape[1])
        for start in range(0, x.shape[0], step):
            part = slice(start, start + step)
            self._chunk(x[part], scales[part], ids[part], weights[part], weight, first_expert, out[part])
        return out

    def _chunk(
        self,
        x: Tensor,
        scales: Tensor,
        ids: Tensor,
        gains: Tensor,
        weight: TritonExpertWeights,
        first: int,
        out: Tensor,
    ) -> None:
        experts, top = weight.down.shape[0], ids.shape[1]
        shape = choose_shape(ids.numel(), max(experts, self._every_expert))
        places = plan_places(ids.reshape(-1) - first, experts, shape.rows)
        codes, by_place, gain = permute(x.contiguous(), scales.contiguous(), gains.contiguous(), places)
        rows = GroupedRows(codes, by_place, places.expert, places.tiles, shape)
        hidden = gated(rows, weight.gate_up, weight.gate_up_scale)
        combine(down(hidden, weight.down, weight.down_scale, gain), places.place, out, top)


def fits(weight: TritonExpertWeights) -> bool:
    """Whether hidden and model channels are whole tiles."""
    return weight.down.shape[1] % 128 == 0 and weight.down.shape[2] % 128 == 0


def create(context: KernelContext) -> GluonExperts:
    return GluonExperts(context)
