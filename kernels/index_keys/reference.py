"""Definition of the index-key plane: 64 keys of 128 values, then (fp8 formats) 64 fp32 scales.

`plain576` keys carry scale 1.0 and saturate; `tile656` keys a power-of-two scale per key.
"""

import torch
from torch import Tensor

from headrace.kernels import fp8
from headrace.kernels.base import KernelContext
from headrace.kernels.bytewise import as_bytes, from_bytes
from headrace.kernels.formats import BLOCK_TOKENS, INDEX_DIM, RowFormat
from headrace.kernels.scratch import Scratch

KEYS_END = BLOCK_TOKENS * INDEX_DIM
PIECE_BLOCKS = 8
"""Blocks decoded at a time: temporaries stay in the cache of a core."""


class ReferenceIndexKeys:
    def __init__(self) -> None:
        self._scratch = Scratch()

    def quantise(self, keys: Tensor, fmt: RowFormat) -> Tensor:
        if not fmt.fp8:
            return as_bytes(keys.to(torch.bfloat16))
        amax = keys.abs().amax(-1, keepdim=True)
        scales = fp8.power_of_two_scale(amax) if fmt.tiled else torch.ones_like(amax)
        return torch.cat((fp8.encode(keys / scales), as_bytes(scales)), -1)

    def write(self, plane: Tensor, cache_rows: Tensor, row_bytes: Tensor, fmt: RowFormat) -> None:
        keep = cache_rows >= 0
        slot, row = cache_rows[keep] // BLOCK_TOKENS, cache_rows[keep] % BLOCK_TOKENS
        kept = row_bytes[keep]
        keys, scales = self._views(plane, fmt)
        keys[slot, row] = kept[:, : keys.shape[-1]]
        if scales is not None:
            scales[slot, row] = kept[:, INDEX_DIM:]

    def gather(self, plane: Tensor, cache_rows: Tensor, fmt: RowFormat) -> Tensor:
        slot, row = cache_rows // BLOCK_TOKENS, cache_rows % BLOCK_TOKENS
        keys, scales = self._views(plane, fmt)
        codes = keys[slot, row]
        if scales is None:
            return from_bytes(codes, torch.bfloat16).to(torch.float32)
        return fp8.decode(codes) * from_bytes(scales[slot, row], torch.float32)

    def gather_blocks(self, plane: Tensor, slots: Tensor, fmt: RowFormat, tile: int) -> tuple[Tensor, Tensor | None]:
        """Keys of whole blocks, unscaled: (fp32 [n, 128], fp32 scales [n] or None), n = 64 rows a block rounded up to
        `tile` rows, the last of them zero. The keys are valid until the next call."""
        rows = slots.shape[0] * BLOCK_TOKENS
        padded = -(-rows // tile) * tile
        keys = self._scratch.take("keys", (padded, INDEX_DIM), torch.float32, plane.device)
        keys[rows:] = 0
        scales = torch.zeros(padded, dtype=torch.float32, device=plane.device) if fmt.fp8 else None
        for start in range(0, slots.shape[0], PIECE_BLOCKS):
            piece = plane.index_select(0, slots[start : start + PIECE_BLOCKS])
            part = slice(start * BLOCK_TOKENS, (start + piece.shape[0]) * BLOCK_TOKENS)
            self._decode(piece, fmt, keys[part])
            if scales is not None:
                scales[part] = piece[:, KEYS_END:].contiguous().view(torch.float32).flatten()
        return keys, scales

    def _decode(self, blocks: Tensor, fmt: RowFormat, out: Tensor) -> None:
        if fmt.fp8:
            fp8.decode(blocks[:, :KEYS_END].reshape(-1, INDEX_DIM), out=out)
        else:
            out.copy_(blocks.view(torch.bfloat16).view(-1, INDEX_DIM))

    @staticmethod
    def _views(plane: Tensor, fmt: RowFormat) -> tuple[Tensor, Tensor | None]:
        """(keys [slots, 64, key bytes], scales [slots, 64, 4] or None), views of the plane."""
        slots = plane.shape[0]
        if not fmt.fp8:
            return plane.view(slots, BLOCK_TOKENS, 2 * INDEX_DIM), None
        keys = plane[:, :KEYS_END].view(slots, BLOCK_TOKENS, INDEX_DIM)
        return keys, plane[:, KEYS_END:].view(slots, BLOCK_TOKENS, 4)


def create(context: KernelContext) -> ReferenceIndexKeys:
    return ReferenceIndexKeys()
