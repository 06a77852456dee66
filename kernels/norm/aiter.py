"""aiter's RMSNorm. It takes bf16; LayerNorm stays Triton's."""

import torch
from torch import Tensor

from headrace.kernels.aiter_library import call
from headrace.kernels.base import KernelContext
from headrace.kernels.norm.triton import TritonNorms


class AiterNorms(TritonNorms):
    def rms(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not x.shape[0]:
            return torch.empty(x.shape, dtype=torch.float32, device=x.device)
        half = x.to(torch.bfloat16)
        out: Tensor = call("rmsnorm2d_fwd", input=half, weight=weight.to(torch.bfloat16), epsilon=eps)
        return out.to(torch.float32)


def create(context: KernelContext) -> AiterNorms:
    return AiterNorms()
