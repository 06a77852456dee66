"""Inputs that look like a model's: quantised random rows in pools with scattered blocks, slowly moving selections."""

import torch
from torch import Tensor

from headrace.kernels.base import QueryRows
from headrace.kernels.formats import BLOCK_TOKENS, INDEX_DIM, LATENT_DIM, ROPE_DIM, RowFormat
from headrace.kernels.index_keys.reference import ReferenceIndexKeys
from headrace.kernels.latent_rows.reference import ReferenceLatentRows

DISTINCT_BLOCKS = 512
"""Blocks of real random rows; a pool repeats them, which no kernel can notice."""


def generator(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def latent_pool(slots: int, fmt: RowFormat, device: torch.device, seed: int) -> Tensor:
    """uint8 [slots, 64, row bytes]"""
    blocks = min(slots, DISTINCT_BLOCKS)
    draw = torch.randn((blocks * BLOCK_TOKENS, LATENT_DIM + ROPE_DIM), device=device, generator=generator(device, seed))
    rows = ReferenceLatentRows().quantise(draw[:, :LATENT_DIM], draw[:, LATENT_DIM:], fmt)
    some = rows.view(blocks, BLOCK_TOKENS, -1)
    return some[torch.arange(slots, device=device) % blocks].contiguous()


def index_pool(slots: int, fmt: RowFormat, device: torch.device, seed: int) -> Tensor:
    """uint8 [slots, index plane bytes]"""
    blocks, op = min(slots, DISTINCT_BLOCKS), ReferenceIndexKeys()
    keys = torch.randn((blocks * BLOCK_TOKENS, INDEX_DIM), device=device, generator=generator(device, seed))
    some = torch.empty((blocks, fmt.index_plane_bytes), dtype=torch.uint8, device=device)
    op.write(some, torch.arange(keys.shape[0], device=device), op.quantise(keys, fmt), fmt)
    return some[torch.arange(slots, device=device) % blocks].contiguous()


def query_rows(sequences: int, rows_each: int, context: int, device: torch.device, seed: int) -> QueryRows:
    """The last `rows_each` rows of sequences of `context` tokens; blocks lie scattered over one pool."""
    blocks = -(-context // BLOCK_TOKENS)
    order = torch.randperm(sequences * blocks, device=device, generator=generator(device, seed))
    seq = torch.arange(sequences, device=device).repeat_interleave(rows_each)
    last = torch.arange(context - rows_each, context, device=device).repeat(sequences)
    return QueryRows(seq, last, order.view(sequences, blocks))


def uniform_selection(rows: int, context: int, k: int, device: torch.device, seed: int) -> Tensor:
    """int32 [rows, k]: k different rows anywhere in the context, ascending."""
    source, parts = generator(device, seed), []
    for start in range(0, rows, 256):
        draw = torch.rand((min(256, rows - start), context), device=device, generator=source)
        parts.append(draw.topk(k, sorted=False).indices.sort().values.int())
    return torch.cat(parts)


def drifting_selection(groups: int, rows_each: int, context: int, k: int, device: torch.device, seed: int) -> Tensor:
    """int32 [groups * rows_each, k], ascending: half of it in the last 8,192 tokens, half anywhere; a row keeps 80 % of
    the row before it in its group."""
    source = generator(device, seed)
    shape = (groups, rows_each, k)
    draw = torch.rand(shape, device=device, generator=source)
    recent = min(8192, context)
    near = context - recent + (draw[..., : k // 2] * recent).int()
    drawn = torch.cat((near, (draw[..., k // 2 :] * context).int()), -1)
    fresh = torch.rand(shape, device=device, generator=source) < 0.2
    fresh[:, 0] = True
    step = torch.arange(rows_each, device=device).view(1, -1, 1)
    last_fresh = torch.where(fresh, step, 0).cummax(1).values
    return drawn.gather(1, last_fresh).view(-1, k).sort().values.int()


def different_rows(selection: Tensor, groups: int, context: int) -> int:
    """How many different cache rows the groups' selections name: what must be read at least."""
    seen = torch.zeros((groups, context), dtype=torch.bool, device=selection.device)
    seen.scatter_(1, selection.view(groups, -1).long(), True)
    return int(seen.sum())
