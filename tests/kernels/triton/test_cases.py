"""Every op's tiny problems: Triton against the reference, as `headrace kernels check` compares them on hardware."""

import importlib

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from headrace.kernels.cases import Case, cases_of, disagreements
from headrace.kernels.registry import TRITON_OPS


@pytest.mark.parametrize(
    "case", [c for op in TRITON_OPS for c in cases_of(op, tiny=True)], ids=lambda c: f"{c.op} {c.name}"
)
@pytest.mark.parametrize("deterministic", [True, False])
def test_triton_agrees_with_the_reference(device: torch.device, case: Case, deterministic: bool) -> None:
    results = []
    for backend in ("triton", "reference"):
        create = importlib.import_module(f"headrace.kernels.{case.op}.{backend}").create
        results.append(case.results(create(case.context(device, deterministic)), device))
    assert list(disagreements(*results, case.tolerance)) == []
