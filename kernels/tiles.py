"""Fixed-shape products: what makes a row's result depend on that row alone.

A matrix product library picks its algorithm, and with it the order of its sums, by shape. So in deterministic mode
every product has one shape: 16 rows, the last tile padded with zeros.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

ROW_TILE = 16
KEY_TILE = 1024


def pad_rows(x: Tensor, tile: int = ROW_TILE) -> Tensor:
    """Zero rows up to a multiple of `tile`; contiguous."""
    missing = -x.shape[0] % tile
    if not missing:
        return x.contiguous()
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing))


def matmul_rows(x: Tensor, matrix: Tensor, deterministic: bool) -> Tensor:
    """[t, a] @ [a, b] -> [t, b]."""
    if not deterministic:
        return x @ matrix
    padded = pad_rows(x)
    out = torch.empty((padded.shape[0], matrix.shape[1]), dtype=x.dtype, device=x.device)
    for start in range(0, padded.shape[0], ROW_TILE):
        torch.mm(padded[start : start + ROW_TILE], matrix, out=out[start : start + ROW_TILE])
    return out[: x.shape[0]]


def matmul_heads(x: Tensor, matrix: Tensor, deterministic: bool) -> Tensor:
    """[t, H, a] and [H, a, b] -> [t, H, b]."""
    if not deterministic:
        return torch.einsum("tha,hab->thb", x, matrix)
    padded = pad_rows(x).transpose(0, 1)
    out = torch.empty((padded.shape[1], *matrix.shape[::2]), dtype=x.dtype, device=x.device)
    for start in range(0, padded.shape[1], ROW_TILE):
        tile = torch.bmm(padded[:, start : start + ROW_TILE].contiguous(), matrix)
        out[start : start + ROW_TILE] = tile.transpose(0, 1)
    return out[: x.shape[0]]
