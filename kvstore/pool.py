"""A rank's device pool: the planes of all slots, plane-major, as every kernel addresses them. Owns memory, decides
nothing: which slot holds what is `device_index`'s business."""

from collections.abc import Sequence

import torch

from headrace.kernels.formats import BLOCK_TOKENS
from headrace.kvstore.layout import SlabLayout


class DevicePool:
    """`model.base.CachePlanes` for `slots` blocks, plus what the pools do to whole slots. New pools are all zero."""

    def __init__(self, layout: SlabLayout, slots: int, device: torch.device | str) -> None:
        if slots < 1:
            raise ValueError(f"a pool needs at least one slot, got {slots}")
        row = layout.format
        self.layout = layout
        self.slots = slots
        self.device = torch.device(device)
        self.latent = torch.zeros(
            (layout.latent_planes, slots, BLOCK_TOKENS, row.latent_row_bytes), dtype=torch.uint8, device=self.device
        )
        self.index = torch.zeros(
            (layout.index_planes, slots, row.index_plane_bytes), dtype=torch.uint8, device=self.device
        )

    def zero(self, slots: Sequence[int]) -> None:
        """Clear whole slots: unused rows of a partial block must be zero before it is published."""
        if slots:
            where = torch.as_tensor(slots, dtype=torch.int64, device=self.device)
            self.latent.index_fill_(1, where, 0)
            self.index.index_fill_(1, where, 0)

    def copy(self, source: int, target: int) -> None:
        """Copy one whole slot to another of the same pool (one private block, several samples)."""
        self.latent[:, target].copy_(self.latent[:, source])
        self.index[:, target].copy_(self.index[:, source])
