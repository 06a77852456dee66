"""What every Triton backend needs around its kernels: whether it can run at all, launch shapes, exact helpers."""

import contextlib
import dataclasses
import importlib.util
from collections.abc import Iterator

import torch

from headrace.kernels.base import KernelContext
from headrace.kernels.cuda.build import USUAL_PLACE, find_nvcc

FNUZ_ARCHITECTURES = ("gfx940", "gfx941", "gfx942")
COMPUTE_UNITS = {"sm_90": 132, "gfx950": 256, "gfx942": 304}
"""Of an H200, an MI355X and an MI325X: what kernels are compiled for ahead of time"""
CACHE_OPS = ("latent_rows", "index_keys", "index_topk", "sparse_mla")
"""Ops that read or write cached rows; their Triton kernels know the fp8 formats only."""


_ahead_of_time: str | None = None
"""What the meta device stands for (`kernels/aot.py`)."""


@contextlib.contextmanager
def ahead_of_time(target: str) -> Iterator[None]:
    """Inside, tensors on the meta device count as those of a `target` GPU. One at a time in a process."""
    global _ahead_of_time
    before, _ahead_of_time = _ahead_of_time, target
    try:
        yield
    finally:
        _ahead_of_time = before


def architecture(device: torch.device) -> str:
    """`cpu`, `sm_90`, `gfx950`, ...: what tuned launch shapes and fp8 types go by."""
    if device.type == "meta" and _ahead_of_time is not None:
        return _ahead_of_time
    if device.type != "cuda" or not torch.cuda.is_available():
        return device.type
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def compute_units(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 elsewhere."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return COMPUTE_UNITS.get(architecture(device), 1)


def fp8_dtype(device: torch.device) -> torch.dtype:
    """The e4m3 type whose products the device's matrix units know. Cached rows and weights are OCP bytes everywhere:
    a fnuz unit reads the same byte as half the value, which kernels double (`numeric.fp8_gain`)."""
    return torch.float8_e4m3fnuz if architecture(device) in FNUZ_ARCHITECTURES else torch.float8_e4m3fn


def refuses_triton(context: KernelContext) -> str | None:
    """Why no Triton kernel runs in this context, or None. Imports no Triton."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install headrace[cuda] or headrace[rocm])"
    if context.device.type != "cuda":
        return f"needs a GPU, the device is {context.device.type}"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    if torch.version.hip is not None:
        arch = architecture(context.device)
        known = arch in COMPUTE_UNITS or arch in FNUZ_ARCHITECTURES
        return None if known else f"{arch} is not gfx942 or gfx950: no kernel has been compiled for it"
    major, minor = torch.cuda.get_device_capability(context.device)
    return None if major >= 9 else f"needs compute capability 9.0 or later, the device has {major}.{minor}"


def refuses_gluon(context: KernelContext) -> str | None:
    """Why no kernel written for NVIDIA Hopper in Gluon runs in this context, or None."""
    reason = refuses_triton(context)
    if reason is not None:
        return reason
    if torch.version.hip is not None:
        return "written for NVIDIA Hopper"
    major, minor = torch.cuda.get_device_capability(context.device)
    if major != 9:
        return f"written for compute capability 9.0, the device has {major}.{minor}"
    if importlib.util.find_spec("triton.experimental.gluon") is None:
        return "this Triton has no Gluon"
    return None


def refuses_cache_op(context: KernelContext) -> str | None:
    """The same for ops on cached rows."""
    if context.row_format == "bf16":
        return "row format bf16 is for parity: reference only"
    return refuses_triton(context)


def refuses_cuda(context: KernelContext, what: str, least: int, most: int) -> str | None:
    """Why no CUDA C++ kernel for Hopper runs in this context, or None. `what`: the size of the model, by its name in
    `KernelContext.shape`, that must lie in least..most; a context that does not say is taken for one that fits."""
    refusal = refuses_cache_op(context)
    if refusal is not None:
        return refusal
    if torch.version.hip is not None:
        return "CUDA C++, the device is AMD's"
    capability = torch.cuda.get_device_capability(context.device)
    if capability != (9, 0):
        return f"uses instructions of compute capability 9.0, the device has {capability[0]}.{capability[1]}"
    size = context.shape.get(what, least)
    if not least <= size <= most:
        return f"made for {least} to {most} {what}, the model has {size}"
    return None if find_nvcc() else f"nvcc is neither on the PATH nor at {USUAL_PLACE}"


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """Launch shape of a blocked kernel. `warps` and `stages` change speed alone, the blocks also the order of sums."""

    m: int
    n: int
    warps: int = 4
    stages: int = 3

    def on(self, device: torch.device) -> "Tile":
        """On AMD the same in as many stages as 64 KiB of LDS hold, and by at most 4 waves: these are twice as wide as
        warps, and with 8 of them a wave has half the registers."""
        if not architecture(device).startswith("gfx"):
            return self
        return dataclasses.replace(self, stages=min(self.stages, 2), warps=min(self.warps, 4))

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages}


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
