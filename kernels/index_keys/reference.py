"""Definition of the index-key plane: 64 keys of 128 values, then (fp8 formats) 64 fp32 scales.

`plain576` keys carry scale 1.0 and saturate; `tile656` keys a power-of-two scale per key.
"""

import torch
from torch import Tensor

from headrace.kernels import fp8
from headrace.kernels.base import KernelContext
from headrace.kernels.formats import BLOCK_TOKENS, INDEX_DIM, RowFormat

KEYS_END = BLOCK_TOKENS * INDEX_DIM


class ReferenceIndexKeys:
    def quantise(self, keys: Tensor, fmt: RowFormat) -> Tensor:
        if not fmt.fp8:
            return keys.to(torch.bfloat16).contiguous().view(torch.uint8)
        amax = keys.abs().amax(-1, keepdim=True)
        scales = fp8.power_of_two_scale(amax) if fmt.tiled else torch.ones_like(amax)
        return torch.cat((fp8.encode(keys / scales), scales.view(torch.uint8)), -1)

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
            return codes.view(torch.bfloat16).to(torch.float32)
        return fp8.decode(codes) * scales[slot, row].view(torch.float32)

    def gather_blocks(self, plane: Tensor, slots: Tensor, fmt: RowFormat, tile: int) -> tuple[Tensor, Tensor | None]:
        """Keys of whole blocks, unscaled: (fp32 [n, 128], fp32 scales [n] or None), n = 64 rows a block rounded up to
        `tile` rows, the last of them zero."""
        blocks = plane.index_select(0, slots)
        rows = blocks.shape[0] * BLOCK_TOKENS
        padded = -(-rows // tile) * tile
        keys = torch.empty((padded, INDEX_DIM), dtype=torch.float32, device=plane.device)
        keys[rows:] = 0
        if not fmt.fp8:
            keys[:rows] = blocks.view(torch.bfloat16).view(rows, INDEX_DIM)
            return keys, None
        fp8.decode(blocks[:, :KEYS_END].reshape(rows, INDEX_DIM), out=keys[:rows])
        scales = keys.new_zeros(padded)
        scales[:rows] = blocks[:, KEYS_END:].contiguous().view(torch.float32).flatten()
        return keys, scales

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
