"""Each op against an independent formula in fp64, on edge shapes."""

import math

import pytest
import torch

from headrace.errors import KernelUnsupported
from headrace.kernels import fp8
from headrace.kernels.base import KernelContext, QueryRows, RouterRule
from headrace.kernels.formats import FORMATS, TILE656
from headrace.kernels.registry import OPS, Backend, KernelSet, Registry, default_registry, kernel_set

CONTEXT = KernelContext(torch.device("cpu"), deterministic=True)


@pytest.fixture
def k() -> KernelSet:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return kernel_set(CONTEXT)


@pytest.mark.parametrize("rows", [0, 1, 17])
def test_norms(k: KernelSet, rows: int) -> None:
    x, w, b = torch.randn(rows, 96) * 3, torch.randn(96), torch.randn(96)
    rms = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * w.double()
    torch.testing.assert_close(k.norm.rms(x, w, 1e-5).double(), rms, rtol=1e-5, atol=1e-6)
    layer = torch.nn.functional.layer_norm(x.double(), (96,), w.double(), b.double(), 1e-6)
    torch.testing.assert_close(k.norm.layer(x, w, b, 1e-6).double(), layer, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rope_is_a_complex_product(k: KernelSet, interleaved: bool) -> None:
    x, angle = torch.randn(5, 3, 64), torch.randn(5, 32)
    got = k.rope(x, angle.cos(), angle.sin(), interleaved=interleaved)
    pairs = x.unflatten(-1, (32, 2)) if interleaved else torch.stack(x.chunk(2, -1), -1)
    turned = torch.view_as_complex(pairs.double()) * torch.exp(1j * angle.double()).unsqueeze(1)
    back = torch.view_as_real(turned)
    wanted = back.flatten(-2) if interleaved else torch.cat(back.unbind(-1), -1)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-6)
    assert k.rope(x[:0], angle[:0].cos(), angle[:0].sin(), interleaved=interleaved).shape == (0, 3, 64)


def test_power_of_two_scales() -> None:
    amax = torch.tensor([0.0, 1e-9, 1e-4, 448.0, 448.1, 1.0, 7.0, 896.0, 3e4])
    scale = fp8.power_of_two_scale(amax)
    wanted = [2.0 ** math.ceil(math.log2(max(a, 1e-4) / 448)) for a in amax.tolist()]
    assert scale.tolist() == wanted
    assert bool((amax / scale <= 448).all())


def test_every_code_decodes_like_the_cast() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    cast = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(fp8.decode(codes).nan_to_num(7), cast.nan_to_num(7))


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("rows", [0, 1, 130])
def test_latent_rows_round_trip(k: KernelSet, name: str, rows: int) -> None:
    """Values spread over four decades by tile, some tiles all zero; dropped rows touch nothing."""
    fmt = FORMATS[name]
    latent = torch.randn(rows, 512) * torch.logspace(-2, 1, 4).repeat_interleave(128)
    rope = torch.randn(rows, 64)
    latent[rows // 2 :, :128] = 0
    data = k.latent_rows.quantise(latent, rope, fmt)
    assert (data.shape, data.dtype) == ((rows, fmt.latent_row_bytes), torch.uint8)
    plane = torch.full((4, 64, fmt.latent_row_bytes), 0xFF, dtype=torch.uint8)
    where = torch.randperm(256)[:rows]
    where[5::7] = -1
    k.latent_rows.write(plane, where, data)
    kept = where >= 0
    untouched = torch.ones(256, dtype=torch.bool)
    untouched[where[kept]] = False
    assert bool((plane.view(256, -1)[untouched] == 0xFF).all())
    back, wanted = k.latent_rows.gather(plane, where[kept], fmt), torch.cat((latent, rope), -1)[kept]
    # e4m3 has 4 significant bits and steps of 2^-9 near zero, times the scale of a tile where there is one.
    relative = 2.0**-4 if fmt.fp8 else 2.0**-8
    step = 2.0**-9 * (wanted[:, :512].unflatten(-1, (4, 128)).abs().amax(-1) / 224 if fmt.tiled else 1)
    bound = wanted.abs() * relative
    if fmt.fp8:
        bound[:, :512] += step.repeat_interleave(128, 1) if fmt.tiled else step
    if name == "plain576":
        bound[:, 512:] += step
    assert bool(((back - wanted).abs() <= bound).all())
    whole = k.latent_rows.gather_blocks(plane, torch.arange(4), fmt)
    assert torch.equal(whole[where[kept]].float(), back)


def test_tile656_bytes(k: KernelSet) -> None:
    """Field by field: codes, fp32 scales, bf16 rope."""
    latent = torch.arange(512.0).view(1, 512)
    rope = torch.arange(64.0).view(1, 64)
    row = k.latent_rows.quantise(latent, rope, TILE656)[0]
    scales = row[512:528].view(torch.float32)
    assert scales.tolist() == [2.0 ** math.ceil(math.log2((128 * i + 127) / 448)) for i in range(4)]
    codes = row[:512].view(torch.float8_e4m3fn).float().view(4, 128) * scales.unsqueeze(1)
    wanted = (latent.view(4, 128) / scales.unsqueeze(1)).to(torch.float8_e4m3fn).float() * scales.unsqueeze(1)
    assert torch.equal(codes, wanted)
    assert torch.equal(row[528:].view(torch.bfloat16).float(), rope[0])


def test_plain576_saturates(k: KernelSet) -> None:
    fmt = FORMATS["plain576"]
    latent = torch.full((1, 512), 1e5)
    row = k.latent_rows.quantise(latent, -latent[:, :64], fmt)
    plane = row.view(1, 1, 576).repeat(1, 64, 1)
    values = k.latent_rows.gather(plane, torch.tensor([0]), fmt)
    assert values[0, 0] == 448
    assert values[0, -1] == -448


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_index_keys_are_planar(k: KernelSet, name: str) -> None:
    fmt = FORMATS[name]
    keys = torch.randn(70, 128) * 3
    keys[3] = 0
    data = k.index_keys.quantise(keys, fmt)
    plane = torch.full((3, fmt.index_plane_bytes), 0xFF, dtype=torch.uint8)
    rows = torch.arange(70) + 64
    k.index_keys.write(plane, rows, data, fmt)
    back = k.index_keys.gather(plane, rows, fmt)
    assert bool(((back - keys).abs() <= keys.abs() * (2**-4 if fmt.fp8 else 2**-8) + 2**-7).all())
    whole, scales = k.index_keys.gather_blocks(plane, torch.tensor([1, 2]), fmt, 100)
    scaled = whole if scales is None else whole * scales.unsqueeze(1)
    assert torch.equal(scaled[:70], back)
    assert whole.shape == (200, 128)
    assert not whole[128:].any()
    if fmt.fp8:
        assert torch.equal(plane[1, :128], data[0, :128])
        assert torch.equal(plane[1, 8192:8196], data[0, 128:])
    assert k.index_keys.quantise(keys[:0], fmt).shape == (0, data.shape[1])


def make_index(k: KernelSet, fmt_name: str, length: int, slots: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    fmt = FORMATS[fmt_name]
    plane = torch.full((max(slots) + 1, fmt.index_plane_bytes), 0xFF, dtype=torch.uint8)
    keys = torch.randn(length, 128)
    rows = torch.tensor(slots)[torch.arange(length) // 64] * 64 + torch.arange(length) % 64
    k.index_keys.write(plane, rows, k.index_keys.quantise(keys, fmt), fmt)
    return plane, k.index_keys.gather(plane, rows, fmt)


@pytest.mark.parametrize("first_row", [0, 1])
def test_index_topk_is_the_exact_set(k: KernelSet, first_row: int) -> None:
    fmt = FORMATS["bf16"]
    plane, keys = make_index(k, "bf16", 200, [3, 0, 5, 2])
    q, w = torch.randn(6, 3, 128), torch.randn(6, 3)
    last = torch.tensor([first_row - 1, first_row, 15 + first_row, 16 + first_row, 120, 199])
    rows = QueryRows(torch.zeros(6, dtype=torch.int64), last, torch.tensor([[3, 0, 5, 2, -1]]), first_row)
    got = k.index_topk(q, w, rows, plane, fmt, 16)
    scores = (w.double().unsqueeze(-1) * (q.double() @ keys.double().T).relu()).sum(1)
    for i, bound in enumerate(last.tolist()):
        visible = range(first_row, bound + 1)
        best = sorted(visible, key=lambda s: (-scores[i, s].item(), s))[:16]
        assert got[i].tolist() == sorted(best) + [-1] * (16 - len(best))


def test_index_topk_ties_go_to_the_lower_row(k: KernelSet) -> None:
    fmt = FORMATS["tile656"]
    plane, _ = make_index(k, "tile656", 192, [0, 1, 2])
    rows = QueryRows(torch.zeros(1, dtype=torch.int64), torch.tensor([191]), torch.tensor([[0, 1, 2]]))
    got = k.index_topk(torch.zeros(1, 2, 128), torch.ones(1, 2), rows, plane, fmt, 8)
    assert got[0].tolist() == list(range(8))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_sparse_mla_is_softmax_attention(k: KernelSet, name: str) -> None:
    fmt = FORMATS[name]
    plane = torch.full((3, 64, fmt.latent_row_bytes), 0xFF, dtype=torch.uint8)  # NaN wherever nothing was written
    table = torch.tensor([[2, 0], [1, -1]])
    where = torch.tensor([2, 0])[torch.arange(100) // 64] * 64 + torch.arange(100) % 64
    k.latent_rows.write(plane, where, k.latent_rows.quantise(torch.randn(100, 512), torch.randn(100, 64), fmt))
    values = k.latent_rows.gather(plane, where, fmt).double()
    q = torch.randn(4, 5, 576) * 0.3
    selection = torch.full((4, 8), -1, dtype=torch.int32)
    selection[0, :3] = torch.tensor([0, 50, 99])
    selection[1] = torch.arange(8)
    selection[3, :1] = 64
    rows = QueryRows(torch.tensor([0, 0, 0, 0]), torch.tensor([99, 99, 99, 99]), table)
    got = k.sparse_mla(q, plane, selection, rows, fmt, 0.1)
    for i in range(4):
        chosen = selection[i][selection[i] >= 0].long()
        p = torch.softmax(q[i].double() @ values[chosen].T * 0.1, -1)
        wanted = p @ values[chosen][:, :512] if len(chosen) else torch.zeros(5, 512, dtype=torch.float64)
        torch.testing.assert_close(got[i].double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("out", "inner"), [(128, 128), (576, 200), (70, 130)])
def test_fp8_linear_dequantises_both_sides(k: KernelSet, out: int, inner: int) -> None:
    codes = torch.randn(out, inner).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-out // 128), -(-inner // 128)) + 0.5
    x = torch.randn(19, inner) * torch.logspace(-3, 2, 19).unsqueeze(1)
    x[4] = 0
    weight = torch.empty(out, inner, dtype=torch.float64)
    quantised = torch.empty(19, inner, dtype=torch.float64)
    for i in range(0, inner, 128):
        part = x[:, i : i + 128]
        s = part.abs().amax(1, keepdim=True).clamp_min(1e-10) / 448
        quantised[:, i : i + 128] = (part / s).to(torch.float8_e4m3fn).double() * s.double()
        for o in range(0, out, 128):
            block = codes[o : o + 128, i : i + 128].double()
            weight[o : o + 128, i : i + 128] = block * scale[o // 128, i // 128].double()
    got = k.linear(x, k.linear.prepare((codes, scale)))
    wanted = quantised @ weight.T
    assert bool(((got.double() - wanted).abs() <= 1e-5 * wanted.abs().amax(1, keepdim=True) + 1e-9).all())
    stacked = k.linear(x, k.linear.prepare((codes, scale), (codes, scale)))
    assert torch.equal(stacked, torch.cat((got, got), 1)) or torch.allclose(stacked, torch.cat((got, got), 1))
    assert k.linear(x[:0], k.linear.prepare((codes, scale))).shape == (0, out)


@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2)])
def test_router(k: KernelSet, groups: int, kept: int) -> None:
    x, gate, bias = torch.randn(33, 40), torch.randn(16, 40), torch.randn(16)
    ids, weights = k.router(x, gate, bias, RouterRule(4, groups, kept, True, 2.5))
    score = torch.sigmoid(x.double() @ gate.double().T)
    for row in range(33):
        choice = score[row] + bias.double()
        best = range(groups)
        size = 16 // groups
        if groups > 1:
            sums = [choice[g * size : (g + 1) * size].topk(2).values.sum().item() for g in range(groups)]
            best = sorted(range(groups), key=lambda g: (-sums[g], g))[:kept]  # type: ignore[assignment]
        allowed = [e for e in range(16) if e // size in best]
        wanted = sorted(sorted(allowed, key=lambda e: (-choice[e].item(), e))[:4])
        assert ids[row].tolist() == wanted
        picked = score[row][wanted]
        torch.testing.assert_close(weights[row].double(), picked / picked.sum() * 2.5, rtol=1e-5, atol=1e-6)


def test_router_ties_go_to_the_lower_id(k: KernelSet) -> None:
    ids, _ = k.router(torch.zeros(1, 8), torch.zeros(6, 8), torch.zeros(6), RouterRule(2, 1, 1, True, 1.0))
    assert ids.tolist() == [[0, 1]]


@pytest.mark.parametrize("quantised", [False, True])
def test_experts(k: KernelSet, quantised: bool) -> None:
    def matrix(out: int, inner: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        values = torch.randn(out, inner) * inner**-0.5
        return (values.to(torch.float8_e4m3fn), torch.ones(1, 1)) if quantised else (values, None)

    gates, ups, downs = ([matrix(32, 64) for _ in range(4)] for _ in range(3))
    downs = [matrix(64, 32) for _ in range(4)]
    weight = k.experts.prepare(gates, ups, downs)
    x = torch.randn(21, 64)
    ids = torch.stack([torch.randperm(8)[:3].sort().values for _ in range(21)]).int()
    gains = torch.rand(21, 3)
    codes, scales = k.experts.encode(x, weight)
    got = k.experts(codes, scales, ids, gains, weight, 2)  # this rank holds experts 2..5
    assert got.dtype == torch.float64
    for row in range(21):
        total = torch.zeros(64, dtype=torch.float64)
        for expert, gain in zip(ids[row].tolist(), gains[row]):
            if 2 <= expert < 6:
                g, u, d = (part[expert - 2][0].double() for part in (gates, ups, downs))
                total += gain.double() * (d @ (torch.nn.functional.silu(g @ x[row].double()) * (u @ x[row].double())))
        bound = 0.15 if quantised else 0.02
        assert (got[row] - total).abs().max() <= bound * (total.abs().max() + 0.5)
    assert k.experts(codes[:0], None if scales is None else scales[:0], ids[:0], gains[:0], weight, 2).shape == (0, 64)


def test_registry_keeps_reasons_and_refuses_by_name() -> None:
    registry = Registry()
    registry.register("norm", Backend("triton", "nowhere:create", lambda context: "needs a GPU"))
    registry.register("norm", Backend("reference", "headrace.kernels.norm.reference:create"))
    choice = registry.choose("norm", CONTEXT)
    assert (choice.backend, choice.rejected) == ("reference", (("triton", "needs a GPU"),))
    with pytest.raises(KernelUnsupported, match="triton: needs a GPU"):
        registry.choose("norm", CONTEXT, "triton")
    with pytest.raises(KernelUnsupported, match="no backend 'aiter'; registered: triton, reference"):
        registry.choose("norm", CONTEXT, "aiter")
    with pytest.raises(KernelUnsupported, match="no op 'attention'"):
        registry.choose("attention", CONTEXT)
    assert {default_registry().choose(op, CONTEXT).backend for op in OPS} == {"reference"}
