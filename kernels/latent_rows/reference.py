"""Definition of the latent row formats of `kernels/formats.py`, byte by byte."""

import torch
from torch import Tensor

from headrace.kernels import fp8
from headrace.kernels.base import KernelContext
from headrace.kernels.bytewise import as_bytes, from_bytes
from headrace.kernels.formats import BLOCK_TOKENS, LATENT_DIM, ROPE_DIM, SCALE_TILE, RowFormat
from headrace.kernels.scratch import Scratch

TILES = LATENT_DIM // SCALE_TILE
SCALES_END = LATENT_DIM + 4 * TILES
WIDTH = LATENT_DIM + ROPE_DIM
PIECE_BLOCKS = 8
"""Blocks decoded at a time: temporaries stay in the cache of a core."""


class ReferenceLatentRows:
    exact_dtype = torch.bfloat16
    """Holds every value of every format exactly: 4 significant bits times a power of two, or bf16 itself."""

    def __init__(self) -> None:
        self._scratch = Scratch()

    def quantise(self, latent: Tensor, rope: Tensor, fmt: RowFormat) -> Tensor:
        if not fmt.fp8:
            return as_bytes(torch.cat((latent, rope), -1).to(torch.bfloat16))
        if not fmt.tiled:
            return fp8.encode(torch.cat((latent, rope), -1))
        tiles = latent.reshape(latent.shape[0], TILES, SCALE_TILE)
        scales = fp8.power_of_two_scale(tiles.abs().amax(-1))
        codes = fp8.encode(tiles / scales.unsqueeze(-1)).view(latent.shape)
        return torch.cat((codes, as_bytes(scales), as_bytes(rope.to(torch.bfloat16))), -1)

    def write(self, plane: Tensor, cache_rows: Tensor, row_bytes: Tensor) -> None:
        keep = cache_rows >= 0
        plane.view(-1, plane.shape[-1])[cache_rows[keep]] = row_bytes[keep]

    def gather(self, plane: Tensor, cache_rows: Tensor, fmt: RowFormat) -> Tensor:
        rows = plane.view(-1, plane.shape[-1]).index_select(0, cache_rows)
        out = torch.empty((rows.shape[0], WIDTH), dtype=self.exact_dtype, device=rows.device)
        self._decode(rows, fmt, out)
        return out.to(torch.float32)

    def gather_blocks(self, plane: Tensor, slots: Tensor, fmt: RowFormat) -> Tensor:
        """All 64 rows of each slot: bf16 [64 * n, 576], valid until the next call. Faster than row by row."""
        count = slots.shape[0] * BLOCK_TOKENS
        out = self._scratch.take("history", (count, WIDTH), self.exact_dtype, plane.device)
        for start in range(0, slots.shape[0], PIECE_BLOCKS):
            piece = plane.index_select(0, slots[start : start + PIECE_BLOCKS]).view(-1, plane.shape[-1])
            first = start * BLOCK_TOKENS
            self._decode(piece, fmt, out[first : first + piece.shape[0]])
        return out

    def _decode(self, rows: Tensor, fmt: RowFormat, out: Tensor) -> None:
        if not fmt.fp8:
            out.copy_(from_bytes(rows, torch.bfloat16))
        elif not fmt.tiled:
            fp8.decode(rows, out=out)
        else:
            scales = from_bytes(rows[:, LATENT_DIM:SCALES_END], torch.float32)
            codes = fp8.decode(rows[:, :LATENT_DIM], dtype=out.dtype).view(*scales.shape, SCALE_TILE)
            out[:, :LATENT_DIM] = codes.mul_(scales.to(out.dtype).unsqueeze(-1)).flatten(1)
            out[:, LATENT_DIM:] = from_bytes(rows[:, SCALES_END:], torch.bfloat16)


def create(context: KernelContext) -> ReferenceLatentRows:
    return ReferenceLatentRows()
