"""Products against the reference: the same quantised operands, sums in another order."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from headrace.kernels import fp8
from headrace.kernels.base import KernelContext, Pair
from headrace.kernels.linear.reference import ReferenceLinear
from headrace.kernels.linear.triton import TritonLinear, TritonWeight, quantise
from headrace.kernels.testing.compare import calc_diff

PLAIN = ReferenceLinear(KernelContext(torch.device("cpu"), deterministic=False))


def fp8_matrix(out: int, inner: int) -> Pair:
    return torch.randn(out, inner).to(torch.float8_e4m3fn), torch.rand(-(-out // 128), -(-inner // 128)) + 0.5


def moved(pair: Pair, device: torch.device) -> Pair:
    return pair[0].to(device), None if pair[1] is None else pair[1].to(device)


@pytest.mark.parametrize(("rows", "width"), [(0, 128), (1, 128), (7, 200), (5, 384)])
def test_activation_bytes_are_the_reference_s(device: torch.device, rows: int, width: int) -> None:
    x = torch.randn(rows, width) * torch.logspace(-3, 3, max(rows, 1))[:rows].unsqueeze(1)
    x[rows // 2 :, :128] = 0
    codes, scales = quantise(x.to(device))
    wanted = fp8.quantise_activation(x)
    assert torch.equal(codes.view(torch.uint8).cpu(), wanted[0])
    assert torch.equal(scales.t().cpu(), wanted[1])


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(("rows", "outs", "inner"), [(1, (70,), 130), (67, (64, 200), 128), (3, (256, 64), 384)])
def test_fp8_product(device: torch.device, rows: int, outs: tuple[int, ...], inner: int, deterministic: bool) -> None:
    """Stacked parts share a grid of scales (256 + 64 rows) or do not (64 + 200)."""
    parts = [fp8_matrix(out, inner) for out in outs]
    x = torch.randn(rows, inner) * 5
    op = TritonLinear(KernelContext(device, deterministic))
    got = op(x.to(device), op.prepare(*(moved(part, device) for part in parts))).cpu()
    wanted = PLAIN(x, PLAIN.prepare(*parts))
    assert calc_diff(got, wanted) < (1e-11 if device.type == "cpu" else 2e-6)
    assert torch.isfinite(got).all()


def test_no_rows(device: torch.device) -> None:
    op = TritonLinear(KernelContext(device, True))
    weight = op.prepare(moved(fp8_matrix(32, 128), device))
    assert op(torch.zeros(0, 128, device=device), weight).shape == (0, 32)
    assert (weight.quantised, weight.out_features, weight.in_features) == (True, 32, 128)


@pytest.mark.parametrize(("rows", "out", "inner"), [(1, 32, 64), (70, 40, 100)])
def test_bf16_product(device: torch.device, rows: int, out: int, inner: int) -> None:
    x, matrix = torch.randn(rows, inner), torch.randn(out, inner).bfloat16()
    op = TritonLinear(KernelContext(device, True))
    got = op(x.to(device), op.prepare((matrix.to(device), None))).cpu()
    assert calc_diff(got, x.double() @ matrix.double().T) < 1e-5


@pytest.mark.parametrize(("rows", "heads", "inner", "out"), [(0, 2, 64, 96), (5, 3, 64, 40), (66, 1, 96, 70)])
def test_per_head(device: torch.device, rows: int, heads: int, inner: int, out: int) -> None:
    wide, matrix = torch.randn(rows, heads, inner + 8), torch.randn(heads, inner, out)
    op = TritonLinear(KernelContext(device, True))
    got = op.per_head(wide.to(device)[..., :inner], matrix.to(device)).cpu()
    assert got.shape == (rows, heads, out)
    assert calc_diff(got, PLAIN.per_head(wide[..., :inner], matrix)) < 1e-5


def test_a_row_depends_on_itself_alone(device: torch.device) -> None:
    op = TritonLinear(KernelContext(device, True))
    x = torch.randn(70, 256, device=device)
    weight: TritonWeight = op.prepare(moved(fp8_matrix(96, 256), device))
    whole = op(x, weight)
    for part in (slice(0, 1), slice(3, 8), slice(64, 70)):
        assert torch.equal(op(x[part], weight), whole[part])
        assert torch.equal(op(x[part], weight), op(x[part], weight))
