"""Cases of the norms, RoPE, and the writers of cached rows: all bound by bandwidth, one launch each."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headrace.errors import KernelUnsupported
from headrace.kernels.bench import inputs
from headrace.kernels.bench.case import Case, Work
from headrace.kernels.bench.measure import Call
from headrace.kernels.formats import BLOCK_TOKENS, FORMATS, INDEX_DIM, LATENT_DIM, ROPE_DIM, RowFormat

GOAL = 0.8


def entry(kernel: Any, name: str) -> Callable[..., Any]:
    found = getattr(kernel, name, None)
    if found is None:
        raise KernelUnsupported(f"{type(kernel).__name__} has no {name}")
    return found  # type: ignore[no-any-return]


def turns(rows: int, device: torch.device, source: torch.Generator) -> tuple[Tensor, Tensor]:
    angle = torch.rand((rows, ROPE_DIM // 2), device=device, generator=source) * 6.28
    return angle.cos(), angle.sin()


def places(rows: int, device: torch.device, source: torch.Generator) -> Tensor:
    """Cache rows of a chunk: runs of 64 in scattered blocks."""
    blocks = -(-rows // BLOCK_TOKENS)
    order = torch.randperm(blocks, device=device, generator=source)
    return (order[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, device=device)).flatten()[:rows]


def latent_plane(rows: int, fmt: RowFormat, device: torch.device) -> Tensor:
    shape = (-(-rows // BLOCK_TOKENS), BLOCK_TOKENS, fmt.latent_row_bytes)
    return torch.zeros(shape, dtype=torch.uint8, device=device)


def latent_write(rows: int, name: str) -> Case:
    fmt = FORMATS[name]

    def build(kernel: Any, device: torch.device, seed: int) -> Call:
        source = inputs.generator(device, seed)
        kv = torch.randn((rows, LATENT_DIM + ROPE_DIM), device=device, generator=source)
        weight = torch.rand(LATENT_DIM, device=device, generator=source)
        cos, sin = turns(rows, device, source)
        pool = latent_plane(rows, fmt, device)
        where, write = places(rows, device, source), entry(kernel, "write_projection")
        return lambda: write(pool, where, kv, weight, 1e-5, cos, sin, fmt)

    moved = rows * (4 * (LATENT_DIM + 2 * ROPE_DIM) + 8 + fmt.latent_row_bytes)
    return Case("latent_rows", f"norm, rope, quantise, write {rows} rows, {name}", build, Work(bytes=moved),
                goal_ratio=GOAL)  # fmt: skip


def index_write(rows: int) -> Case:
    fmt = FORMATS["tile656"]

    def build(kernel: Any, device: torch.device, seed: int) -> Call:
        source = inputs.generator(device, seed)
        keys = torch.randn((rows, INDEX_DIM), device=device, generator=source)
        weight, bias = torch.rand((2, INDEX_DIM), device=device, generator=source)
        cos, sin = turns(rows, device, source)
        pool = torch.zeros((-(-rows // BLOCK_TOKENS), fmt.index_plane_bytes), dtype=torch.uint8, device=device)
        where, write = places(rows, device, source), entry(kernel, "write_projection")
        return lambda: write(pool, where, keys, weight, bias, 1e-6, cos, sin, True, fmt)

    moved = rows * (4 * (INDEX_DIM + ROPE_DIM) + 8 + INDEX_DIM + 4)
    return Case("index_keys", f"norm, rope, quantise, write {rows} keys", build, Work(bytes=moved), goal_ratio=GOAL)


def latent_scatter(rows: int) -> Case:
    fmt = FORMATS["tile656"]

    def build(kernel: Any, device: torch.device, seed: int) -> Call:
        source = inputs.generator(device, seed)
        given = torch.randint(0, 127, (rows, fmt.latent_row_bytes), dtype=torch.uint8, device=device, generator=source)
        pool = latent_plane(rows, fmt, device)
        where = places(rows, device, source)
        return lambda: kernel.write(pool, where, given)

    moved = rows * (2 * fmt.latent_row_bytes + 8)
    return Case("latent_rows", f"write {rows} gathered rows, tile656", build, Work(bytes=moved), goal_ratio=GOAL)


def query_quantise(rows: int, heads: int = 32) -> Case:
    def build(kernel: Any, device: torch.device, seed: int) -> Call:
        from headrace.kernels.index_topk.triton import quantise_query

        source = inputs.generator(device, seed)
        q = torch.randn((rows, heads, INDEX_DIM), device=device, generator=source)
        weights = torch.randn((rows, heads), device=device, generator=source)
        return lambda: quantise_query(q, weights)

    moved = rows * heads * (4 * INDEX_DIM + INDEX_DIM + 8)
    return Case("index_topk", f"quantise {rows} index queries", build, Work(bytes=moved), goal_ratio=GOAL)


def rms(rows: int, width: int) -> Case:
    def build(kernel: Any, device: torch.device, seed: int) -> Call:
        source = inputs.generator(device, seed)
        x = torch.randn((rows, width), device=device, generator=source)
        weight = torch.rand(width, device=device, generator=source)
        return lambda: kernel.rms(x, weight, 1e-5)

    return Case("norm", f"rms {rows} x {width}", build, Work(bytes=8.0 * rows * width), goal_ratio=GOAL)


def rope(rows: int, heads: int) -> Case:
    def build(kernel: Any, device: torch.device, seed: int) -> Call:
        source = inputs.generator(device, seed)
        x = torch.randn((rows, heads, ROPE_DIM), device=device, generator=source)
        cos, sin = turns(rows, device, source)
        return lambda: kernel(x, cos, sin, interleaved=True)

    moved = 4.0 * rows * ROPE_DIM * (2 * heads + 1)
    return Case("rope", f"{rows} rows x {heads} heads", build, Work(bytes=moved), goal_ratio=GOAL)


def cases() -> list[Case]:
    many = 65_536
    return [
        latent_write(many, "tile656"),
        latent_write(many, "plain576"),
        latent_write(640, "tile656"),
        latent_scatter(many),
        index_write(4 * many),
        query_quantise(4096),
        rms(16_384, 6144),
        rms(many, 2048),
        rope(16_384, 64),
    ]
