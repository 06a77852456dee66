"""RoPE of many heads, some (row, head) pairs a program.

Roofline: 8 bytes a value (fp32 in and out); cos and sin are shared by all heads of a row. Bound by bandwidth.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.base import KernelContext
from headrace.kernels.launch import ceil_div, next_power_of_two

LINES = 32
"""(row, head) pairs of one program"""


@triton.jit
def rope_kernel(
    x_ptr, cos_ptr, sin_ptr, out_ptr, lines, heads, row_stride, head_stride, half,
    INTERLEAVED: tl.constexpr, L: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0) * L + tl.arange(0, L)
    pair = tl.arange(0, HALF)
    inside = (line < lines)[:, None] & (pair < half)[None, :]
    row = (line // heads).to(tl.int64)
    start = row * row_stride + (line % heads) * head_stride
    first = 2 * pair if INTERLEAVED else pair
    step = 1 if INTERLEAVED else half
    a = tl.load(x_ptr + start[:, None] + first[None, :], mask=inside, other=0.0)
    b = tl.load(x_ptr + start[:, None] + first[None, :] + step, mask=inside, other=0.0)
    cos = tl.load(cos_ptr + row[:, None] * half + pair[None, :], mask=inside, other=0.0)
    sin = tl.load(sin_ptr + row[:, None] * half + pair[None, :], mask=inside, other=0.0)
    to = out_ptr + line.to(tl.int64)[:, None] * (2 * half) + first[None, :]
    tl.store(to, a * cos - b * sin, mask=inside)
    tl.store(to + step, b * cos + a * sin, mask=inside)


class TritonRope:
    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
        dim = x.shape[-1]
        heads = x.shape[1:-1].numel()
        flat = x.reshape(x.shape[0], heads, dim)
        if flat.stride(2) != 1:
            flat = flat.contiguous()
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        lines = flat.shape[0] * heads
        if lines:
            rope_kernel[(ceil_div(lines, LINES),)](
                flat, cos.contiguous(), sin.contiguous(), out, lines, heads, flat.stride(0), flat.stride(1), dim // 2,
                INTERLEAVED=interleaved, L=LINES, HALF=next_power_of_two(dim // 2),
            )  # fmt: skip
        return out


def create(context: KernelContext) -> TritonRope:
    return TritonRope()
