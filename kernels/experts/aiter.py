"""aiter's fused mixture of experts: sorting, both products and the sum in one call.

It quantises its input itself, so rows that arrive as codes are decoded to bf16 first; it sums in an order of its own
and gives bf16. Experts are global ids with a mask of those that are here.
"""

import dataclasses

import torch
from torch import Tensor

from headrace.errors import KernelUnsupported
from headrace.kernels.aiter_library import call, enum_value, fp8_type, stored_gain
from headrace.kernels.base import KernelContext, Pair
from headrace.kernels.experts.reference import ReferenceExpertWeights
from headrace.kernels.experts.triton import TritonExperts, TritonExpertWeights
from headrace.kernels.formats import SCALE_TILE
from headrace.kernels.fp8 import dequantise_activation
from headrace.kernels.linear.triton import quantise

SHUFFLE = (16, 16)


@dataclasses.dataclass(slots=True)
class AiterExpertWeights:
    gate_up: Tensor
    """[E, 2I, D], shuffled in tiles of 16 x 16"""
    gate_up_scale: Tensor
    """fp32 [E, 2I / 128, D / 128]"""
    down: Tensor
    down_scale: Tensor
    quantised: bool = True


class AiterExperts(TritonExperts):
    def __init__(self, context: KernelContext) -> None:
        super().__init__(context)
        self._every = context.shape["experts"]

    def prepare(  # type: ignore[override]
        self, gates: list[Pair], ups: list[Pair], downs: list[Pair]
    ) -> "AiterExpertWeights | TritonExpertWeights | ReferenceExpertWeights":
        plain = super().prepare(gates, ups, downs)
        if isinstance(plain, ReferenceExpertWeights):
            return plain
        device = plain.down.device
        gain, fp8 = stored_gain(device), fp8_type(device)
        local, both, _ = plain.gate_up.shape
        return AiterExpertWeights(
            call("shuffle_weight", x=plain.gate_up.view(fp8), layout=SHUFFLE),
            (plain.gate_up_scale * gain).reshape(local, both // SCALE_TILE, -1).contiguous(),
            call("shuffle_weight", x=plain.down.view(fp8), layout=SHUFFLE),
            (plain.down_scale * gain).contiguous(),
        )

    def encode(  # type: ignore[override]
        self, x: Tensor, weight: "AiterExpertWeights | TritonExpertWeights | ReferenceExpertWeights"
    ) -> tuple[Tensor, Tensor | None]:
        if isinstance(weight, AiterExpertWeights):
            codes, scales = quantise(x, transposed=False)
            return codes.view(torch.uint8), scales
        return super().encode(x, weight)

    def __call__(  # type: ignore[override]
        self,
        x: Tensor,
        scales: Tensor | None,
        ids: Tensor,
        weights: Tensor,
        weight: "AiterExpertWeights | TritonExpertWeights | ReferenceExpertWeights",
        first_expert: int,
    ) -> Tensor:
        if not isinstance(weight, AiterExpertWeights):
            return super().__call__(x, scales, ids, weights, weight, first_expert)
        if scales is None:
            raise KernelUnsupported("rows for FP8 experts arrive as codes with scales")
        if not x.shape[0]:
            return torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        here = torch.zeros(self._every, dtype=torch.int32, device=x.device)
        here[first_expert : first_expert + weight.down.shape[0]] = 1
        out: Tensor = call(
            "fused_moe", hidden_states=dequantise_activation(x, scales).to(torch.bfloat16), w1=weight.gate_up,
            w2=weight.down, topk_weight=weights.contiguous(), topk_ids=ids.contiguous(), expert_mask=here,
            activation=enum_value("ActivationType", "Silu"), quant_type=enum_value("QuantType", "per_1x128"),
            w1_scale=weight.gate_up_scale, w2_scale=weight.down_scale,
        )  # fmt: skip
        return out.double()


def create(context: KernelContext) -> AiterExperts:
    return AiterExperts(context)
