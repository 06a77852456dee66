"""One block-scaled FP8 product on Hopper: out [M, N] = x [M, K] (1 x 128 scales) by w [N, K] (128 x 128 scales).

Roofline: 2 M N K FLOP at FP8 rate; N K + M K bytes in, 2 or 4 M N out. A program's stage of 128 channels moves
(P rows + Q rows) x 128 bytes for P rows x Q rows x 128 products, so a 128 x 256 tile asks the L2 cache for 48 bytes a
cycle and SM at full rate.

The tiles that do not fill a last wave of programs may be cut along K into equal shares (`waves` fewer whole waves).
Whoever finishes a cut tile last adds its parts in the order of K: two runs give the same bits.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from headrace.kernels.hopper.pieces import fetch, group_barrier, multiply, place, segment, segments


@gluon.jit
def dense_fetcher(
    p_desc, q_desc, p_ring, q_ring, full, empty, M, N, steps, waves, share,
    SUB_P: gl.constexpr, Q_TILE: gl.constexpr, SUB_Q: gl.constexpr, NARROW: gl.constexpr, STAGES: gl.constexpr,
    G: gl.constexpr,
):  # fmt: skip
    program, programs = gl.program_id(0), gl.num_programs(0)
    tiles_p = gl.cdiv(N if NARROW else M, 128 * SUB_P)
    tiles_q = gl.cdiv(M if NARROW else N, Q_TILE * SUB_Q)
    whole, count = segments(program, programs, tiles_p * tiles_q, steps, waves, share)
    filled = 0
    for i in range(count):
        tile, start, end = segment(i, program, programs, tiles_p * tiles_q, steps, waves, share, whole)
        tile_p, tile_q = place(tile, tiles_p, tiles_q, G)
        p_row, q_row = tile_p * 128 * SUB_P, tile_q * Q_TILE * SUB_Q
        filled = fetch(
            p_desc, q_desc, p_row, p_row + 128, q_row, q_row + Q_TILE, start, end, filled, p_ring, q_ring, full, empty,
            STAGES, SUB_P, SUB_Q,
        )  # fmt: skip


@gluon.jit
def store(out, out_ptr, row, column, rows, columns, NARROW: gl.constexpr, STAGED: gl.constexpr, KEEP: gl.constexpr):
    """A group's product -> out_ptr [rows, columns]. `row` and `column` are where its P rows and Q rows start."""
    value = out.to(out_ptr.dtype.element_ty)
    if STAGED:
        value = gl.convert_layout(value, KEEP)
    p = row + gl.arange(0, value.shape[0], gl.SliceLayout(1, value.type.layout))
    q = column + gl.arange(0, value.shape[1], gl.SliceLayout(0, value.type.layout))
    if NARROW:
        to = out_ptr + q.to(gl.int64)[None, :] * columns + p[:, None]
        gl.store(to, value, mask=(q < rows)[None, :] & (p < columns)[:, None])
    else:
        to = out_ptr + p.to(gl.int64)[:, None] * columns + q[None, :]
        gl.store(to, value, mask=(p < rows)[:, None] & (q < columns)[None, :])


@gluon.jit
def finish_cut(
    out, out_too, parts_ptr, arrived_ptr, cut, start, steps, share, GROUP: gl.constexpr, TWO: gl.constexpr,
    P_ROWS: gl.constexpr, Q_ROWS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Leave this program's part of cut tile `cut`; whoever comes last gets the sum of all of them, in order of K.
    Parts: fp32 [programs, starts its tile or not, group, half, P_ROWS, Q_ROWS]. Returns (came last, out, out_too)."""
    SIZE: gl.constexpr = P_ROWS * Q_ROWS
    HALVES: gl.constexpr = 2 if TWO else 1
    inside = (
        gl.arange(0, P_ROWS, gl.SliceLayout(1, LAYOUT))[:, None] * Q_ROWS
        + gl.arange(0, Q_ROWS, gl.SliceLayout(0, LAYOUT))[None, :]
    )
    mine = gl.program_id(0) * 2 + gl.where(start == 0, 1, 0)
    to = parts_ptr + ((mine * 2 + GROUP) * HALVES).to(gl.int64) * SIZE + inside
    gl.store(to, out)
    if TWO:
        gl.store(to + SIZE, out_too)
    first = cut * steps // share
    last = (cut * steps + steps - 1) // share
    group_barrier()
    before = gl.atomic_add(arrived_ptr + cut * 2 + GROUP, 1, sem="acq_rel", scope="gpu")
    came_last = before == last - first
    if came_last:
        gl.store(arrived_ptr + cut * 2 + GROUP, 0)
        out = gl.zeros_like(out)
        out_too = gl.zeros_like(out_too)
        for other in range(first, last + 1):
            slot = other * 2 + gl.where(other == first, 1, 0)
            at = parts_ptr + ((slot * 2 + GROUP) * HALVES).to(gl.int64) * SIZE + inside
            out += gl.load(at, cache_modifier=".cg")
            if TWO:
                out_too += gl.load(at + SIZE, cache_modifier=".cg")
    return came_last, out, out_too


@gluon.jit
def dense_multiplier(
    x_scale_ptr, w_scale_ptr, out_ptr, parts_ptr, arrived_ptr, p_ring, q_ring, full, empty, M, N, steps, waves, share,
    x_scale_step, w_scale_row, GROUP: gl.constexpr, SUB_P: gl.constexpr, Q_TILE: gl.constexpr, SUB_Q: gl.constexpr,
    NARROW: gl.constexpr, STAGES: gl.constexpr, G: gl.constexpr, STAGED: gl.constexpr,
):  # fmt: skip
    TWO: gl.constexpr = SUB_P * SUB_Q == 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, Q_TILE, 32])
    KEEP: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    program, programs = gl.program_id(0), gl.num_programs(0)
    tiles_p = gl.cdiv(N if NARROW else M, 128 * SUB_P)
    tiles_q = gl.cdiv(M if NARROW else N, Q_TILE * SUB_Q)
    blocks = gl.cdiv(N, 128)
    whole, count = segments(program, programs, tiles_p * tiles_q, steps, waves, share)
    used = 0
    part = gl.zeros([64, Q_TILE], gl.float32, LAYOUT)
    for i in range(count):
        tile, start, end = segment(i, program, programs, tiles_p * tiles_q, steps, waves, share, whole)
        tile_p, tile_q = place(tile, tiles_p, tiles_q, G)
        p_row = tile_p * 128 * SUB_P + GROUP * 64
        q_row = tile_q * Q_TILE * SUB_Q
        if NARROW:
            row = q_row + gl.arange(0, Q_TILE, gl.SliceLayout(0, LAYOUT))
            block = gl.minimum(p_row // 128, blocks - 1)
            block_too = gl.minimum((p_row + 128) // 128, blocks - 1)
        else:
            row = p_row + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
            block = gl.minimum(q_row // 128, blocks - 1)
            block_too = gl.minimum((q_row + Q_TILE) // 128, blocks - 1)
        out = gl.zeros([64, Q_TILE], gl.float32, LAYOUT)
        out_too = gl.zeros([64, Q_TILE], gl.float32, LAYOUT)
        part, out, out_too, used = multiply(
            x_scale_ptr + row + start * x_scale_step, x_scale_ptr + row + start * x_scale_step + 128, x_scale_step,
            w_scale_ptr + block * w_scale_row + start, w_scale_ptr + block_too * w_scale_row + start, start, end, used,
            p_ring, q_ring, full, empty, part, M < 0, out, out_too, GROUP, STAGES, SUB_P, SUB_Q, NARROW,
        )  # fmt: skip
        done = True
        if end - start < steps:
            done, out, out_too = finish_cut(
                out, out_too, parts_ptr, arrived_ptr, tile - waves * programs, start, steps, share, GROUP, TWO,
                64, Q_TILE, LAYOUT,
            )  # fmt: skip
        if done:
            store(out, out_ptr, p_row, q_row, M, N, NARROW, STAGED, KEEP)
            if TWO:
                if SUB_P == 2:
                    store(out_too, out_ptr, p_row + 128, q_row, M, N, NARROW, STAGED, KEEP)
                else:
                    store(out_too, out_ptr, p_row, q_row + Q_TILE, M, N, NARROW, STAGED, KEEP)


@gluon.jit(do_not_specialize=["M", "steps", "waves", "share", "w_scale_row"])
def dense_kernel(
    p_desc, q_desc, x_scale_ptr, w_scale_ptr, out_ptr, parts_ptr, arrived_ptr, M, N, steps, waves, share, x_scale_step,
    w_scale_row, SUB_P: gl.constexpr, Q_TILE: gl.constexpr, SUB_Q: gl.constexpr, NARROW: gl.constexpr,
    STAGES: gl.constexpr, G: gl.constexpr, STAGED: gl.constexpr,
):  # fmt: skip
    """`p_desc` and `q_desc`: tiles [128, 128] of the weight (NARROW) or the codes; [Q_TILE, 128] of the other."""
    p_ring = gl.allocate_shared_memory(p_desc.dtype, [STAGES * SUB_P, 128, 128], p_desc.layout)
    q_ring = gl.allocate_shared_memory(q_desc.dtype, [STAGES * SUB_Q, Q_TILE, 128], q_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    gl.warp_specialize(
        [
            (dense_multiplier, (
                x_scale_ptr, w_scale_ptr, out_ptr, parts_ptr, arrived_ptr, p_ring, q_ring, full, empty, M, N, steps,
                waves, share, x_scale_step, w_scale_row, 0, SUB_P, Q_TILE, SUB_Q, NARROW, STAGES, G, STAGED,
            )),
            (dense_multiplier, (
                x_scale_ptr, w_scale_ptr, out_ptr, parts_ptr, arrived_ptr, p_ring, q_ring, full, empty, M, N, steps,
                waves, share, x_scale_step, w_scale_row, 1, SUB_P, Q_TILE, SUB_Q, NARROW, STAGES, G, STAGED,
            )),
            (dense_fetcher, (
                p_desc, q_desc, p_ring, q_ring, full, empty, M, N, steps, waves, share,
                SUB_P, Q_TILE, SUB_Q, NARROW, STAGES, G,
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
