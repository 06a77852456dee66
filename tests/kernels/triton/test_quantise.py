"""FP8 codes and scales: the reference's bytes, whatever shares a scale."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from headrace.kernels.base import Granularity, KernelContext
from headrace.kernels.quantise.reference import ReferenceQuantise
from headrace.kernels.quantise.triton import TritonQuantise


def values(shape: tuple[int, ...]) -> torch.Tensor:
    """Rows from 1e-3 to 1e3, some of them zeros."""
    x = torch.randn(shape)
    if x.numel():
        rows = x.view(-1, shape[-1])
        rows *= torch.logspace(-3, 3, rows.shape[0]).unsqueeze(1)
        rows[rows.shape[0] // 2, : shape[-1] // 2] = 0
        rows[rows.shape[0] // 3] = 0
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("granularity", list(Granularity))
@pytest.mark.parametrize("shape", [(0, 128), (1, 128), (3, 200), (7, 5, 576), (2, 9000)])
def test_codes_are_the_reference_s(
    device: torch.device, shape: tuple[int, ...], granularity: Granularity, dtype: torch.dtype
) -> None:
    x = values(shape).to(dtype)
    codes, scales = TritonQuantise(KernelContext(device, True))(x.to(device), granularity)
    wanted_codes, wanted_scales = ReferenceQuantise()(x, granularity)
    assert torch.equal(scales.cpu(), wanted_scales)
    assert torch.equal(codes.cpu().view(torch.uint8), wanted_codes.view(torch.uint8))


@pytest.mark.parametrize("granularity", list(Granularity))
def test_buffers_stay_where_they_are(device: torch.device, granularity: Granularity) -> None:
    """A smaller call after a larger one, and the same again: no trace of the earlier one."""
    op, plain = TritonQuantise(KernelContext(device, True)), ReferenceQuantise()
    big, small = values((40, 256)) * 1000, values((3, 256))
    first = op(big.to(device), granularity)
    at = [part.data_ptr() for part in first]
    for x in (small, small, big):
        codes, scales = op(x.to(device), granularity)
        assert [codes.data_ptr(), scales.data_ptr()] == at
        assert torch.equal(scales.cpu(), plain(x, granularity)[1])
        assert torch.equal(codes.cpu().view(torch.uint8), plain(x, granularity)[0].view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("granularity", list(Granularity))
def test_published_size(granularity: Granularity) -> None:
    """More tiles than programs, so that programs really wait for each other; many times over."""
    op, plain = TritonQuantise(KernelContext(torch.device("cuda"), True)), ReferenceQuantise()
    for rows in (640, 641, 37, 1):
        x = torch.randn(rows, 64, 576, device="cuda")
        codes, scales = op(x, granularity)
        wanted = plain(x.cpu(), granularity)
        assert torch.equal(scales.cpu(), wanted[1])
        assert torch.equal(codes.cpu().view(torch.uint8), wanted[0].view(torch.uint8))
