"""Sparse attention against fp64 softmax over the dequantised rows, with FlashMLA's published tolerances (and, as there,
cached values around 0.1)."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from headrace.kernels.base import KernelContext, QueryRows
from headrace.kernels.formats import FORMATS, RowFormat
from headrace.kernels.sparse_mla.triton import TritonSparseMla, choose_splits
from headrace.kernels.testing.problems import SCALE, attention, problem
from headrace.kernels.testing.problems import check_attention as check


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
