"""Address arithmetic over block tables, shared by the reference ops."""

import torch
from torch import Tensor

from headrace.kernels.base import QueryRows
from headrace.kernels.formats import BLOCK_TOKENS


def cache_rows(block_tables: Tensor, seq: Tensor, rows: Tensor) -> Tensor:
    """Request-relative rows of sequences -> cache rows (slot * 64 + row in block); -1 where there is no block."""
    slots = block_tables[seq, rows // BLOCK_TOKENS]
    return torch.where(slots < 0, -1, slots * BLOCK_TOKENS + rows % BLOCK_TOKENS)


def sequence_groups(rows: QueryRows) -> list[tuple[int, Tensor, int]]:
    """(sequence, its query rows int64, its largest last_row) for every sequence that has rows. Cached in `rows`."""
    if rows.groups is None:
        groups = []
        for seq in torch.unique(rows.seq).tolist():
            members = (rows.seq == seq).nonzero().flatten()
            groups.append((seq, members, int(rows.last_row[members].max())))
        rows.groups = groups
    return rows.groups


def history_slots(rows: QueryRows, seq: int, length: int) -> Tensor:
    """Slots of the blocks that hold request-relative rows 0..length-1 of one sequence. A missing block reads slot 0:
    its rows are never visible."""
    return rows.block_tables[seq, : -(-length // BLOCK_TOKENS)].clamp_min(0)
