"""Device functions that several Triton kernels share. Bit-exact twins of `kernels/fp8.py`.

Bytes of cached rows and weights are OCP e4m3 on every device. gfx942 knows the fnuz type only, which reads the same
byte as half the value (and 0x80, OCP's negative zero, as NaN; writers there do not produce it). So a kernel whose
pointer is fnuz multiplies what it reads by `fp8_gain` and halves what it writes (`to_e4m3`): the same bytes, exactly.
"""

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
def fp8_gain(codes_ptr):
    """What a value read through this fp8 pointer is multiplied by; the square of it for a product of two."""
    return 2.0 if codes_ptr.dtype.element_ty == tl.float8e4b8 else 1.0


@triton.jit
def to_e4m3(x, codes_ptr):
    """OCP codes of x, nearest even, saturating at 448, in the type of the pointer they are stored through."""
    x = saturate(x)
    if codes_ptr.dtype.element_ty == tl.float8e4b8:
        x = x * 0.5
    return x.to(codes_ptr.dtype.element_ty)


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
