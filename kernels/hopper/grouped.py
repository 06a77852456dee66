"""Products of experts on Hopper over rows that lie by expert, every expert's first row on a multiple of a tile's rows.

GATED: gate and up of 128 hidden channels a tile, SiLU * mul and requantisation in its registers, so what goes to memory
is one byte a hidden channel. Otherwise the second product, times a row's weight, rounded to bf16.

Roofline of a rows: 6 a D I FLOP at FP8 rate; a D + a I in, a I + 2 a D out, 3 D I of weight for every expert that has a
row. Wide tiles (128 rows x 256 weight rows) ask the L2 cache for 48 bytes a cycle and SM at full rate; narrow ones (256
weight rows x 16 to 64 rows) stream weights.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from headrace.kernels.hopper.pieces import fetch, group_barrier, multiply, place


@gluon.jit
def tile_rows(tile, expert_ptr, tiles_r, tiles_n, N, GATED: gl.constexpr, NARROW: gl.constexpr, G: gl.constexpr):
    """Tile -> (row tile, weight tile, its expert, first weight row of both halves)."""
    if NARROW:
        tile_r, tile_n = tile // tiles_n, tile % tiles_n
    else:
        tile_r, tile_n = place(tile, tiles_r, tiles_n, G)
    expert = gl.load(expert_ptr + tile_r)
    if GATED:
        first = expert * 2 * N + tile_n * 128
        other = first + N
    else:
        first = expert * N + tile_n * 256
        other = first + 128
    return tile_r, tile_n, expert, first, other


@gluon.jit
def grouped_fetcher(
    p_desc, q_desc, expert_ptr, tiles_ptr, p_ring, q_ring, full, empty, N, steps, GATED: gl.constexpr,
    NARROW: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    tiles_r = gl.load(tiles_ptr)
    tiles_n = gl.cdiv(N, 128 if GATED else 256)
    filled = 0
    for tile in range(gl.program_id(0), tiles_r * tiles_n, gl.num_programs(0)):
        tile_r, _, _, first, other = tile_rows(tile, expert_ptr, tiles_r, tiles_n, N, GATED, NARROW, G)
        row = tile_r * ROWS
        if NARROW:
            filled = fetch(
                p_desc, q_desc, first, other, row, row, 0, steps, filled, p_ring, q_ring, full, empty, STAGES, 2, 1
            )
        else:
            filled = fetch(
                p_desc, q_desc, row, row, first, other, 0, steps, filled, p_ring, q_ring, full, empty, STAGES, 1, 2
            )


@gluon.jit
def finish_gated(
    gate, up, out_ptr, out_scale_ptr, row, tile_n, N, blocks, most_ring, met, turn, GROUP: gl.constexpr,
    NARROW: gl.constexpr,
):  # fmt: skip
    """silu(gate) * up -> e4m3 and a scale a row and 128 channels. The channels of a narrow product are its rows, half
    of them in each group: the groups tell each other their largest."""
    hidden = gate / (1.0 + gl.exp(-gate)) * up
    most = gl.max(gl.abs(hidden), 0 if NARROW else 1)
    if NARROW:
        slot = (turn & 1) * 2
        most_ring.index(slot + GROUP).store(most)
        group_barrier()
        mbarrier.arrive(met, count=1)
        mbarrier.wait(met, turn & 1)
        most = gl.maximum(most, most_ring.index(slot + 1 - GROUP).load(most.type.layout))
    most = gl.maximum(most, 1e-10)
    at = out_scale_ptr + (row + gl.arange(0, most.shape[0], most.type.layout)) * blocks + tile_n
    if not NARROW or GROUP == 0:
        gl.store(at, most * (1.0 / 448.0))
    inverse = 448.0 / most
    value = hidden * (inverse[None, :] if NARROW else inverse[:, None])
    value = gl.minimum(gl.maximum(value, -448.0), 448.0).to(out_ptr.dtype.element_ty)
    if NARROW:
        value = gl.convert_layout(value, gl.BlockedLayout([16, 1], [4, 8], [1, 4], [0, 1]))
        channel = tile_n * 128 + GROUP * 64 + gl.arange(0, 64, gl.SliceLayout(1, value.type.layout))
        to_row = row + gl.arange(0, value.shape[1], gl.SliceLayout(0, value.type.layout))
        gl.store(out_ptr + to_row.to(gl.int64)[None, :] * N + channel[:, None], value)
    else:
        value = gl.convert_layout(value, gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))
        channel = tile_n * 128 + gl.arange(0, 128, gl.SliceLayout(0, value.type.layout))
        to_row = row + gl.arange(0, 64, gl.SliceLayout(1, value.type.layout))
        gl.store(out_ptr + to_row.to(gl.int64)[:, None] * N + channel[None, :], value)


@gluon.jit
def finish_down(out, gain_ptr, out_ptr, row, channel, N, NARROW: gl.constexpr):
    """A half of a group's product times the rows' gains, rounded, stored."""
    if NARROW:
        gain = gain_ptr + row + gl.arange(0, out.shape[1], gl.SliceLayout(0, out.type.layout))
        value = (out * gl.load(gain)[None, :]).to(out_ptr.dtype.element_ty)
        value = gl.convert_layout(value, gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1]))
        to_channel = channel + gl.arange(0, 64, gl.SliceLayout(1, value.type.layout))
        to_row = row + gl.arange(0, value.shape[1], gl.SliceLayout(0, value.type.layout))
        to = out_ptr + to_row.to(gl.int64)[None, :] * N + to_channel[:, None]
        gl.store(to, value, mask=(to_channel < N)[:, None])
    else:
        gain = gain_ptr + row + gl.arange(0, 64, gl.SliceLayout(1, out.type.layout))
        value = (out * gl.load(gain)[:, None]).to(out_ptr.dtype.element_ty)
        value = gl.convert_layout(value, gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
        to_channel = channel + gl.arange(0, 128, gl.SliceLayout(0, value.type.layout))
        to_row = row + gl.arange(0, 64, gl.SliceLayout(1, value.type.layout))
        to = out_ptr + to_row.to(gl.int64)[:, None] * N + to_channel[None, :]
        gl.store(to, value, mask=(to_channel < N)[None, :])


@gluon.jit
def grouped_multiplier(
    x_scale_ptr, w_scale_ptr, gain_ptr, expert_ptr, tiles_ptr, out_ptr, out_scale_ptr, p_ring, q_ring, full, empty,
    most_ring, met, N, steps, GROUP: gl.constexpr, GATED: gl.constexpr, NARROW: gl.constexpr, ROWS: gl.constexpr,
    STAGES: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    WIDTH: gl.constexpr = ROWS if NARROW else 128
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 32])
    tiles_r = gl.load(tiles_ptr)
    tiles_n = gl.cdiv(N, 128 if GATED else 256)
    blocks = gl.cdiv(N, 128)
    used = 0
    part = gl.zeros([64, WIDTH], gl.float32, LAYOUT)
    for tile in range(gl.program_id(0), tiles_r * tiles_n, gl.num_programs(0)):
        tile_r, tile_n, expert, _, _ = tile_rows(tile, expert_ptr, tiles_r, tiles_n, N, GATED, NARROW, G)
        if GATED:
            first = w_scale_ptr + (expert * 2 * blocks + tile_n) * steps
            other = first + blocks * steps
        else:
            first = w_scale_ptr + (expert * blocks + tile_n * 2) * steps
            other = w_scale_ptr + (expert * blocks + gl.minimum(tile_n * 2 + 1, blocks - 1)) * steps
        if NARROW:
            row = tile_r * ROWS
            x_row = row + gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))
        else:
            row = tile_r * ROWS + GROUP * 64
            x_row = row + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
        out = gl.zeros([64, WIDTH], gl.float32, LAYOUT)
        out_too = gl.zeros([64, WIDTH], gl.float32, LAYOUT)
        x_scale = x_scale_ptr + x_row * steps
        part, out, out_too, used = multiply(
            x_scale, x_scale, 1, first, other, 0, steps, used, p_ring, q_ring, full, empty, part, N < 0, out, out_too,
            GROUP, STAGES, 2 if NARROW else 1, 1 if NARROW else 2, NARROW,
        )  # fmt: skip
        if GATED:
            turn = (tile - gl.program_id(0)) // gl.num_programs(0)
            finish_gated(
                out, out_too, out_ptr, out_scale_ptr, row, tile_n, N, blocks, most_ring, met, turn, GROUP, NARROW
            )
        else:
            channel = tile_n * 256 + (GROUP * 64 if NARROW else 0)
            finish_down(out, gain_ptr, out_ptr, row, channel, N, NARROW)
            finish_down(out_too, gain_ptr, out_ptr, row, channel + 128, N, NARROW)


@gluon.jit(do_not_specialize=["steps"])
def grouped_kernel(
    p_desc, q_desc, x_scale_ptr, w_scale_ptr, gain_ptr, expert_ptr, tiles_ptr, out_ptr, out_scale_ptr, N, steps,
    GATED: gl.constexpr, NARROW: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    """`N`: hidden channels (GATED; w [experts * 2 N, K]: gate rows, then up rows) or output channels (w [experts * N,
    K]). `expert_ptr` int32: expert of each ROWS rows; `tiles_ptr` int32 [1]: how many times ROWS rows there are.
    `p_desc`: tiles of the rows, or of the weight if NARROW; `q_desc`: of the other. Scales [rows, K / 128]."""
    SUB_P: gl.constexpr = 2 if NARROW else 1
    SUB_Q: gl.constexpr = 1 if NARROW else 2
    WIDTH: gl.constexpr = ROWS if NARROW else 128
    p_ring = gl.allocate_shared_memory(p_desc.dtype, [STAGES * SUB_P, 128, 128], p_desc.layout)
    q_ring = gl.allocate_shared_memory(q_desc.dtype, [STAGES * SUB_Q, WIDTH, 128], q_desc.layout)
    most_ring = gl.allocate_shared_memory(gl.float32, [4, WIDTH], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    met = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(met, count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    gl.warp_specialize(
        [
            (grouped_multiplier, (
                x_scale_ptr, w_scale_ptr, gain_ptr, expert_ptr, tiles_ptr, out_ptr, out_scale_ptr, p_ring, q_ring,
                full, empty, most_ring, met, N, steps, 0, GATED, NARROW, ROWS, STAGES, G,
            )),
            (grouped_multiplier, (
                x_scale_ptr, w_scale_ptr, gain_ptr, expert_ptr, tiles_ptr, out_ptr, out_scale_ptr, p_ring, q_ring,
                full, empty, most_ring, met, N, steps, 1, GATED, NARROW, ROWS, STAGES, G,
            )),
            (grouped_fetcher, (
                p_desc, q_desc, expert_ptr, tiles_ptr, p_ring, q_ring, full, empty, N, steps, GATED, NARROW, ROWS,
                STAGES, G,
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
