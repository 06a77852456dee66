"""Every op's tiny problems: Triton against the reference, as `headrace kernels check` compares them on hardware."""

import importlib

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from headrace.kernels import launch
from headrace.kernels.cases import Case, cases_of, disagreements
from headrace.kernels.registry import TRITON_OPS

CASES = [case for op in TRITON_OPS for case in cases_of(op, tiny=True)]
COMPILES = torch.cuda.is_available()


def result_of(backend: str, case: Case, device: torch.device, deterministic: bool = False) -> tuple[torch.Tensor, ...]:
    create = importlib.import_module(f"headrace.kernels.{case.op}.{backend}").create
    return case.results(create(case.context(device, deterministic)), device)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.op} {c.name}")
@pytest.mark.parametrize("deterministic", [True, False])
def test_triton_agrees_with_the_reference(device: torch.device, case: Case, deterministic: bool) -> None:
    got, wanted = (result_of(backend, case, device, deterministic) for backend in ("triton", "reference"))
    assert list(disagreements(got, wanted, case.tolerance)) == []


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.op} {c.name}")
def test_a_device_with_fnuz_units_keeps_the_same_bytes(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """gfx942: pointers are fnuz, stored codes stay OCP (without a negative zero)."""
    if COMPILES:
        pytest.skip("the interpreter knows both types, a GPU one")
    device = torch.device("cpu")
    wanted = result_of("reference", case, device)
    monkeypatch.setattr(launch, "FNUZ_ARCHITECTURES", ("cpu",))
    assert launch.fp8_dtype(device) == torch.float8_e4m3fnuz
    assert list(disagreements(result_of("triton", case, device), wanted, case.tolerance)) == []
    assert list(disagreements(result_of("reference", case, device), wanted, case.tolerance)) == []
