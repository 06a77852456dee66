"""Slab layout: where each plane of a block lies. Pure: no torch.

A slab holds the planes of one block of 64 tokens in one order: latent planes of layers 0..n-1, latent plane of the MTP
layer, index-key planes of the full-indexer layers, index keys of the MTP layer. The host stride is the payload rounded
up to 4,096 bytes.
"""

import dataclasses
import hashlib

from headrace.kernels.formats import BLOCK_TOKENS, FORMATS, RowFormat

SLOT_ALIGN_BYTES = 4096


@dataclasses.dataclass(frozen=True, slots=True)
class SlabLayout:
    """Layout of one model's blocks. `full_layers` are the layers that own an indexer, ascending."""

    num_layers: int
    full_layers: tuple[int, ...]
    has_mtp: bool
    row_format: str

    @property
    def format(self) -> RowFormat:
        return FORMATS[self.row_format]

    @property
    def latent_planes(self) -> int:
        """Number of latent planes; plane i < num_layers is layer i, plane num_layers is the MTP layer."""
        return self.num_layers + int(self.has_mtp)

    @property
    def index_planes(self) -> int:
        """Number of index-key planes: full layers in ascending order, then the MTP layer."""
        return len(self.full_layers) + int(self.has_mtp)

    def index_plane(self, layer: int) -> int:
        """Index-key plane of a full layer, or of the MTP layer (`layer == num_layers`). KeyError if it has none."""
        if self.has_mtp and layer == self.num_layers:
            return len(self.full_layers)
        if layer not in self.full_layers:
            raise KeyError(f"layer {layer} shares another layer's index; full layers are {self.full_layers}")
        return self.full_layers.index(layer)

    @property
    def latent_bytes(self) -> int:
        """Bytes of all latent planes of a slab; the index planes start at this offset."""
        return self.latent_planes * self.format.latent_plane_bytes

    @property
    def payload_bytes(self) -> int:
        return self.latent_bytes + self.index_planes * self.format.index_plane_bytes

    @property
    def slot_bytes(self) -> int:
        """Stride of a slab in host memory and on disk."""
        return -(-self.payload_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES

    def fingerprint(self) -> bytes:
        """32 bytes that differ whenever two layouts place or encode any byte differently."""
        full = ",".join(map(str, self.full_layers))
        text = f"slab-v1|{self.row_format}|{BLOCK_TOKENS}|{self.num_layers}|{full}|{int(self.has_mtp)}"
        return hashlib.sha256(text.encode()).digest()
