"""Products written for Hopper against the reference. They need the chip: Gluon has no interpreter."""

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from headrace.kernels import fp8
from headrace.kernels.base import KernelContext, Pair
from headrace.kernels.experts.gluon import GluonExperts, choose_shape
from headrace.kernels.experts.reference import ReferenceExperts
from headrace.kernels.hopper.launch import Shape, Workspace, dense
from headrace.kernels.linear.gluon import GluonLinear
from headrace.kernels.linear.reference import ReferenceLinear
from headrace.kernels.linear.triton import quantise
from headrace.kernels.testing.compare import calc_diff

HOPPER = torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs an NVIDIA Hopper GPU")]
CPU = KernelContext(torch.device("cpu"), deterministic=False)
CUDA = torch.device("cuda")
SHAPES = [
    Shape(*tile, cut=cut, staged=staged)
    for tile, cut, staged in itertools.product(
        [
            (1, 128, 2, False, 4),
            (2, 128, 1, False, 4),
            (1, 128, 1, False, 6),
            (1, 16, 1, True, 10),
            (2, 16, 1, True, 6),
            (1, 64, 1, True, 8),
            (1, 128, 1, True, 6),
        ],
        [0, 1, 2],
        [True, False],
    )
    if not (tile[3] and staged)
]


def fp8_matrix(out: int, inner: int, spread: float = 1.0) -> Pair:
    codes = (torch.randn(out, inner) * spread).to(torch.float8_e4m3fn)
    return codes, torch.rand(-(-out // 128), -(-inner // 128)) + 0.5


def moved(pair: Pair) -> Pair:
    assert pair[1] is not None
    return pair[0].to(CUDA), pair[1].to(CUDA)


@pytest.mark.parametrize(
    ("rows", "out", "inner"), [(1, 256, 1024), (65, 592, 2048), (300, 336, 144), (640, 1008, 2064)]
)
def test_dense(rows: int, out: int, inner: int) -> None:
    """Every tile, cut and not, rows and columns that fill none; what is not written is NaN; twice the same bits."""
    torch.manual_seed(0)
    x = torch.randn(rows, inner) * 5
    matrix = fp8_matrix(out, inner)
    wanted = fp8.dequantise_activation(*fp8.quantise_activation(x)).double() @ fp8.dequantise_weight(*matrix).double().T
    codes, scales = quantise(x.to(CUDA))
    on = moved(matrix)
    assert on[1] is not None
    workspace = Workspace()
    for shape, dtype in itertools.product(SHAPES, (torch.float32, torch.bfloat16)):
        outs = [torch.full((rows, out), torch.nan, dtype=dtype, device=CUDA) for _ in range(2)]
        for to in outs:
            dense(codes, scales, on[0], on[1], shape, to, workspace)
        assert torch.equal(*outs), shape
        assert calc_diff(outs[0].cpu(), wanted) < (2e-6 if dtype == torch.float32 else 1e-5), shape


@pytest.mark.parametrize("deterministic", [True, False])
def test_linear(deterministic: bool) -> None:
    """The op as layers call it: stacked parts, parts that share no grid of scales, no rows, bf16."""
    torch.manual_seed(0)
    op, plain = GluonLinear(KernelContext(CUDA, deterministic)), ReferenceLinear(CPU)
    for outs, inner in (((256, 64), 384), ((64, 200), 384), ((70,), 130)):
        parts = [fp8_matrix(out, inner) for out in outs]
        weight, wanted_weight = op.prepare(*(moved(part) for part in parts)), plain.prepare(*parts)
        for rows in (0, 1, 17, 130, 257):
            x = torch.randn(rows, inner) * 5
            assert calc_diff(op(x.to(CUDA), weight).cpu(), plain(x, wanted_weight)) < 2e-6
    weight = op.prepare((torch.randn(40, 64, device=CUDA).bfloat16(), None))
    assert op(torch.randn(3, 64, device=CUDA), weight).shape == (3, 40)


def test_a_row_depends_on_itself_alone() -> None:
    op = GluonLinear(KernelContext(CUDA, True))
    weight = op.prepare(moved(fp8_matrix(384, 1024)))
    x = torch.randn(300, 1024, device=CUDA)
    whole = op(x, weight)
    for part in (slice(0, 1), slice(3, 20), slice(170, 300)):
        assert torch.equal(op(x[part], weight), whole[part])


@pytest.mark.parametrize("rows", [1, 40, 300, 1500])
@pytest.mark.parametrize("spread", ["even", "one", "holes"])
def test_experts(rows: int, spread: str) -> None:
    """1 row to thousands of an expert, all rows to one, experts without a row; experts 2..5 of 8 are here."""
    torch.manual_seed(0)
    width, inner, top = 512, 256, 3
    gates, ups = ([fp8_matrix(inner, width, 8 * width**-0.5) for _ in range(4)] for _ in range(2))
    downs = [fp8_matrix(width, inner, 8 * inner**-0.5) for _ in range(4)]
    op, plain = GluonExperts(KernelContext(CUDA, False, {"experts": 8})), ReferenceExperts(CPU)
    weight = op.prepare(*([moved(pair) for pair in part] for part in (gates, ups, downs)))
    wanted_weight = plain.prepare(gates, ups, downs)
    x, gains = torch.randn(rows, width) / 10, torch.rand(rows, top)
    choices = {"even": list(range(8)), "one": [4], "holes": [0, 3, 7]}[spread]
    ids = torch.tensor(choices)[torch.randint(0, len(choices), (rows, top))].int()
    codes, scales = op.encode(x.to(CUDA), weight)
    got = op(codes, scales, ids.to(CUDA), gains.to(CUDA), weight, 2)
    assert torch.equal(op(codes, scales, ids.to(CUDA), gains.to(CUDA), weight, 2), got)
    wanted = plain(*plain.encode(x, wanted_weight), ids, gains, wanted_weight, 2)
    assert got.dtype == torch.float64
    assert torch.isfinite(got).all()
    assert calc_diff(got.cpu(), wanted) < 1e-4
    assert not got.cpu()[((ids < 2) | (ids > 5)).all(1)].any()


def test_the_shapes_of_experts_are_all_tested() -> None:
    """`test_experts` with 8 experts meets narrow tiles of both sizes and wide ones."""
    assert [choose_shape(rows * 3, 8).rows for rows in (1, 40, 300, 1500)] == [16, 64, 128, 128]
