"""Definition of sparse MLA: dequantise the selected rows, exact fp32 attention over them.

Each query row is a problem of its own with one shape (H heads by K rows), so its bits depend on nothing else. A
sequence with many query rows has its history dequantised once instead of K rows per query; the values are the same.
"""

import torch
from torch import Tensor

from headrace.kernels.base import KernelContext, QueryRows
from headrace.kernels.formats import LATENT_DIM, RowFormat
from headrace.kernels.latent_rows.reference import ReferenceLatentRows
from headrace.kernels.rows import cache_rows, history_slots, sequence_groups


class ReferenceSparseMla:
    def __init__(self) -> None:
        self._rows = ReferenceLatentRows()

    def __call__(
        self, q: Tensor, plane: Tensor, selection: Tensor, rows: QueryRows, fmt: RowFormat, scale: float
    ) -> Tensor:
        out = torch.zeros((*q.shape[:2], LATENT_DIM), dtype=torch.float32, device=q.device)
        k = selection.shape[1]
        for seq, members, last in sequence_groups(rows):
            if last < rows.first_row:
                continue
            chosen = selection[members].long()
            safe = chosen.clamp_min(rows.first_row)
            if members.shape[0] * k > last + 1:
                values = self._rows.gather_blocks(plane, history_slots(rows, seq, last + 1), fmt)
                where = safe
            else:
                place = cache_rows(rows.block_tables, torch.full_like(safe, seq), safe)
                values = self._rows.gather(plane, place.flatten(), fmt)
                where = torch.arange(safe.numel(), device=q.device).view(safe.shape)
            bias = torch.zeros(chosen.shape, device=q.device).masked_fill_(chosen < 0, -torch.inf)
            empty = (chosen < 0).all(1).tolist()
            picked = values.new_empty((k, values.shape[1]))
            for i, row in enumerate(members.tolist()):
                if not empty[i]:
                    torch.index_select(values, 0, where[i], out=picked)
                    attend(q[row], picked, bias[i], scale, out[row])
        return out


def attend(q: Tensor, values: Tensor, bias: Tensor, scale: float, out: Tensor) -> None:
    """q [H, 576], values [K, 576], bias [K] (0 or -inf) -> out [H, 512]."""
    scores = torch.mm(q, values.t()).mul_(scale).add_(bias)
    torch.mm(torch.softmax(scores, -1), values[:, :LATENT_DIM], out=out)


def create(context: KernelContext) -> ReferenceSparseMla:
    return ReferenceSparseMla()
