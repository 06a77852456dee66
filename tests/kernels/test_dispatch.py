"""What the shipped registry offers and why it refuses, on any machine."""

import dataclasses
import importlib.util
from collections.abc import Callable

import pytest
import torch

from headrace.config.load import from_dict
from headrace.config.tree import ModelConfig
from headrace.errors import ConfigError, KernelUnsupported
from headrace.kernels.base import KernelContext
from headrace.kernels.registry import (
    CUDA_OPS,
    GLUON_OPS,
    OPS,
    TRITON_OPS,
    Backend,
    Registry,
    default_registry,
    forced_choices,
    kernel_set,
)

CPU = KernelContext(torch.device("cpu"), deterministic=True)


@pytest.mark.parametrize("op", OPS)
def test_a_cpu_gets_the_reference_and_the_reason(op: str) -> None:
    choice = default_registry().choose(op, CPU)
    assert choice.backend == "reference"
    if op in TRITON_OPS:
        installed = importlib.util.find_spec("triton") is not None
        wanted = "needs a GPU, the device is cpu" if installed else "triton is not installed"
        others = {"cuda": CUDA_OPS, "gluon": GLUON_OPS}
        refused = [*(name for name, ops in others.items() if op in ops), "triton"]
        assert [name for name, reason in choice.rejected if reason.startswith(wanted)] == refused


def test_a_forced_backend_says_why_it_cannot() -> None:
    with pytest.raises(KernelUnsupported, match="triton: "):
        default_registry().choose("sparse_mla", CPU, "triton")


def test_the_parity_format_is_the_reference_s() -> None:
    context = KernelContext(torch.device("cuda"), deterministic=True, row_format="bf16")
    rejected = dict(default_registry().choose("sparse_mla", context).rejected)
    assert rejected.pop("cuda") == "row format bf16 is for parity: reference only"
    assert rejected.pop("triton") == "row format bf16 is for parity: reference only"
    assert all("bf16" in reason for reason in rejected.values())


def test_one_name_is_for_the_ops_that_have_it() -> None:
    registry = default_registry()
    assert forced_choices("auto", registry) == {}
    assert set(forced_choices("triton", registry)) == set(TRITON_OPS)
    assert set(forced_choices("reference", registry)) == set(OPS)
    with pytest.raises(KernelUnsupported, match=r"no op has a backend 'cutlass'; there are: .*reference, triton"):
        forced_choices("cutlass", registry)


def test_a_mapping_forces_single_ops() -> None:
    kernels = kernel_set(CPU, "norm=reference,router=auto")
    assert {choice.backend for choice in kernels.choices} == {"reference"}
    assert next(choice for choice in kernels.choices if choice.op == "norm").rejected == ()
    with pytest.raises(KernelUnsupported, match=r"linear on cpu.*triton: "):
        kernel_set(CPU, "linear=triton")
    with pytest.raises(KernelUnsupported, match="router: no backend 'cutlass'; registered: "):
        kernel_set(CPU, "router=cutlass")
    with pytest.raises(KernelUnsupported, match="no op 'atention'; known: "):
        kernel_set(CPU, "atention=triton")


def test_the_setting_takes_both_forms() -> None:
    def setting(value: object) -> str:
        return from_dict({"model": {"kernels": value}}).model.kernels

    assert setting("triton") == "triton"
    assert setting({"linear": "triton", "norm": "reference"}) == "norm=reference,linear=triton"
    assert setting("linear=triton, norm=reference") == "norm=reference,linear=triton"
    with pytest.raises(ConfigError, match=r"model\.kernels: no 'atention'; known: norm, rope"):
        setting({"atention": "triton"})
    with pytest.raises(ConfigError, match=r"model\.kernels\.norm: 'cutlass' is not one of auto, "):
        setting({"norm": "cutlass"})
    names = next(f for f in dataclasses.fields(ModelConfig) if f.name == "kernels").metadata["names"]
    assert names == OPS


def test_a_backend_that_cannot_be_made_gives_way_unless_forced() -> None:
    registry = Registry()
    registry.register("norm", Backend("cuda", "headrace.kernels.linear.reference:no_such_factory"))
    registry.register("norm", Backend("reference", "headrace.kernels.norm.reference:create"))
    with pytest.raises(AttributeError):
        registry.choose("norm", CPU)  # a mistake in the code is no refusal

    def broken(context: KernelContext) -> None:
        raise KernelUnsupported("nvcc cannot build it")

    broken_registry = Registry()
    broken_registry.register("norm", Broken("cuda", "", make=broken))
    broken_registry.register("norm", Backend("reference", "headrace.kernels.norm.reference:create"))
    choice = broken_registry.choose("norm", CPU)
    assert (choice.backend, choice.rejected) == ("reference", (("cuda", "nvcc cannot build it"),))
    with pytest.raises(KernelUnsupported, match="nvcc cannot build it"):
        broken_registry.choose("norm", CPU, "cuda")


@dataclasses.dataclass(frozen=True, slots=True)
class Broken(Backend):
    make: Callable[[KernelContext], None] = lambda context: None

    def create(self, context: KernelContext) -> None:
        self.make(context)
