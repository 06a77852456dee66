"""Restores dealt over the ranks of a group: rank i mod n brings block i over its own host link, then the ranks exchange
the bytes. Every rank needs every block, and links between GPUs are many times faster than those to the host.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.kvstore.copiers.ahead import Loaded
from headrace.kvstore.pool import DevicePool
from headrace.prefill.base import Restoring
from headrace.prefill.plan import RestorePlan, StorePlan
from headrace.prefill.slabs import ArenaRestoring, ArenaSlabs

BATCH_BLOCKS = 64
"""Blocks a rank sends at once: bounds the memory of the exchange."""


class ByteGroup(Protocol):
    """Ranks that exchange tensors of one shape."""

    rank: int
    size: int

    def all_gather(self, sent: Tensor) -> list[Tensor]:
        """What each rank sent, in their order."""
        ...


class DefaultGroup:
    """The default process group."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def all_gather(self, sent: Tensor) -> list[Tensor]:
        got = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(got, sent)
        return got


class ShardedSlabs:
    """`slabs` does this rank's share. The ranks of the group make the same calls with equal restores; a
    rank that cannot reach the host tier takes part all the same, and what it should have brought counts as bad."""

    def __init__(self, slabs: ArenaSlabs, pool: DevicePool, group: ByteGroup | None = None) -> None:
        """`group` None: the default process group."""
        self._slabs, self._pool, self._group = slabs, pool, group or DefaultGroup()
        self._rank, self._size = self._group.rank, self._group.size

    def enter(self, arena: str) -> bool:
        return self._slabs.enter(arena)

    def store(self, stores: Sequence[StorePlan]) -> list[bytes]:
        return self._slabs.store(stores)

    def begin_load(self, restores: Sequence[RestorePlan], *, reachable: bool) -> Restoring:
        mine = restores[self._rank :: self._size]
        wrong = set(self._slabs.begin_load(mine, reachable=reachable).finish())
        bad: list[int] = []
        for start in range(0, len(restores), BATCH_BLOCKS * self._size):
            part = restores[start : start + BATCH_BLOCKS * self._size]
            first = start // self._size
            good = [i not in wrong for i in range(first, first + len(part[self._rank :: self._size]))]
            bad += [start + i for i in self._exchange(part, good)]
        return ArenaRestoring(Loaded(self._pool), bad)

    def _exchange(self, restores: Sequence[RestorePlan], good: Sequence[bool]) -> list[int]:
        """Send this rank's blocks of the batch, write the others'; returns the indices that nobody has."""
        rows = -(-len(restores) // self._size)
        width = self._pool.layout.payload_bytes
        mine = restores[self._rank :: self._size]
        sent = torch.zeros((rows, width + 1), dtype=torch.uint8, device=self._pool.device)
        if mine:
            pack(self._pool, [restore.device_slot for restore in mine], sent[: len(mine), :width])
            sent[: len(mine), width] = torch.tensor(good, dtype=torch.uint8, device=sent.device)
        got = self._group.all_gather(sent)
        bad = []
        for rank, blocks in enumerate(got):
            theirs = restores[rank :: self._size]
            flags = blocks[: len(theirs), width].tolist()
            bad += [rank + i * self._size for i, fine in enumerate(flags) if not fine]
            if rank != self._rank and theirs:
                unpack(self._pool, [restore.device_slot for restore in theirs], blocks[: len(theirs), :width])
        return sorted(bad)


def pack(pool: DevicePool, slots: Sequence[int], blocks: Tensor) -> None:
    """Whole blocks as slabs into uint8 [blocks, payload bytes]."""
    where = torch.as_tensor(slots, device=pool.device)
    split = pool.layout.latent_bytes
    blocks[:, :split] = pool.latent.index_select(1, where).transpose(0, 1).reshape(len(slots), -1)
    blocks[:, split:] = pool.index.index_select(1, where).transpose(0, 1).reshape(len(slots), -1)


def unpack(pool: DevicePool, slots: Sequence[int], blocks: Tensor) -> None:
    """The reverse of `pack`."""
    where = torch.as_tensor(slots, device=pool.device)
    split, count = pool.layout.latent_bytes, len(slots)
    for planes, part in ((pool.latent, blocks[:, :split]), (pool.index, blocks[:, split:])):
        shape = (count, planes.shape[0], *planes.shape[2:])
        planes.index_copy_(1, where, part.reshape(shape).transpose(0, 1))
