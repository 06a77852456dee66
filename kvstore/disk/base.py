"""Contracts of the disk tier: the file that holds slabs, and the record that names each of them."""

import dataclasses
from typing import Protocol

from headrace.ids import BlockName


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """What stands in front of a slab on disk."""

    name: BlockName
    parent: BlockName | None
    depth: int
    digest: bytes
    """XXH3-128 of the payload, 16 bytes, taken when the block was first written by a rank."""
    generation: int
    """Grows with every write to the file: of two records of one name the greater is the newer."""
    tenant: bytes = b""
    """Whose it is, 8 bytes; empty: nobody's."""


class SlabFile(Protocol):
    """Slots of one file. Every call blocks and may come from any thread; calls about one slot never overlap, which is
    the tier's business. Raises OSError when the device says so, also for short transfers: nothing counts as done then.
    """

    slots: int
    slot_bytes: int
    """Of a slab, a multiple of 4,096. A view passed in or out has exactly so many bytes."""

    def records(self) -> list[Record | None]:
        """Every slot's record; None where there is none or it is damaged."""
        ...

    def write(self, slot: int, record: Record, slab: memoryview) -> None:
        """Record and slab in one transfer."""
        ...

    def read(self, slot: int, into: memoryview) -> Record | None:
        """The slab and the record in front of it (None: damaged). Says nothing about whether the bytes are right."""
        ...

    def erase(self, slot: int) -> None:
        """Make the slot's record invalid."""
        ...

    def sync(self) -> None:
        """What was written so far survives a power failure."""
        ...

    def probe(self) -> None:
        """Write and read back one page that belongs to no slot. Raises OSError if the device does not work."""
        ...

    def close(self) -> None: ...
