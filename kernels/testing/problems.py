"""Problems of the cache ops for tests of any backend: paged pools full of NaN but for what was written, block tables
with holes, and what is right by plain fp64 arithmetic."""

import torch

from headrace.kernels.base import QueryRows
from headrace.kernels.formats import RowFormat
from headrace.kernels.index_keys.reference import ReferenceIndexKeys
from headrace.kernels.index_topk.reference import quantise_query
from headrace.kernels.latent_rows.reference import ReferenceLatentRows
from headrace.kernels.rows import cache_rows
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
    out = torch.zeros(*q.shape[:2], 512, dtype=torch.float64, device=q.device)
    for i in range(q.shape[0]):
        chosen = selection[i][selection[i] >= 0].long()
        if len(chosen):
            where = cache_rows(rows.block_tables, rows.seq[i].expand_as(chosen), chosen)
            values = ReferenceLatentRows().gather(plane, where, fmt).double()
            out[i] = torch.softmax(q[i].double() @ values.T * SCALE, -1) @ values[:, :512]
    return out


def check_attention(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """FlashMLA's published tolerances (there too, cached values are around 0.1)."""
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
    owner = torch.tensor([seq for seq, _ in picks])
    rows = QueryRows(owner, torch.tensor([lengths[s] - 1 for s, _ in picks]), tables)
    return torch.randn(len(picks), heads, 576).bfloat16().float(), plane, selection, rows


def indexed(fmt: RowFormat, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """(planes whose unused keys are NaN, tables with a hole after each sequence, dequantised keys)."""
    slots = sum(-(-n // 64) for n in lengths) + 1
    plane = torch.full((slots, fmt.index_plane_bytes), 0xFF, dtype=torch.uint8)
    tables = torch.full((len(lengths), max(-(-n // 64) for n in lengths) + 1), -1, dtype=torch.int64)
    order, op, keys = torch.randperm(slots), ReferenceIndexKeys(), []
    for i, length in enumerate(lengths):
        blocks = -(-length // 64)
        tables[i, :blocks], order = order[:blocks], order[blocks:]
        row = torch.arange(length)
        where = cache_rows(tables, torch.full_like(row, i), row)
        op.write(plane, where, op.quantise(torch.randn(length, 128), fmt), fmt)
        keys.append(op.gather(plane, where, fmt))
    return plane, tables, keys


def scores_of(q: torch.Tensor, w: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """fp64 [keys] of one row, from the same quantised query."""
    codes, weights = quantise_query(q.unsqueeze(0), w.unsqueeze(0))
    return (weights[0].double().unsqueeze(-1) * (codes[0].double() @ keys.double().T).relu()).sum(0)


def check_rows(
    got: torch.Tensor,
    q: torch.Tensor,
    w: torch.Tensor,
    rows: QueryRows,
    keys: list[torch.Tensor],
    k: int,
    slack: float = 1e-4,
) -> None:
    """A right count of ascending visible rows; whatever differs from the exact set scores like the k-th best, give or
    take `slack` of the largest score. (A Hopper's FP8 units keep about 14 bits of a running sum: 2e-4 was seen.)"""
    for i, (seq, last) in enumerate(zip(rows.seq.tolist(), rows.last_row.tolist())):
        chosen = got[i][got[i] >= 0].long()
        seen = max(last - rows.first_row + 1, 0)
        assert len(chosen) == min(seen, k)
        assert torch.equal(got[i, : len(chosen)].long(), chosen)
        assert (chosen.diff() > 0).all()
        if not len(chosen):
            continue
        assert chosen[0] >= rows.first_row
        assert chosen[-1] <= last
        scores = scores_of(q[i], w[i], keys[seq])[rows.first_row : last + 1]
        kth = scores.topk(len(chosen)).values[-1]
        give = slack * scores.abs().max()
        assert (scores[chosen - rows.first_row] >= kth - give).all()
        missed = scores.index_fill(0, chosen - rows.first_row, -torch.inf)
        assert missed.max() <= kth + give


def on(rows: QueryRows, device: torch.device) -> QueryRows:
    return QueryRows(rows.seq.to(device), rows.last_row.to(device), rows.block_tables.to(device), rows.first_row)


def best(scores: torch.Tensor, last_row: int, first_row: int, k: int) -> list[int]:
    """Positions of the k best visible scores, ascending; of equal scores the lower position."""
    visible = range(first_row, last_row + 1)
    return sorted(sorted(visible, key=lambda s: (-scores[s].item(), s))[:k])
