"""Definition of RoPE: fp32 products, pairs rotated in place (the order of the dims is kept)."""

import torch
from torch import Tensor

from headrace.kernels.base import KernelContext


class ReferenceRope:
    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
        shape = (x.shape[0],) + (1,) * (x.dim() - 2) + (cos.shape[-1],)
        cos, sin = cos.view(shape), sin.view(shape)
        if interleaved:
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def create(context: KernelContext) -> ReferenceRope:
    return ReferenceRope()
