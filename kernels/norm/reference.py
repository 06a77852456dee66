"""Definition of the norms, in fp32 throughout: activations stay fp32, so there is no cast between scale and weight."""

import torch
from torch import Tensor

from headrace.kernels.base import KernelContext


class ReferenceNorms:
    def rms(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

    def layer(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight + bias


def create(context: KernelContext) -> ReferenceNorms:
    return ReferenceNorms()
