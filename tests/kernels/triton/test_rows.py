"""Norms, RoPE and the writers of cached rows: near the reference where sums differ, equal bytes where they cannot."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from headrace.kernels.base import KernelContext
from headrace.kernels.formats import FORMATS
from headrace.kernels.index_keys.reference import ReferenceIndexKeys
from headrace.kernels.index_keys.triton import TritonIndexKeys
from headrace.kernels.latent_rows.reference import ReferenceLatentRows
from headrace.kernels.latent_rows.triton import TritonLatentRows
from headrace.kernels.norm.reference import ReferenceNorms
from headrace.kernels.norm.triton import create as create_norms
from headrace.kernels.rope.reference import ReferenceRope
from headrace.kernels.rope.triton import TritonRope

FP8 = ["tile656", "plain576"]


@pytest.mark.parametrize(("rows", "width"), [(0, 64), (1, 96), (5, 1000)])
def test_norms(device: torch.device, rows: int, width: int) -> None:
    x, w, b = torch.randn(rows, width) * 3, torch.randn(width), torch.randn(width)
    norms, plain = create_norms(KernelContext(device, True)), ReferenceNorms()
    on = (x.to(device), w.to(device), b.to(device))
    torch.testing.assert_close(norms.rms(*on[:2], 1e-5).cpu(), plain.rms(x, w, 1e-5), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(norms.layer(*on, 1e-6).cpu(), plain.layer(x, w, b, 1e-6), rtol=1e-5, atol=1e-5)


def test_norm_of_a_slice(device: torch.device) -> None:
    x, w = torch.randn(3, 100), torch.randn(60)
    got = create_norms(KernelContext(device, True)).rms(x.to(device)[:, 8:68], w.to(device), 1e-5)
    torch.testing.assert_close(got.cpu(), ReferenceNorms().rms(x[:, 8:68], w, 1e-5), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("shape", [(0, 64), (3, 64), (35, 3, 64)])
def test_rope(device: torch.device, interleaved: bool, shape: tuple[int, ...]) -> None:
    wide, angle = torch.randn(*shape[:-1], 96), torch.randn(shape[0], 32) * 100
    x = wide[..., 32:]
    got = TritonRope()(
        wide.to(device)[..., 32:], angle.cos().to(device), angle.sin().to(device), interleaved=interleaved
    )
    wanted = ReferenceRope()(x, angle.cos(), angle.sin(), interleaved=interleaved)
    torch.testing.assert_close(got.cpu(), wanted, rtol=1e-5, atol=1e-5)


def spread(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows over four decades by tile, a zero tile, values beyond e4m3 and powers of two at the border of a scale."""
    latent = torch.randn(rows, 512) * torch.logspace(-2, 3, 4).repeat_interleave(128)
    if rows > 3:
        latent[1, :128] = 0
        latent[2] = 448.0
        latent[3] = torch.nextafter(torch.tensor(448.0), torch.tensor(1e9))
    return latent, torch.randn(rows, 64) * 20


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("rows", [0, 1, 21])
def test_latent_bytes_are_the_reference_s(device: torch.device, name: str, rows: int) -> None:
    fmt = FORMATS[name]
    latent, rope = spread(rows)
    got = TritonLatentRows().quantise(latent.to(device), rope.to(device), fmt)
    assert torch.equal(got.cpu(), ReferenceLatentRows().quantise(latent, rope, fmt))


@pytest.mark.parametrize("name", FP8)
def test_latent_write_drops_and_scatters(device: torch.device, name: str) -> None:
    fmt = FORMATS[name]
    wide = torch.randint(0, 255, (21, fmt.latent_row_bytes + 132), dtype=torch.uint8)
    rows = torch.randperm(192)[:21]
    rows[4::5] = -1
    wanted = torch.full((3, 64, fmt.latent_row_bytes), 0xFF, dtype=torch.uint8)
    got = wanted.to(device)
    ReferenceLatentRows().write(wanted, rows, wide[:, : fmt.latent_row_bytes])
    TritonLatentRows().write(got, rows.to(device), wide.to(device)[:, : fmt.latent_row_bytes])
    assert torch.equal(got.cpu(), wanted)


@pytest.mark.parametrize("name", FP8)
def test_latent_rows_from_a_projection(device: torch.device, name: str) -> None:
    """One launch gives what norm, RoPE and quantise give, up to one e4m3 step where a sum rounds otherwise."""
    fmt = FORMATS[name]
    latent, rope = spread(13)
    kv, weight, angle = torch.cat((latent, rope), 1), torch.rand(512) + 0.5, torch.randn(13, 32) * 50
    turn = (angle.cos(), angle.sin())
    normed = ReferenceNorms().rms(latent, weight, 1e-5)
    turned = ReferenceRope()(rope, *turn, interleaved=True)
    on = [x.to(device) for x in (kv, weight, *turn)]
    rows = TritonLatentRows()
    got = rows.from_projection(on[0], on[1], 1e-5, on[2], on[3], fmt)
    plane = torch.full((1, 64, fmt.latent_row_bytes), 0xFF, dtype=torch.uint8, device=device)
    where = torch.arange(13, device=device) + 7
    where[3] = -1
    rows.write_projection(plane, where, on[0], on[1], 1e-5, on[2], on[3], fmt)
    kept = torch.arange(13) != 3
    assert torch.equal(plane[0, 7:20].cpu()[kept], got.cpu()[kept])
    assert bool((plane[0, 10] == 0xFF).all())
    assert bool((plane[0, 20:] == 0xFF).all())
    plain = ReferenceLatentRows()
    space = torch.zeros(1, 64, fmt.latent_row_bytes, dtype=torch.uint8)
    values = []
    for data in (got.cpu(), plain.quantise(normed, turned, fmt)):
        plain.write(space, torch.arange(13), data)
        values.append(plain.gather(space, torch.arange(13), fmt))
    torch.testing.assert_close(values[0], values[1], rtol=2.0**-3, atol=2.0**-6)
    assert (values[0] != values[1]).float().mean() < 0.01


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("rows", [0, 1, 19])
def test_index_key_bytes_are_the_reference_s(device: torch.device, name: str, rows: int) -> None:
    fmt = FORMATS[name]
    keys = torch.randn(rows, 128) * 30
    keys[rows // 2 :] *= 100
    keys[: rows // 4] = 0
    got = TritonIndexKeys().quantise(keys.to(device), fmt)
    assert torch.equal(got.cpu(), ReferenceIndexKeys().quantise(keys, fmt))


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("interleaved", [True, False])
def test_index_keys_from_a_projection(device: torch.device, name: str, interleaved: bool) -> None:
    fmt = FORMATS[name]
    keys, weight, bias, angle = torch.randn(11, 128) * 5 + 1, torch.rand(128), torch.randn(128), torch.randn(11, 32)
    turn = (angle.cos(), angle.sin())
    normed = ReferenceNorms().layer(keys, weight, bias, 1e-6)
    turned = torch.cat((ReferenceRope()(normed[:, :64], *turn, interleaved=interleaved), normed[:, 64:]), 1)
    on = [x.to(device) for x in (keys, weight, bias, *turn)]
    op, plain = TritonIndexKeys(), ReferenceIndexKeys()
    got = op.from_projection(on[0], on[1], on[2], 1e-6, on[3], on[4], interleaved, fmt)
    where = torch.randperm(192)[:11]
    where[2] = -1
    planes = [torch.full((3, fmt.index_plane_bytes), 0xFF, dtype=torch.uint8) for _ in range(3)]
    fused, scattered = planes[0].to(device), planes[1].to(device)
    op.write_projection(fused, where.to(device), on[0], on[1], on[2], 1e-6, on[3], on[4], interleaved, fmt)
    op.write(scattered, where.to(device), got, fmt)
    plain.write(planes[2], where, got.cpu(), fmt)
    assert torch.equal(scattered.cpu(), planes[2])
    assert torch.equal(fused.cpu(), planes[2])
    values = []
    for data in (got.cpu(), plain.quantise(turned, fmt)):
        plain.write(planes[0], torch.arange(11), data, fmt)
        values.append(plain.gather(planes[0], torch.arange(11), fmt))
    torch.testing.assert_close(values[0], values[1], rtol=2.0**-3, atol=2.0**-6)
    assert (values[0] != values[1]).float().mean() < 0.01


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", FP8)
def test_writes_into_pools_beyond_2_gib(name: str) -> None:
    fmt, slots = FORMATS[name], 300_000
    rows = torch.tensor([slots * 64 - 1, 3, slots * 64 - 70])
    kv, keys, weight, angle = torch.randn(3, 576), torch.randn(3, 128), torch.rand(512), torch.randn(3, 32)
    pool = torch.empty((slots, 64, fmt.latent_row_bytes), dtype=torch.uint8, device="cuda")
    cos, sin = angle.cos().cuda(), angle.sin().cuda()
    op = TritonLatentRows()
    op.write_projection(pool, rows.cuda(), kv.cuda(), weight.cuda(), 1e-5, cos, sin, fmt)
    wanted = op.from_projection(kv.cuda(), weight.cuda(), 1e-5, cos, sin, fmt)
    assert torch.equal(pool.view(-1, fmt.latent_row_bytes)[rows.cuda()], wanted)
    op.write(pool, rows.flip(0).cuda(), wanted)
    assert torch.equal(pool.view(-1, fmt.latent_row_bytes)[rows.flip(0).cuda()], wanted)
    del pool
    planes = torch.empty((slots, fmt.index_plane_bytes), dtype=torch.uint8, device="cuda")
    index = TritonIndexKeys()
    index.write_projection(planes, rows.cuda(), keys.cuda(), weight[:128].cuda(), weight[128:256].cuda(), 1e-6, cos,
                           sin, True, fmt)  # fmt: skip
    plain = ReferenceIndexKeys()
    bytes_ = index.from_projection(keys.cuda(), weight[:128].cuda(), weight[128:256].cuda(), 1e-6, cos, sin, True, fmt)
    got = plain.gather(planes, rows.cuda(), fmt)
    again = torch.empty((1, fmt.index_plane_bytes), dtype=torch.uint8, device="cuda")
    index.write(again, torch.arange(3, device="cuda"), bytes_, fmt)
    assert torch.equal(got, plain.gather(again, torch.arange(3, device="cuda"), fmt))
