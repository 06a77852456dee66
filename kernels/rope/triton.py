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
    to = out_ptr + line.to(tl.int64) * (2 * half)
    cos = tl.load(cos_ptr + row[:, None] * half + pair[None, :], mask=inside, other=0.0)
    sin = tl.load(sin_ptr + row[:, None] * half + pair[None, :], mask=inside, other=0.0)
    if INTERLEAVED:
        # Whole lines are read and written: addresses in steps of two would not be joined into wide accesses.
        both = tl.arange(0, 2 * HALF)
        inside = (line < lines)[:, None] & (both < 2 * half)[None, :]
        x = tl.load(x_ptr + start[:, None] + both[None, :], mask=inside, other=0.0)
        a, b = tl.split(tl.reshape(x, (L, HALF, 2)))
        turned = tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), (L, 2 * HALF))
        tl.store(to[:, None] + both[None, :], turned, mask=inside)
    else:
        a = tl.load(x_ptr + start[:, None] + pair[None, :], mask=inside, other=0.0)
        b = tl.load(x_ptr + start[:, None] + half + pair[None, :], mask=inside, other=0.0)
        tl.store(to[:, None] + pair[None, :], a * cos - b * sin, mask=inside)
        tl.store(to[:, None] + half + pair[None, :], b * cos + a * sin, mask=inside)


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
