"""The few calls of the CUDA driver that loading and launching a cubin takes, in torch's context and stream."""

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.errors import KernelUnsupported
from headrace.kernels.cuda.build import build

MAX_DYNAMIC_SHARED = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"""
UINT8, NO_INTERLEAVE, SWIZZLE_128B, PROMOTE_256B, NO_FILL = 0, 0, 3, 3, 0
"""Values of the enumerations that cuTensorMapEncodeTiled takes"""


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise KernelUnsupported(f"{what}: CUDA error {status}, {(text.value or b'unknown').decode()}")


class TensorMap(ctypes.Structure):
    """A descriptor of the bulk copy engine, passed to kernels by value."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


def byte_rows_map(base: int, rows: int, box_rows: int) -> TensorMap:
    """Rows of 128 bytes from address `base` on, fetched `box_rows` at a time with the 128-byte swizzle."""
    room = ctypes.create_string_buffer(ctypes.sizeof(TensorMap) + 64)
    place = (ctypes.addressof(room) + 63) // 64 * 64
    sizes, strides = (ctypes.c_uint64 * 2)(128, rows), (ctypes.c_uint64 * 1)(128)
    box, steps = (ctypes.c_uint32 * 2)(128, box_rows), (ctypes.c_uint32 * 2)(1, 1)
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(place), UINT8, 2, ctypes.c_void_p(base), sizes, strides, box, steps, NO_INTERLEAVE,
        SWIZZLE_128B, PROMOTE_256B, NO_FILL,
    )  # fmt: skip
    _check(status, "cuTensorMapEncodeTiled")
    return TensorMap.from_buffer_copy(ctypes.string_at(place, ctypes.sizeof(TensorMap)))


class Function:
    """One kernel on one device."""

    def __init__(self, handle: ctypes.c_void_p, shared_bytes: int) -> None:
        self._handle, self._shared = handle, shared_bytes

    def launch(self, grid: tuple[int, int, int], threads: int, *arguments: Any) -> None:
        """On torch's current stream. Tensors pass their address, ints are 32-bit, floats are fp32; whatever else must
        be a ctypes value."""
        held = [_argument(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(held))(*(ctypes.addressof(value) for value in held))
        status = _driver().cuLaunchKernel(
            self._handle, *(ctypes.c_uint(n) for n in grid), ctypes.c_uint(threads), ctypes.c_uint(1), ctypes.c_uint(1),
            ctypes.c_uint(self._shared), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream), pointers, None,
        )  # fmt: skip
        _check(status, "cuLaunchKernel")


def _argument(value: Any) -> Any:
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if isinstance(value, int):
        return ctypes.c_int(value)
    return ctypes.c_float(value) if isinstance(value, float) else value


@functools.cache
def load(source: Path, name: str, shared_bytes: int, device: int) -> Function:
    """A kernel of a .cu file, built at first use. Raises KernelUnsupported."""
    handle = ctypes.c_void_p()
    module = _module(source, device)
    _check(_driver().cuModuleGetFunction(ctypes.byref(handle), module, name.encode()), name)
    if shared_bytes > 48 << 10:
        _check(_driver().cuFuncSetAttribute(handle, MAX_DYNAMIC_SHARED, ctypes.c_int(shared_bytes)), name)
    return Function(handle, shared_bytes)


@functools.cache
def _module(source: Path, device: int) -> ctypes.c_void_p:
    cubin, module = build(source), ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes torch's context current in this thread
        _check(_driver().cuModuleLoadData(ctypes.byref(module), cubin), source.name)
    return module
