"""What the shipped registry offers and why it refuses, on any machine."""

import importlib.util

import pytest
import torch

from headrace.errors import KernelUnsupported
from headrace.kernels.base import KernelContext
from headrace.kernels.registry import OPS, TRITON_OPS, default_registry

CPU = KernelContext(torch.device("cpu"), deterministic=True)


@pytest.mark.parametrize("op", OPS)
def test_a_cpu_gets_the_reference_and_the_reason(op: str) -> None:
    choice = default_registry().choose(op, CPU)
    assert choice.backend == "reference"
    if op in TRITON_OPS:
        installed = importlib.util.find_spec("triton") is not None
        wanted = "needs a GPU, the device is cpu" if installed else "triton is not installed"
        assert [name for name, reason in choice.rejected if reason.startswith(wanted)] == ["triton"]


def test_a_forced_backend_says_why_it_cannot() -> None:
    with pytest.raises(KernelUnsupported, match="triton: "):
        default_registry().choose("sparse_mla", CPU, "triton")


def test_the_parity_format_is_the_reference_s() -> None:
    context = KernelContext(torch.device("cuda"), deterministic=True, row_format="bf16")
    rejected = dict(default_registry().choose("sparse_mla", context).rejected)
    assert rejected == {"triton": "row format bf16 is for parity: reference only"}
