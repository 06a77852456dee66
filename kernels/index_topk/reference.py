"""Definition of the indexer's selection.

Scores are computed in tiles of 8 query rows by 1,024 keys, both zero padded, so a score's bits depend on its query row
and key alone. The selection is an exact set: of equal scores the lower cache row wins.
"""

import torch
from torch import Tensor

from headrace.kernels import fp8
from headrace.kernels.base import KernelContext, QueryRows
from headrace.kernels.formats import RowFormat
from headrace.kernels.index_keys.reference import ReferenceIndexKeys
from headrace.kernels.rows import history_slots, sequence_groups
from headrace.kernels.tiles import KEY_TILE, pad_rows

QUERY_TILE = 8
"""Query rows of one score tile: a verification has 5 of them."""


class ReferenceIndexTopk:
    def __init__(self) -> None:
        self._keys = ReferenceIndexKeys()

    def __call__(self, q: Tensor, weights: Tensor, rows: QueryRows, plane: Tensor, fmt: RowFormat, k: int) -> Tensor:
        selection = torch.full((q.shape[0], k), -1, dtype=torch.int32, device=q.device)
        if fmt.fp8:
            q, weights = quantise_query(q, weights)
        for seq, members, last in sequence_groups(rows):
            seen = last + 1
            if seen <= rows.first_row:
                continue
            last_row = rows.last_row[members]
            if seen - rows.first_row <= k:
                selection[members] = select_all(last_row, rows.first_row, k)
                continue
            keys, scales = self._keys.gather_blocks(plane, history_slots(rows, seq, seen), fmt, KEY_TILE)
            bounds = (rows.first_row, last_row)
            selection[members] = self._select(q[members], weights[members], keys, scales, bounds, k)
        return selection

    def _select(
        self, q: Tensor, w: Tensor, keys: Tensor, scales: Tensor | None, bounds: tuple[int, Tensor], k: int
    ) -> Tensor:
        first_row, last_row = bounds
        position = torch.arange(keys.shape[0], device=q.device)
        chosen = []
        for start in range(0, q.shape[0], QUERY_TILE):
            part = slice(start, start + QUERY_TILE)
            bound = last_row[part]
            scores = score_tile(pad_rows(q[part], QUERY_TILE), pad_rows(w[part], QUERY_TILE), keys)
            if scales is not None:
                # Key scales are positive, so they may be applied after relu and sum; powers of two change no bit.
                scores *= scales
            scores = scores[: bound.shape[0]]
            hidden = (position > bound.unsqueeze(1)) | (position < first_row)
            chosen.append(top_rows(scores.masked_fill_(hidden, -torch.inf), k))
        selection = torch.cat(chosen)
        few = last_row - first_row + 1 <= k
        return torch.where(few.unsqueeze(1), select_all(last_row, first_row, k), selection)


def quantise_query(q: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 per row and head with a power-of-two scale, which moves into the head weight. Returns the codes' values."""
    scale = fp8.power_of_two_scale(q.abs().amax(-1))
    return fp8.decode(fp8.encode(q / scale.unsqueeze(-1))), weights * scale


def score_tile(q: Tensor, w: Tensor, keys: Tensor) -> Tensor:
    """q [8, Hi, 128], w [8, Hi], keys [multiple of 1024, 128] -> scores [8, keys]."""
    rows, heads, _ = q.shape
    flat = q.reshape(rows * heads, -1)
    scores = torch.empty((rows, keys.shape[0]), dtype=torch.float32, device=q.device)
    for start in range(0, keys.shape[0], KEY_TILE):
        products = torch.mm(flat, keys[start : start + KEY_TILE].t()).relu_().view(rows, heads, KEY_TILE)
        torch.sum(products.mul_(w.unsqueeze(-1)), 1, out=scores[:, start : start + KEY_TILE])
    return scores


def top_rows(scores: Tensor, k: int) -> Tensor:
    """[t, n] with n >= k -> int32 [t, k], positions of the k best, ascending; ties to the lower position."""
    threshold = scores.topk(k, sorted=False).values.amin(-1, keepdim=True)
    better = scores > threshold
    equal = scores == threshold
    wanted = k - better.sum(-1, keepdim=True)
    chosen = better | (equal & (equal.cumsum(-1) <= wanted))
    return chosen.nonzero()[:, 1].view(scores.shape[0], k).to(torch.int32)


def select_all(last_row: Tensor, first_row: int, k: int) -> Tensor:
    """int32 [t, k]: first_row..last_row, then -1."""
    rows = torch.arange(first_row, first_row + k, device=last_row.device)
    return torch.where(rows <= last_row.unsqueeze(1), rows, -1).to(torch.int32)


def create(context: KernelContext) -> ReferenceIndexTopk:
    return ReferenceIndexTopk()
