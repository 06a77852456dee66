"""Grouped experts against the reference."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from headrace.kernels.base import KernelContext, Pair
from headrace.kernels.experts.reference import ReferenceExperts
from headrace.kernels.experts.triton import TritonExperts
from headrace.kernels.plan import plan_tiles
from headrace.kernels.testing.compare import calc_diff

CPU = KernelContext(torch.device("cpu"), deterministic=False)


def fp8_matrix(out: int, inner: int, device: torch.device) -> tuple[Pair, Pair]:
    codes = (torch.randn(out, inner) * 8 * inner**-0.5).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-out // 128), -(-inner // 128)) + 0.5
    return (codes, scale), (codes.to(device), scale.to(device))


def test_tiles_cover_every_local_pair_once() -> None:
    ids = torch.randint(0, 12, (37, 3)).int()
    plan = plan_tiles(ids.flatten() - 4, 5, 8)
    seen = []
    for expert, start, end in zip(plan.group.tolist(), plan.start.tolist(), plan.end.tolist()):
        if expert < 5:
            assert start < end
            pairs = plan.members[start : min(start + 8, end)].tolist()
            assert {int(ids.flatten()[p]) for p in pairs} == {expert + 4}
            seen += pairs
    local = (ids.flatten() >= 4) & (ids.flatten() < 9)
    assert sorted(seen) == local.nonzero().flatten().tolist()


@pytest.mark.parametrize(("rows", "width", "inner"), [(0, 128, 128), (1, 64, 32), (21, 128, 192), (9, 200, 128)])
def test_experts(device: torch.device, rows: int, width: int, inner: int) -> None:
    gates, ups = ([fp8_matrix(inner, width, device) for _ in range(4)] for _ in range(2))
    downs = [fp8_matrix(width, inner, device) for _ in range(4)]
    op, plain = TritonExperts(KernelContext(device, True)), ReferenceExperts(CPU)
    weight = op.prepare(*([pair[1] for pair in part] for part in (gates, ups, downs)))
    wanted_weight = plain.prepare(*([pair[0] for pair in part] for part in (gates, ups, downs)))
    x, gains = torch.randn(rows, width) / 10, torch.rand(rows, 3)
    ids = torch.stack([torch.randperm(8)[:3].sort().values for _ in range(rows)] or [torch.zeros(3)]).int()[:rows]
    codes, scales = op.encode(x.to(device), weight)
    wanted_codes, wanted_scales = plain.encode(x, wanted_weight)
    assert scales is not None
    assert wanted_scales is not None
    assert torch.equal(codes.cpu(), wanted_codes)
    assert torch.equal(scales.cpu(), wanted_scales)
    got = op(codes, scales, ids.to(device), gains.to(device), weight, 2)  # this rank holds experts 2..5
    wanted = plain(wanted_codes, wanted_scales, ids, gains, wanted_weight, 2)
    assert got.dtype == torch.float64
    assert calc_diff(got.cpu(), wanted) < 1e-4
    # A hidden value that lands on the other side of a rounding border moves the sum by one e4m3 step of it.
    far = (got.cpu() - wanted).abs() > 0.035 * (1 + wanted.abs())
    assert far.double().sum().item() <= (0 if device.type == "cpu" else 0.005 * far.numel())
    if rows:
        assert torch.equal(op(codes[:1], scales[:1], ids[:1].to(device), gains[:1].to(device), weight, 2), got[:1])


def test_no_local_expert_gives_zeros(device: torch.device) -> None:
    op = TritonExperts(KernelContext(device, True))
    one = [fp8_matrix(128, 128, device)[1]]
    weight = op.prepare(one, one, one)
    codes, scales = op.encode(torch.randn(3, 128, device=device), weight)
    ids = torch.tensor([[5, 7]] * 3, dtype=torch.int32, device=device)
    assert not op(codes, scales, ids, torch.ones(3, 2, device=device), weight, 0).any()


def test_float_experts_are_the_reference_s(device: torch.device) -> None:
    op = TritonExperts(KernelContext(device, True))
    one: list[Pair] = [(torch.randn(64, 64, device=device), None)]
    weight = op.prepare(one, one, one)
    x = torch.randn(3, 64, device=device)
    ids = torch.zeros(3, 1, dtype=torch.int32, device=device)
    assert op(*op.encode(x, weight), ids, torch.ones(3, 1, device=device), weight, 0).shape == (3, 64)
