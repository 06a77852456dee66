"""The problems themselves, and the judge that compares results."""

import importlib

import pytest
import torch

from headrace.kernels.cases import EXACT, OPS_WITH_CASES, Tolerance, block_tables, cases_of, disagreements
from headrace.kernels.registry import OPS

CPU = torch.device("cpu")


def test_every_op_has_tiny_and_published_problems() -> None:
    assert set(OPS) <= set(OPS_WITH_CASES)
    for op in OPS_WITH_CASES:
        assert cases_of(op, tiny=True), op
        assert cases_of(op), op


@pytest.mark.parametrize("op", OPS_WITH_CASES)
def test_a_problem_has_one_answer_and_it_is_not_trivial(op: str) -> None:
    for case in cases_of(op, tiny=True):
        reference = importlib.import_module(f"headrace.kernels.{op}.reference").create(case.context(CPU, True))
        first, second = case.results(reference, CPU), case.results(reference, CPU)
        assert list(disagreements(first, second, EXACT)) == []
        for result in first:
            assert result.isfinite().all()
            assert result.any()
        broken = (first[0] + first[0].abs().max(), *first[1:])
        assert list(disagreements(broken, first, case.tolerance)) != []
        assert list(disagreements(broken, first, case.bf16_tolerance)) != []


def test_the_judge_names_what_is_wrong() -> None:
    x = torch.linspace(1, 2, 100)
    near = Tolerance(1e-6, 1e-3, 0.0)
    assert list(disagreements((x * 1.0005,), (x,), near)) == []
    assert list(disagreements((), (x,), near)) == ["0 results, the reference has 1"]
    assert "shape" in next(disagreements((x[:50],), (x,), near))
    assert "50 of 100 values are NaN" in next(disagreements((torch.where(x < 1.5, x, torch.nan),), (x,), near))
    assert "1.00% of the values" in next(disagreements((x.clone().index_fill_(0, torch.tensor(3), 9.0),), (x,), near))
    assert "calc_diff" in next(disagreements((x * 1.01,), (x,), Tolerance(1e-6, 1.0, 0.0)))
    off = x.clone().index_fill_(0, torch.tensor(3), 1.04)
    assert list(disagreements((off,), (x,), Tolerance(0.0, 1e-3, 0.0, outliers=0.02))) == []


def test_block_tables_use_every_slot_once() -> None:
    table, slots = block_tables([6000, 10, 64, 65], CPU)
    used = table[table >= 0]
    assert used.unique().numel() == used.numel() == 94 + 1 + 1 + 2
    assert int(used.max()) < slots
    assert (table[:, -1] == -1).all()
