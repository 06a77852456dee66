"""What every Triton backend needs around its kernels: whether it can run at all, launch shapes, exact helpers."""

import dataclasses
import importlib.util

import torch

from headrace.kernels.base import KernelContext

FNUZ_ARCHITECTURES = ("gfx940", "gfx941", "gfx942")
CACHE_OPS = ("latent_rows", "index_keys", "index_topk", "sparse_mla")
"""Ops that read or write cached rows; their Triton kernels know the fp8 formats only."""


def refuses_triton(context: KernelContext) -> str | None:
    """Why no Triton kernel runs in this context, or None. Imports no Triton."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install headrace[cuda] or headrace[rocm])"
    if context.device.type != "cuda":
        return f"needs a GPU, the device is {context.device.type}"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    if torch.version.hip is not None:
        arch = torch.cuda.get_device_properties(context.device).gcnArchName.split(":")[0]
        return f"{arch} stores fnuz fp8, cached rows are OCP e4m3" if arch in FNUZ_ARCHITECTURES else None
    major, minor = torch.cuda.get_device_capability(context.device)
    return None if major >= 9 else f"needs compute capability 9.0 or later, the device has {major}.{minor}"


def refuses_cache_op(context: KernelContext) -> str | None:
    """The same for ops on cached rows."""
    if context.row_format == "bf16":
        return "row format bf16 is for parity: reference only"
    return refuses_triton(context)


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """Launch shape of a blocked kernel. `warps` and `stages` change speed alone, the blocks also the order of sums."""

    m: int
    n: int
    warps: int = 4
    stages: int = 3

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages}


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
