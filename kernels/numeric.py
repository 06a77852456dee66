"""Device functions that several Triton kernels share. Bit-exact twins of `kernels/fp8.py`."""

import triton
import triton.language as tl


@triton.jit
def power_of_two_scale(amax):
    """2^ceil(log2(max(amax, 1e-4) / 448)) and its inverse, from the bits of a correctly rounded quotient."""
    ratio = tl.div_rn(tl.maximum(amax, 1e-4), tl.full(amax.shape, 448.0, tl.float32))
    bits = ratio.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) + tl.where((bits & 0x7FFFFF) != 0, 1, 0)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return scale, inverse


@triton.jit
def activation_scale(amax):
    """max(amax, 1e-10) / 448, correctly rounded."""
    return tl.div_rn(tl.maximum(amax, 1e-10), tl.full(amax.shape, 448.0, tl.float32))


@triton.jit
def saturate(x):
    """What is cast to e4m3 next: nearest even, never beyond 448."""
    return tl.minimum(tl.maximum(x, -448.0), 448.0)


@triton.jit
def sortable(x):
    """fp32 -> int32 of the same order; both zeros are one value."""
    x = tl.where(x == 0, 0.0, x)
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
