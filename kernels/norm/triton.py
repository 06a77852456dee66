"""RMSNorm and LayerNorm, one row a program.

Roofline: 8 bytes a value (fp32 in and out) and nothing else: bound by bandwidth. A row stays in registers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.base import KernelContext
from headrace.kernels.launch import next_power_of_two
from headrace.kernels.norm.reference import ReferenceNorms

MAX_WIDTH = 32768


@triton.jit
def norm_kernel(x_ptr, weight_ptr, bias_ptr, out_ptr, row_stride, width, eps, CENTRED: tl.constexpr, W: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, W)
    inside = column < width
    x = tl.load(x_ptr + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        x = tl.where(inside, x - tl.sum(x, 0) / width, 0.0)
    scale = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    out = x * scale * tl.load(weight_ptr + column, mask=inside, other=0.0)
    if CENTRED:
        out += tl.load(bias_ptr + column, mask=inside, other=0.0)
    tl.store(out_ptr + row * width + column, out, mask=inside)


class TritonNorms:
    def rms(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._launch(x, weight, weight, eps, False)

    def layer(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return self._launch(x, weight, bias, eps, True)

    def _launch(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float, centred: bool) -> Tensor:
        rows, width = x.shape
        if width > MAX_WIDTH:
            plain = ReferenceNorms()
            return plain.layer(x, weight, bias, eps) if centred else plain.rms(x, weight, eps)
        out = torch.empty((rows, width), dtype=torch.float32, device=x.device)
        if rows:
            x = x if x.stride(1) == 1 else x.contiguous()
            block = next_power_of_two(width)
            warps = min(max(block // 512, 1), 16)
            norm_kernel[(rows,)](
                x, weight, bias, out, x.stride(0), width, eps, CENTRED=centred, W=block, num_warps=warps
            )
        return out


def create(context: KernelContext) -> TritonNorms:
    return TritonNorms()
