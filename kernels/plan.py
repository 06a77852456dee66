"""Work of unequal groups (rows of experts, query rows of sequences) cut into tiles on the device, without asking the
device for a number: the list of tiles has room for the worst case, and what is left over says so."""

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(slots=True)
class TilePlan:
    """All int32, on the device."""

    members: Tensor
    """[n] indices of the members, sorted by group, ascending inside one; members of no group last"""
    group: Tensor
    """[tiles] group of each tile, or the number of groups where there is no tile"""
    start: Tensor
    end: Tensor
    """[tiles] places in `members`: a tile starts at `start` and its group ends at `end`"""


def plan_tiles(group: Tensor, groups: int, rows_a_tile: int) -> TilePlan:
    """`group` integers [n]; outside 0..groups-1: of no group."""
    count = group.shape[0]
    group = torch.where((group >= 0) & (group < groups), group, groups).long()
    members = group.argsort(stable=True)
    sizes = torch.zeros(groups + 1, dtype=torch.int64, device=group.device)
    sizes = sizes.scatter_add_(0, group, torch.ones_like(group))[:groups]
    first = sizes.cumsum(0) - sizes
    tiles = (sizes + rows_a_tile - 1) // rows_a_tile
    tile_end = tiles.cumsum(0)
    index = torch.arange(count // rows_a_tile + min(groups, count), device=group.device)
    owner = torch.searchsorted(tile_end, index, right=True)
    known = owner.clamp_max(groups - 1)
    start = first[known] + (index - (tile_end - tiles)[known]) * rows_a_tile
    return TilePlan(members.int(), owner.int(), start.int(), (first + sizes)[known].int())
