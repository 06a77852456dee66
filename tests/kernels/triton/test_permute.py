"""Rows brought together by expert and summed again."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from headrace.kernels.experts.permute import combine, permute, plan_places


@pytest.mark.parametrize("ids", [
    torch.randint(0, 9, (23, 3)),
    torch.full((11, 3), 4),
    torch.full((5, 3), 8),
    torch.randint(3, 5, (1, 3)),
])  # fmt: skip
def test_every_local_pair_has_its_place(device: torch.device, ids: torch.Tensor) -> None:
    """Experts 2..6 are here. Places are in tiles of their expert, in the order of the pairs."""
    local, tile = ids.flatten() - 2, 8
    places = plan_places(local.to(device), 5, tile)
    place, expert = places.place.cpu(), places.expert.cpu()
    here = (local >= 0) & (local < 5)
    assert torch.equal(place >= 0, here)
    used = int(places.tiles)
    assert used == sum(-(-int((local == e).sum()) // tile) for e in range(5))
    assert used * tile <= places.rows
    for e in range(5):
        mine = place[local == e]
        assert torch.equal(mine, torch.arange(len(mine), dtype=torch.int32) + (mine[0] if len(mine) else 0))
        assert not len(mine) or int(mine[0]) % tile == 0
        assert bool((expert[mine.long() // tile] == e).all())


def test_out_and_back(device: torch.device) -> None:
    rows, width, top = 13, 384, 3
    ids = torch.stack([torch.randperm(6)[:top] for _ in range(rows)])
    codes = torch.randint(0, 255, (rows, width), dtype=torch.uint8)
    scales, gains = torch.rand(rows, 3), torch.rand(rows, top)
    places = plan_places((ids.flatten() - 1).to(device), 4, 16)
    got = [x.cpu() for x in permute(codes.to(device), scales.to(device), gains.to(device), places)]
    place = places.place.cpu().view(rows, top)
    for row in range(rows):
        for j in range(top):
            at = int(place[row, j])
            if at >= 0:
                assert torch.equal(got[0].view(torch.uint8)[at], codes[row])
                assert torch.equal(got[1][at], scales[row])
                assert got[2][at] == gains[row, j]
    parts = torch.full((places.rows, width), torch.nan).bfloat16()
    parts[place[place >= 0].long()] = torch.randn(int((place >= 0).sum()), width).bfloat16()
    out = torch.empty(rows, width, dtype=torch.float64, device=device)
    combine(parts.to(device), places.place, out, top)
    padded = torch.where(place[..., None] >= 0, parts[place.clamp_min(0).long()].double(), 0.0)
    assert torch.equal(out.cpu(), padded.sum(1))
