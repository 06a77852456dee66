"""Bytes of one cached row and of one block of index keys. Pure arithmetic: no torch.

Latent rows (one a token and layer):

    tile656    0..511  512 x e4m3    512..527  4 x fp32 scale, one per 128 values    528..655  64 x bf16 rope
    plain576   0..511  512 x e4m3    512..575  64 x e4m3 rope        (scale 1.0, saturating)
    bf16       0..1023 512 x bf16    1024..1151 64 x bf16 rope       (parity and baseline)

Index keys (one plane of one block of 64 tokens, full-indexer layers only), planar:

    fp8        0..8191 64 x 128 x e4m3    8192..8447 64 x fp32 scale
    bf16       0..16383 64 x 128 x bf16                              (goes with latent format bf16)

Scales are powers of two: 2^ceil(log2(max(amax, 1e-4) / 448)).
"""

import dataclasses

BLOCK_TOKENS = 64
LATENT_DIM = 512
ROPE_DIM = 64
INDEX_DIM = 128
SCALE_TILE = 128
FP8_MAX = 448.0
SCALE_FLOOR = 1e-4


@dataclasses.dataclass(frozen=True, slots=True)
class RowFormat:
    """One latent row format and the index-key plane that goes with it."""

    name: str
    latent_row_bytes: int
    index_plane_bytes: int
    """Bytes of the index keys of one layer and one block (64 tokens)."""
    fp8: bool
    tiled: bool
    """True: one power-of-two scale per 128 latent values is stored in the row."""

    @property
    def latent_plane_bytes(self) -> int:
        return BLOCK_TOKENS * self.latent_row_bytes


TILE656 = RowFormat("tile656", 512 + 16 + 128, BLOCK_TOKENS * (INDEX_DIM + 4), fp8=True, tiled=True)
PLAIN576 = RowFormat("plain576", 512 + 64, BLOCK_TOKENS * (INDEX_DIM + 4), fp8=True, tiled=False)
BF16 = RowFormat("bf16", 1024 + 128, BLOCK_TOKENS * INDEX_DIM * 2, fp8=False, tiled=False)

FORMATS = {f.name: f for f in (TILE656, PLAIN576, BF16)}
