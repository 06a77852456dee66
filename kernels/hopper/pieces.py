"""What the Hopper products share: which work a program does, its copying warps, its multiplying warps.

A program keeps one SM: one warp fetches tiles through the copy engine into a ring of stages, and two groups of four
warps multiply. Each group owns 64 of the 128 rows of a P tile and works on its own, so one group scales and adds its
partial sums while the other keeps the tensor cores busy. A stage may hold two P tiles or two Q tiles.

Names: P is the operand whose rows are the rows of a product (64 an instruction), Q the one whose rows are its columns.
Wide products have the activations as P; narrow ones (few rows) have the weight as P, so that 16 rows of activations
cost 16 columns and not 64 rows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

_LOAD = "async_load" if hasattr(tma, "async_load") else "async_copy_global_to_shared"
copy_tile = getattr(tma, _LOAD)
"""Renamed between Triton 3.6 and 3.9"""
group_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def segments(program, programs, tiles, steps, waves, share):
    """(tiles done whole, all segments) of a program. The first `waves` * programs tiles are dealt out one by one; the
    steps of the rest, in order, in equal shares of `share`, so a program may get the end of one tile and the start of
    another."""
    whole = gl.minimum(waves, (tiles - program + programs - 1) // programs)
    left = gl.maximum(tiles - waves * programs, 0) * steps
    first = gl.minimum(program * share, left)
    last = gl.minimum(first + share, left)
    shared = gl.where(last > first, (last - 1) // steps - first // steps + 1, 0)
    return whole, whole + shared


@gluon.jit
def segment(i, program, programs, tiles, steps, waves, share, whole):
    """Segment i of a program: (tile, first step, last step + 1)."""
    left = gl.maximum(tiles - waves * programs, 0) * steps
    first = program * share
    last = gl.minimum(first + share, left)
    tile = first // steps + i - whole
    start = gl.maximum(first - tile * steps, 0)
    end = gl.minimum(last - tile * steps, steps)
    dealt = i < whole
    return (
        gl.where(dealt, program + i * programs, tile + waves * programs),
        gl.where(dealt, 0, start),
        gl.where(dealt, steps, end),
    )


@gluon.jit
def place(tile, tiles_m, tiles_n, G: gl.constexpr):
    """Tile -> (row tile, column tile), G row tiles side by side before the next column, for the L2 cache."""
    group = tile // (G * tiles_n)
    first = group * G
    size = gl.minimum(tiles_m - first, G)
    rest = tile % (G * tiles_n)
    return first + rest % size, rest // size


@gluon.jit
def fetch(
    p_desc, q_desc, p_row, p_row_too, q_row, q_row_too, start, end, count, p_ring, q_ring, full, empty,
    STAGES: gl.constexpr, SUB_P: gl.constexpr, SUB_Q: gl.constexpr,
):  # fmt: skip
    """Fill a stage for each step of a segment; `count` stages were filled before. Returns the new count."""
    size: gl.constexpr = SUB_P * p_desc.block_type.nbytes + SUB_Q * q_desc.block_type.nbytes
    for step in range(start, end):
        stage = count % STAGES
        mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
        ready = full.index(stage)
        mbarrier.expect(ready, size)
        copy_tile(p_desc, [p_row, step * 128], ready, p_ring.index(stage * SUB_P))
        if SUB_P == 2:
            copy_tile(p_desc, [p_row_too, step * 128], ready, p_ring.index(stage * SUB_P + 1))
        copy_tile(q_desc, [q_row, step * 128], ready, q_ring.index(stage * SUB_Q))
        if SUB_Q == 2:
            copy_tile(q_desc, [q_row_too, step * 128], ready, q_ring.index(stage * SUB_Q + 1))
        count += 1
    return count


@gluon.jit
def add_scaled(part, scale, out):
    """out + part * scale. Volatile, because the compiler otherwise moves the additions behind the next product, whose
    result then needs registers of its own; they do not fit."""
    scale, out = gl.broadcast(scale, out)
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [part, scale, out], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def scales_of(rows, rows_too, block, block_too, SUB_P: gl.constexpr, SUB_Q: gl.constexpr, NARROW: gl.constexpr):
    """Scales of both halves of a group's products, as a row or a column."""
    if NARROW:
        scale, scale_too = (rows * block)[None, :], (rows * block_too)[None, :]
    elif SUB_P == 2:
        scale, scale_too = (rows * block)[:, None], (rows_too * block)[:, None]
    else:
        scale, scale_too = (rows * block)[:, None], (rows * block_too)[:, None]
    return scale, scale_too


@gluon.jit
def multiply(
    row_scale_ptr, row_scale_too_ptr, row_scale_step, block_scale_ptr, block_scale_too_ptr, start, end, count, p_ring,
    q_ring, full, empty, part, never, out, out_too, GROUP: gl.constexpr, STAGES: gl.constexpr, SUB_P: gl.constexpr,
    SUB_Q: gl.constexpr, NARROW: gl.constexpr,
):  # fmt: skip
    """Sums over the steps of a segment. `row_scale_ptr`: one pointer a row of activations (at step `start`), which are
    the product's rows, or its columns if NARROW; `block_scale_ptr`: the weight block's. The accumulator of the tensor
    cores is short: it never sums more than 128 products, and starts again at each step. That is said by `never`, which
    is false, but not to the compiler's knowledge: so `part` keeps its registers, and there are enough.
    Returns (part, out, out_too, count)."""
    TWO: gl.constexpr = SUB_P * SUB_Q == 2
    rows = gl.load(row_scale_ptr)
    rows_too = gl.load(row_scale_too_ptr) if SUB_P == 2 and not NARROW else rows
    block = gl.load(block_scale_ptr)
    block_too = gl.load(block_scale_too_ptr) if TWO else block
    for step in range(start, end):
        stage = count % STAGES
        mbarrier.wait(full.index(stage), (count // STAGES) & 1)
        p = p_ring.index(stage * SUB_P).slice(GROUP * 64, 64)
        q = q_ring.index(stage * SUB_Q).permute((1, 0))
        token = warpgroup_mma(p, q, part, use_acc=never, is_async=True)
        scale, scale_too = scales_of(rows, rows_too, block, block_too, SUB_P, SUB_Q, NARROW)
        # The next step's scales arrive while this one's products are computed.
        ahead = gl.minimum(step + 1, end - 1) - start
        rows = gl.load(row_scale_ptr + ahead * row_scale_step)
        block = gl.load(block_scale_ptr + ahead)
        rows_too = gl.load(row_scale_too_ptr + ahead * row_scale_step) if SUB_P == 2 and not NARROW else rows
        block_too = gl.load(block_scale_too_ptr + ahead) if TWO else block
        part = warpgroup_mma_wait(0, deps=[token])
        if TWO:
            out = add_scaled(part, scale, out)
            if SUB_P == 2:
                p = p_ring.index(stage * SUB_P + 1).slice(GROUP * 64, 64)
            else:
                q = q_ring.index(stage * SUB_Q + 1).permute((1, 0))
            token = warpgroup_mma(p, q, part, use_acc=never, is_async=True)
            part = warpgroup_mma_wait(0, deps=[token])
            mbarrier.arrive(empty.index(stage), count=1)
            out_too = add_scaled(part, scale_too, out_too)
        else:
            mbarrier.arrive(empty.index(stage), count=1)
            out = add_scaled(part, scale, out)
        count += 1
    return part, out, out_too, count
