"""Sparse attention against fp64 softmax over the dequantised rows, with FlashMLA's published tolerances (and, as there,
cached values around 0.1)."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from headrace.kernels.base import KernelContext, QueryRows
from headrace.kernels.formats import FORMATS, RowFormat
from headrace.kernels.latent_rows.reference import ReferenceLatentRows
from headrace.kernels.rows import cache_rows
from headrace.kernels.sparse_mla.triton import TritonSparseMla, choose_splits
from headrace.kernels.testing.compare import calc_diff

SCALE = 1 / 16


def paged(fmt: RowFormat, lengths: list[int], slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(plane whose unused rows are NaN, block tables with a hole after each sequence): slots in random order."""
    plane = torch.full((slots, 64, fmt.latent_row_bytes), 0xFF, dtype=torch.uint8)
    order = torch.randperm(slots)
    widest = max(-(-n // 64) for n in lengths) + 1
    tables = torch.full((len(lengths), widest), -1, dtype=torch.int64)
    op = ReferenceLatentRows()
    for i, length in enumerate(lengths):
        blocks = -(-length // 64)
        tables[i, :blocks], order = order[:blocks], order[blocks:]
        row = torch.arange(length)
        where = cache_rows(tables, torch.full_like(row, i), row)
        op.write(plane, where, op.quantise(torch.randn(length, 512) / 10, torch.randn(length, 64) / 10, fmt))
    return plane, tables


def attention(
    q: torch.Tensor, plane: torch.Tensor, selection: torch.Tensor, rows: QueryRows, fmt: RowFormat
) -> torch.Tensor:
    out = torch.zeros(*q.shape[:2], 512, dtype=torch.float64)
    for i in range(q.shape[0]):
        chosen = selection[i][selection[i] >= 0].long()
        if len(chosen):
            where = cache_rows(rows.block_tables, rows.seq[i].expand_as(chosen), chosen)
            values = ReferenceLatentRows().gather(plane, where, fmt).double()
            out[i] = torch.softmax(q[i].double() @ values.T * SCALE, -1) @ values[:, :512]
    return out


def check(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert torch.isfinite(got).all()
    assert calc_diff(got, wanted) < 5e-6
    torch.testing.assert_close(got.double(), wanted, rtol=2.01 / 128, atol=1e-3)


def problem(
    fmt: RowFormat, heads: int, k: int, lengths: list[int], picks: list[tuple[int, int]]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, QueryRows]:
    """`picks`: (sequence, number of selected rows) of each query row."""
    plane, tables = paged(fmt, lengths, sum(-(-n // 64) for n in lengths) + 2)
    selection = torch.full((len(picks), k), -1, dtype=torch.int32)
    for i, (seq, count) in enumerate(picks):
        selection[i, :count] = torch.randperm(lengths[seq])[:count].sort().values.int()
    seq = torch.tensor([seq for seq, _ in picks])
    rows = QueryRows(seq, torch.tensor([lengths[s] - 1 for s, _ in picks]), tables)
    return torch.randn(len(picks), heads, 576).bfloat16().float(), plane, selection, rows


def run(
    device: torch.device, given: tuple[torch.Tensor, torch.Tensor, torch.Tensor, QueryRows], fmt: RowFormat,
    splits: int = 0, deterministic: bool = False,
) -> torch.Tensor:  # fmt: skip
    q, plane, selection, rows = given
    on = QueryRows(rows.seq.to(device), rows.last_row.to(device), rows.block_tables.to(device))
    op = TritonSparseMla(KernelContext(device, deterministic))
    return op(q.to(device), plane.to(device), selection.to(device), on, fmt, SCALE, splits=splits).cpu()


@pytest.mark.parametrize("name", ["tile656", "plain576"])
@pytest.mark.parametrize("splits", [1, 2, 3])
def test_attention(device: torch.device, name: str, splits: int) -> None:
    """Full, short, single and empty selections; a split may be empty too."""
    fmt = FORMATS[name]
    given = problem(fmt, 8, 130, [150, 70], [(0, 130), (1, 64), (0, 1), (1, 0), (0, 65)])
    got = run(device, given, fmt, splits)
    check(got, attention(*given, fmt))
    assert not got[3].any()


@pytest.mark.parametrize("heads", [4, 16, 32, 64, 80, 128])
def test_heads(device: torch.device, heads: int) -> None:
    fmt = FORMATS["tile656"]
    given = problem(fmt, heads, 64, [100], [(0, 64)])
    check(run(device, given, fmt), attention(*given, fmt))


def test_holes_in_a_selection_and_missing_blocks(device: torch.device) -> None:
    """-1 in the middle, and a row whose block is not there: both are as if never selected."""
    fmt = FORMATS["tile656"]
    q, plane, selection, rows = problem(fmt, 8, 32, [100], [(0, 32), (0, 32)])
    selection[0, 3:9] = -1
    wanted = attention(q, plane, selection, rows, fmt)
    selection[0, 5] = 130  # its block has slot -1
    check(run(device, (q, plane, selection, rows), fmt), wanted)


def test_a_row_depends_on_itself_alone(device: torch.device) -> None:
    fmt = FORMATS["tile656"]
    q, plane, selection, rows = given = problem(fmt, 8, 96, [150], [(0, 96), (0, 96), (0, 50)])
    whole = run(device, given, fmt, deterministic=True)
    one = QueryRows(rows.seq[2:], rows.last_row[2:], rows.block_tables)
    assert torch.equal(run(device, (q[2:], plane, selection[2:], one), fmt, deterministic=True)[0], whole[2])
    assert torch.equal(run(device, given, fmt, 2), run(device, given, fmt, 2))


def test_splits() -> None:
    assert choose_splits(1, 1, 2048, 64) == 16
    assert choose_splits(1, 1, 128, 64) == 1
    assert choose_splits(80, 1, 2048, 64) == 3
    assert choose_splits(4096, 1, 2048, 64) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["tile656", "plain576"])
@pytest.mark.parametrize("heads", [8, 64, 128])
def test_published_size(name: str, heads: int) -> None:
    fmt = FORMATS[name]
    torch.manual_seed(1)
    given = problem(fmt, heads, 2048, [6000, 2100], [(0, 2048), (1, 2048), (1, 100), (0, 2047), (1, 0)])
    for splits in (0, 1):
        got = run(torch.device("cuda"), given, fmt, splits)
        check(got, attention(*given, fmt))
        assert torch.equal(run(torch.device("cuda"), given, fmt, splits), got)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_pool_beyond_2_gib() -> None:
    fmt = FORMATS["tile656"]
    q, plane, selection, rows = problem(fmt, 64, 256, [300], [(0, 256)])
    slots, far = 120_000, 119_000  # 5.0 GB
    pool = torch.full((slots, 64, fmt.latent_row_bytes), 0xFF, dtype=torch.uint8, device="cuda")
    pool[far : far + plane.shape[0]] = plane.cuda()
    moved = QueryRows(rows.seq, rows.last_row, torch.where(rows.block_tables < 0, -1, rows.block_tables + far))
    got = run(torch.device("cuda"), (q, pool, selection, moved), fmt)
    check(got, attention(q, plane, selection, rows, fmt))
