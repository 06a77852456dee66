"""Triton's interpreter on a CPU, with the float arithmetic of a GPU.

Triton 3.6 to 3.9 interpret some things differently from what the compiler emits: bf16 operands of `tl.dot` and of
element-wise arithmetic are taken for integers, fp32 -> bf16 truncates, fp32 -> e4m3 rounds half up without saturating,
e4m3 NaNs decode as 480, a comparison of two scalars becomes an integer once it is broadcast. `install` replaces those.
It must run before the first module with kernels is imported, because `triton.jit` decides then; Triton's own library,
already decorated, is decorated again.
"""

import functools
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language import core, math, random, standard
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

_TORCH = {
    tl.float32: torch.float32,
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.float8e4b8: torch.float8_e4m3fnuz,
}
_BITS: dict[int, tuple[Any, torch.dtype]] = {
    8: (np.uint64, torch.uint64),
    4: (np.uint32, torch.uint32),
    2: (np.uint16, torch.uint16),
    1: (np.uint8, torch.uint8),
}
_convert_before = interpreter._convert_float
_binary_before = interpreter.InterpreterBuilder.binary_op


def install() -> None:
    """Interpret every kernel defined from now on. Process-wide; calling it twice is harmless."""
    # Children of this process (`kernels/aot.py`) compile: they must not inherit it.
    triton.knobs.propagate_env, before = False, triton.knobs.propagate_env
    triton.knobs.runtime.interpret = True
    triton.knobs.propagate_env = before
    for module in (tl, core, math, random, standard):
        for name, value in vars(module).items():
            if isinstance(value, JITFunction):
                setattr(module, name, _interpreted(value))
    interpreter._convert_float = _convert
    interpreter.InterpreterBuilder.create_dot = _dot
    interpreter.InterpreterBuilder.binary_op = _binary


@functools.cache
def _interpreted(function: Any) -> Any:
    """One object a function, whatever the number of modules that export it: the interpreter compares by identity."""
    return interpreter.InterpretedFunction(function.fn)


def _to_torch(bits: Any, dtype: Any) -> torch.Tensor:
    bits = np.ascontiguousarray(bits)
    return torch.from_numpy(bits.view(_BITS[bits.dtype.itemsize][0])).view(_TORCH[dtype])


def _convert(x: Any, source: Any, target: Any, rounding: Any) -> Any:
    """The interpreter's float cast: bits in, bits out."""
    nearest = rounding is None or rounding == interpreter._ir.ROUNDING_MODE.RTNE
    if source not in _TORCH or target not in _TORCH or not nearest:
        return _convert_before(x, source, target, rounding)
    values = _to_torch(x, source)
    if target == tl.float8e4nv:
        # A GPU's conversion saturates; torch's makes values beyond 464 NaN.
        values = values.float().clamp(-448, 448)
    cast = values.to(_TORCH[target])
    return cast.view(_BITS[cast.element_size()][1]).numpy().reshape(x.shape)


def _dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """Products in the accumulator's type, whatever the operands' type."""
    product = np.matmul(_values(a), _values(b), dtype=d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


def _binary(self: Any, a: Any, b: Any, op: Any) -> Any:
    """Element-wise; bf16 in fp32, rounded once."""
    dtype = a.dtype.scalar
    if dtype != tl.bfloat16 or b.dtype.scalar != tl.bfloat16 or op.__name__ not in ("add", "subtract", "multiply"):
        result = _binary_before(self, a, b, op)
        # A comparison keeps its operands' type there, and a splat then makes an integer of the truth value.
        return interpreter.TensorHandle(result.data, tl.int1) if result.data.dtype == np.bool_ else result
    exact = op(_values(a), _values(b))
    return interpreter.TensorHandle(_convert(exact, tl.float32, tl.bfloat16, None), dtype)


def _values(handle: Any) -> Any:
    dtype = handle.dtype.scalar
    if dtype not in _TORCH:
        return handle.data
    return _to_torch(handle.data, dtype).float().numpy().reshape(handle.data.shape)
