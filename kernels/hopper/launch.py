"""Launches of the Hopper products: descriptors, grids, and the buffers that cut tiles leave their parts in."""

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headrace.kernels.hopper.dense import dense_kernel
from headrace.kernels.hopper.grouped import grouped_kernel
from headrace.kernels.launch import ceil_div, compute_units

PAD_ROWS = 256
"""Scales of activations are read for whole tiles: their last stride is a multiple of the largest"""


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """How a dense product is cut: tiles of 128 `p` x `q` `sub` (weight rows by rows if narrow, else the reverse)."""

    p: int
    q: int
    sub: int
    narrow: bool
    stages: int
    cut: int = 0
    """0: tiles are whole. n: the last incomplete wave of tiles, and n - 1 waves before it, are cut along K into equal
    shares, one a program"""
    staged: bool = True
    """Results go through shared memory, for wide stores"""
    group: int = 8

    @classmethod
    def of(cls, config: Mapping[str, int | str]) -> "Shape":
        """From the fields of a tuned configuration."""
        return cls(
            int(config["p"]), int(config["q"]), int(config["sub"]), bool(config["narrow"]), int(config["stages"]),
            int(config.get("cut", 0)), bool(config.get("staged", 1)), int(config.get("group", 8)),
        )  # fmt: skip

    @property
    def config(self) -> dict[str, int | str]:
        return {field.name: int(getattr(self, field.name)) for field in dataclasses.fields(self)}


class Workspace:
    """Parts and arrival counts of cut tiles. Launches that use one must follow each other on one stream."""

    def __init__(self) -> None:
        self._parts: Tensor | None = None
        self._arrived: Tensor | None = None

    def take(self, parts: int, tiles: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """(fp32 [parts] of any content, int32 [2 * tiles] zeros, which every launch leaves as zeros)."""
        if self._parts is None or self._parts.numel() < parts or self._parts.device != device:
            self._parts = torch.empty(parts, dtype=torch.float32, device=device)
        if self._arrived is None or self._arrived.numel() < 2 * tiles or self._arrived.device != device:
            self._arrived = torch.zeros(max(2 * tiles, 1024), dtype=torch.int32, device=device)
        return self._parts, self._arrived


def tiles_of(matrix: Tensor, rows: int) -> TensorDescriptor:
    """Tiles of `rows` x 128 e4m3 of a [n, K] matrix; K must be a multiple of 16."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    return TensorDescriptor.from_tensor(matrix, [rows, 128], layout)


def dense(
    codes: Tensor, scales: Tensor, matrix: Tensor, matrix_scale: Tensor, shape: Shape, out: Tensor, workspace: Workspace
) -> Tensor:
    """codes e4m3 [M, K], scales fp32 [K / 128, M padded to PAD_ROWS], matrix e4m3 [N, K], matrix_scale fp32
    [N / 128, K / 128] -> out [M, N], fp32 or bf16."""
    (rows, inner), columns = codes.shape, matrix.shape[0]
    steps = ceil_div(inner, 128)
    p, q = (columns, rows) if shape.narrow else (rows, columns)
    tiles = ceil_div(p, 128 * shape.p) * ceil_div(q, shape.q * shape.sub)
    programs = compute_units(codes.device)
    waves, share, left = ceil_div(tiles, programs), 0, 0
    if shape.cut:
        waves = max(tiles // programs - shape.cut + 1, 0)
        left = tiles - waves * programs
        share = ceil_div(left * steps, programs)
    else:
        programs = min(programs, tiles)
    parts, arrived = workspace.take(
        programs * 4 * shape.p * shape.sub * 64 * shape.q if left else 1, left, codes.device
    )
    p_matrix, q_matrix = (matrix, codes) if shape.narrow else (codes, matrix)
    dense_kernel[(programs,)](
        tiles_of(p_matrix, 128), tiles_of(q_matrix, shape.q), scales, matrix_scale, out, parts, arrived, rows,
        columns, steps, waves, share, scales.stride(0), matrix_scale.stride(0), SUB_P=shape.p, Q_TILE=shape.q,
        SUB_Q=shape.sub, NARROW=shape.narrow, STAGES=shape.stages, G=shape.group, STAGED=shape.staged, num_warps=4,
    )  # fmt: skip
    return out


@dataclasses.dataclass(frozen=True, slots=True)
class GroupedShape:
    """Tiles of 128 rows x 256 weight rows, or narrow ones of 256 weight rows x `rows` (16, 32 or 64) rows."""

    rows: int
    stages: int
    narrow: bool
    group: int = 16
    """Row tiles side by side before the next weight tile"""


WIDE = GroupedShape(128, 4, narrow=False)
NARROW = {16: GroupedShape(16, 6, True), 32: GroupedShape(32, 5, True), 64: GroupedShape(64, 5, True)}


@dataclasses.dataclass(frozen=True, slots=True)
class GroupedRows:
    """Rows that lie by expert, each expert's from a multiple of `shape.rows` on."""

    codes: Tensor
    """e4m3 [R, K]"""
    scales: Tensor
    """fp32 [R, ceil(K / 128)]"""
    expert: Tensor
    """int32 [R / shape.rows]"""
    tiles: Tensor
    """int32 [1]: how many of them there are"""
    shape: GroupedShape


def gated(rows: GroupedRows, gate_up: Tensor, gate_up_scale: Tensor) -> GroupedRows:
    """gate_up e4m3 [E, 2I, D], scales fp32 [E, 2, I / 128, D / 128] -> requantised silu(gate) * up. I and D must be
    multiples of 128."""
    experts, both, inner = gate_up.shape
    count, hidden = rows.codes.shape[0], both // 2
    codes = torch.empty((count, hidden), dtype=torch.uint8, device=rows.codes.device).view(torch.float8_e4m3fn)
    scales = torch.empty((count, hidden // 128), dtype=torch.float32, device=rows.codes.device)
    _grouped(rows, gate_up.view(experts * both, inner), gate_up_scale, scales, codes, scales, hidden, True)
    return dataclasses.replace(rows, codes=codes, scales=scales)


def down(rows: GroupedRows, matrix: Tensor, matrix_scale: Tensor, gains: Tensor) -> Tensor:
    """matrix e4m3 [E, D, I], scales fp32 [E, D / 128, I / 128], gains fp32 [R] -> bf16 [R, D]: products times gains."""
    experts, width, inner = matrix.shape
    out = torch.empty((rows.codes.shape[0], width), dtype=torch.bfloat16, device=rows.codes.device)
    _grouped(rows, matrix.view(experts * width, inner), matrix_scale, gains, out, rows.scales, width, False)
    return out


def _grouped(
    rows: GroupedRows, matrix: Tensor, matrix_scale: Tensor, gains: Tensor, out: Tensor, out_scale: Tensor,
    columns: int, is_gated: bool,
) -> None:  # fmt: skip
    shape = rows.shape
    x_tiles, w_tiles = tiles_of(rows.codes, shape.rows), tiles_of(matrix, 128)
    p, q = (w_tiles, x_tiles) if shape.narrow else (x_tiles, w_tiles)
    grouped_kernel[(compute_units(rows.codes.device),)](
        p, q, rows.scales, matrix_scale, gains, rows.expert, rows.tiles, out, out_scale, columns, rows.scales.shape[1],
        GATED=is_gated, NARROW=shape.narrow, ROWS=shape.rows, STAGES=shape.stages, G=shape.group, num_warps=4,
    )  # fmt: skip
