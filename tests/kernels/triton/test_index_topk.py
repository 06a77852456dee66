"""Selections: the exact set of the scores, ties to the lower position, and scores near the reference."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from headrace.kernels.base import KernelContext, QueryRows
from headrace.kernels.formats import FORMATS
from headrace.kernels.index_topk import reference
from headrace.kernels.index_topk.select import select
from headrace.kernels.index_topk.triton import TritonIndexTopk, quantise_query
from headrace.kernels.testing.problems import best, check_rows, indexed, on

FP8 = ["tile656", "plain576"]


def run_select(
    device: torch.device, scores: torch.Tensor, last: torch.Tensor, first_row: int, k: int, chunk: int
) -> torch.Tensor:
    hidden = torch.arange(scores.shape[1])
    scores = scores.masked_fill((hidden > last[:, None]) | (hidden < first_row), -torch.inf)
    maxima = scores.view(scores.shape[0], -1, 16).amax(-1)
    out = torch.full((scores.shape[0], k), 7777, dtype=torch.int32, device=device)
    select(scores.to(device), maxima.to(device), last.to(device), first_row, k, out, chunk)
    return out.cpu()


@pytest.mark.parametrize("first_row", [0, 1])
@pytest.mark.parametrize("kind", ["random", "ties", "zeros", "infinite", "clustered", "signs"])
def test_select(device: torch.device, kind: str, first_row: int) -> None:
    """More groups than k and fewer; rows shorter than k, of exactly k, and empty; chunks smaller than the work."""
    n, k = 384, 20
    scores = torch.randn(7, n)
    if kind == "ties":
        scores = torch.randint(0, 3, (7, n)).float()
    elif kind == "zeros":
        scores = torch.where(torch.rand(7, n) < 0.5, -0.0, 0.0)
    elif kind == "infinite":
        scores = torch.where(torch.rand(7, n) < 0.98, -torch.inf, scores)
    elif kind == "clustered":
        scores[:, 37:90] += 100
    elif kind == "signs":
        scores = -scores.abs() - 1e-30
    last = torch.tensor([n - 1, n - 1, 300, k - 1 + first_row, k + first_row, 3, first_row - 1])
    for chunk in (64,) if device.type == "cpu" else (0, 64):
        got = run_select(device, scores, last, first_row, k, chunk)
        for row, bound in enumerate(last.tolist()):
            wanted = best(scores[row], bound, first_row, k)
            assert got[row].tolist() == wanted + [-1] * (k - len(wanted)), (chunk, row)


def test_select_with_fewer_groups_than_k(device: torch.device) -> None:
    scores, last = torch.randn(2, 128), torch.tensor([127, 101])
    got = run_select(device, scores, last, 0, 64, 0)
    assert [row.tolist() for row in got] == [best(scores[i], int(last[i]), 0, 64) for i in range(2)]


@pytest.mark.parametrize(("heads", "name"), [(4, "tile656"), (3, "plain576"), (32, "tile656")])
@pytest.mark.parametrize("first_row", [0, 1])
def test_selection(device: torch.device, heads: int, name: str, first_row: int) -> None:
    """Two sequences in one batch, their rows mixed; rows that see nothing, less than k, everything."""
    fmt = FORMATS[name]
    lengths = [200, 90]
    plane, tables, keys = indexed(fmt, lengths)
    seq = torch.tensor([1, 0, 0, 1, 0, 0])
    last = torch.tensor([89, 199, 150, first_row - 1, 10, 17])
    rows = QueryRows(seq, last, tables, first_row)
    q, w = torch.randn(6, heads, 128), torch.randn(6, heads)
    op = TritonIndexTopk(KernelContext(device, True))
    got = op(q.to(device), w.to(device), on(rows, device), plane.to(device), fmt, 16).cpu()
    check_rows(got, q, w, rows, keys, 16)
    small = TritonIndexTopk(KernelContext(device, True), scratch=2 * 4 * 4 * 320)  # passes of few rows
    again = small(q.to(device), w.to(device), on(rows, device), plane.to(device), fmt, 16).cpu()
    assert torch.equal(got, again)
    alone = QueryRows(seq[1:2], last[1:2], tables, first_row)
    assert torch.equal(
        op(q[1:2].to(device), w[1:2].to(device), on(alone, device), plane.to(device), fmt, 16).cpu()[0], got[1]
    )


def test_equal_scores_select_the_lower_rows(device: torch.device) -> None:
    fmt = FORMATS["tile656"]
    plane, tables, _ = indexed(fmt, [192])
    rows = QueryRows(torch.zeros(1, dtype=torch.int64), torch.tensor([191]), tables)
    op = TritonIndexTopk(KernelContext(device, True))
    q = torch.zeros(1, 4, 128, device=device)
    got = op(q, torch.ones(1, 4, device=device), on(rows, device), plane.to(device), fmt, 8)
    assert got[0].tolist() == list(range(8))


@pytest.mark.parametrize("heads", [3, 8])
def test_query_bytes_are_the_reference_s(device: torch.device, heads: int) -> None:
    q, w = torch.randn(5, heads, 128) * 7, torch.randn(5, heads)
    q[2] = 0
    codes, scaled = quantise_query(q.to(device), w.to(device))
    wanted, weights = reference.quantise_query(q, w)
    assert torch.equal(codes.float().cpu()[:, :heads], wanted)
    assert torch.equal(scaled.cpu()[:, :heads], weights)
    assert not scaled[:, heads:].any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", FP8)
def test_published_size(name: str) -> None:
    """k 2,048 of up to 20,000 keys, 32 heads, prefill rows of one sequence and verification rows of another."""
    torch.manual_seed(2)
    fmt = FORMATS[name]
    plane, tables, keys = indexed(fmt, [20_000, 6_000])
    seq = torch.tensor([0] * 150 + [1] * 5)
    last = torch.cat((torch.arange(150) * 130 + 600, torch.arange(5) + 5_995))
    rows = QueryRows(seq, last, tables)
    q, w = torch.randn(155, 32, 128), torch.randn(155, 32)
    device = torch.device("cuda")
    for deterministic in (True, False):
        op = TritonIndexTopk(KernelContext(device, deterministic))
        first = op(q.cuda(), w.cuda(), on(rows, device), plane.cuda(), fmt, 2048)
        check_rows(first.cpu(), q, w, rows, keys, 2048)
        assert torch.equal(op(q.cuda(), w.cuda(), on(rows, device), plane.cuda(), fmt, 2048), first)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("ties", [False, True])
def test_select_long_rows(ties: bool) -> None:
    scores = torch.randn(9, 131_072, device="cuda")
    if ties:
        scores = (scores * 50).round()
    last = torch.tensor([131_071, 131_071, 100_000, 70_000, 40_000, 9_999, 2_048, 2_047, 5])
    got = run_select(torch.device("cuda"), scores.cpu(), last, 0, 2048, 0)
    for row, bound in enumerate(last.tolist()):
        seen = scores[row, : bound + 1].cpu()
        wanted = seen.sort(descending=True, stable=True).indices[:2048].sort().values
        assert torch.equal(got[row][got[row] >= 0].long(), wanted)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_index_pool_beyond_2_gib() -> None:
    fmt = FORMATS["tile656"]
    plane, tables, keys = indexed(fmt, [700])
    slots, far = 300_000, 299_000  # 2.5 GB
    pool = torch.full((slots, fmt.index_plane_bytes), 0xFF, dtype=torch.uint8, device="cuda")
    pool[far : far + plane.shape[0]] = plane.cuda()
    rows = QueryRows(torch.zeros(2, dtype=torch.int64), torch.tensor([699, 400]), tables)
    moved = QueryRows(rows.seq, rows.last_row, torch.where(tables < 0, -1, tables + far))
    q, w = torch.randn(2, 32, 128), torch.randn(2, 32)
    op, device = TritonIndexTopk(KernelContext(torch.device("cuda"), False)), torch.device("cuda")
    check_rows(op(q.cuda(), w.cuda(), on(moved, device), pool, fmt, 64).cpu(), q, w, rows, keys, 64)
