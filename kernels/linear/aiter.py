"""aiter's block-scaled FP8 product. It gives bf16; what it does not take (bf16 weights, matrices that meet inside a
scale block, products a head) is Triton's."""

import dataclasses

import torch
from torch import Tensor

from headrace.kernels.aiter_library import call, fp8_type, stored_gain
from headrace.kernels.base import KernelContext, Pair
from headrace.kernels.formats import SCALE_TILE
from headrace.kernels.linear.triton import TritonLinear, TritonWeight


@dataclasses.dataclass(slots=True)
class AiterWeight:
    matrix: Tensor
    """fp8 codes [out, in] in aiter's type"""
    scale: Tensor
    """fp32 [ceil(out / 128), in / 128], for that type"""
    quantised: bool = True

    @property
    def out_features(self) -> int:
        return self.matrix.shape[0]

    @property
    def in_features(self) -> int:
        return self.matrix.shape[1]


class AiterLinear(TritonLinear):
    def prepare(self, *parts: Pair) -> "AiterWeight | TritonWeight":  # type: ignore[override]
        plain = super().prepare(*parts)
        if not plain.quantised or plain.scale_rows != SCALE_TILE or plain.in_features % SCALE_TILE:
            return plain
        assert plain.scale is not None
        device = plain.matrix.device
        return AiterWeight(plain.matrix.view(fp8_type(device)), plain.scale * stored_gain(device))

    def __call__(self, x: Tensor, weight: "AiterWeight | TritonWeight", dtype: torch.dtype = torch.float32) -> Tensor:
        if isinstance(weight, TritonWeight):
            return super().__call__(x, weight, dtype)
        if not x.shape[0]:
            return torch.empty((0, weight.out_features), dtype=dtype, device=x.device)
        codes, scales = call(
            "per_group_quant_hip", x=x.to(torch.bfloat16).contiguous(), quant_dtype=fp8_type(x.device),
            group_size=SCALE_TILE, transpose_scale=False,
        )  # fmt: skip
        out: Tensor = call(
            "gemm_a8w8_blockscale", XQ=codes, WQ=weight.matrix, x_scale=scales, w_scale=weight.scale,
            dtype=torch.bfloat16,
        )  # fmt: skip
        return out.to(dtype)


def create(context: KernelContext) -> AiterLinear:
    return AiterLinear(context)
