"""Layer-ahead restore: planes arrive in groups of layers, and whoever reads a plane waits for its group alone. A block
is visible to nobody else before all its groups are there: readiness is private to the reader.
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from headrace.kvstore.layout import SlabLayout
from headrace.kvstore.pool import DevicePool


@dataclasses.dataclass(frozen=True, slots=True)
class PlaneGroup:
    """Consecutive planes that are copied together: [first, end) of each kind."""

    latent: tuple[int, int]
    index: tuple[int, int]


def plane_groups(layout: SlabLayout, count: int) -> list[PlaneGroup]:
    """`count` groups of about as many layers each, in the order in which a forward pass reads them; the MTP layer comes
    last. Fewer where there are fewer planes."""
    count = max(1, min(count, layout.latent_planes))
    cuts = [layout.latent_planes * i // count for i in range(count + 1)]
    before = [sum(layer < cut for layer in layout.full_layers) for cut in cuts]
    before[-1] = layout.index_planes
    return [
        PlaneGroup((cuts[i], cuts[i + 1]), (before[i], before[i + 1])) for i in range(count)
    ]  # fmt: skip


class Loading(Protocol):
    """A load that has begun. `finish` once, also after an error, before slots or slabs are given to anybody else."""

    latent: "Tensor | AwaitedPlanes"
    index: "Tensor | AwaitedPlanes"

    def finish(self) -> float:
        """Wait until every byte is in place; later work of the current stream waits too. Returns the seconds that the
        copies took."""
        ...


class AwaitedPlanes:
    """The planes of a pool, indexed by plane like the tensor they stand for: `planes[i]` is uint8 [slots, ...]."""

    def __init__(self, planes: Tensor, await_plane: Callable[[int], None]) -> None:
        self._planes, self._await = planes, await_plane

    def __getitem__(self, plane: int) -> Tensor:
        self._await(plane)
        return self._planes[plane]


class Loaded:
    """A load that is complete already."""

    def __init__(self, pool: DevicePool, seconds: float = 0.0) -> None:
        self.latent: Tensor | AwaitedPlanes = pool.latent
        self.index: Tensor | AwaitedPlanes = pool.index
        self._seconds = seconds

    def finish(self) -> float:
        return self._seconds


def group_of_plane(groups: list[PlaneGroup]) -> tuple[list[int], list[int]]:
    """For each latent plane and for each index plane, the number of its group."""
    latent = [g for g, group in enumerate(groups) for _ in range(*group.latent)]
    index = [g for g, group in enumerate(groups) for _ in range(*group.index)]
    return latent, index
