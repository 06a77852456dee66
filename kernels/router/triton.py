"""Choice of experts in one launch: fp32 scores, sigmoid, bias, group limits, top-k, renormalisation, scaling.

Roofline of t rows, D channels, E experts: 2 t D E FLOP (three tf32 products each on tensor cores); 4 E D bytes of gate.
With few rows the gate's bytes decide, and one SM cannot fetch them in time: so channels and
experts are cut over programs, and whoever finishes a tile of rows last adds the parts in order and chooses.
"""

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.base import KernelContext, RouterRule
from headrace.kernels.launch import architecture, ceil_div, next_power_of_two

FEW_ROWS = 1024


def precision(device: torch.device) -> str:
    """Both are fp32 quality; CDNA has plain fp32 matrix instructions and no tf32 triple."""
    return "ieee" if architecture(device).startswith("gfx") else "tf32x3"


@triton.jit
def group_limited(choice, expert, groups, group_size, kept, E: tl.constexpr, GROUPS: tl.constexpr):
    """-inf outside the best groups. A group's score: its two best experts' sum. Of equal ones the lower stays."""
    number = tl.arange(0, GROUPS)[None, :]
    scores = tl.where(number < groups, 0.0, -float("inf")) + tl.zeros((choice.shape[0], GROUPS), tl.float32)
    for g in range(groups):
        inside = tl.where((expert // group_size == g)[None, :], choice, -float("inf"))
        best = tl.max(inside, 1)
        at = tl.min(tl.where(inside == best[:, None], expert[None, :], E), 1)
        second = tl.max(tl.where(expert[None, :] == at[:, None], -float("inf"), inside), 1)
        score = best + tl.where(group_size > 1, second, 0.0)
        scores = tl.where(number == g, score[:, None], scores)
    for g in range(groups):
        mine = tl.sum(tl.where(number == g, scores, 0.0), 1)[:, None]
        ahead = tl.sum(((scores > mine) | ((scores == mine) & (number < g))).to(tl.int32), 1)
        drop = (ahead >= kept)[:, None] & (expert // group_size == g)[None, :]
        choice = tl.where(drop, -float("inf"), choice)
    return choice


@triton.jit
def choose(
    logits, row, rows, bias_ptr, ids_ptr, weights_ptr, experts, groups, group_size, kept, scaling,
    NORMALISE: tl.constexpr, TOP: tl.constexpr, E: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """logits fp32 [R, E] of rows `row` -> ids ascending and weights."""
    expert = tl.arange(0, E)
    scores = 1.0 / (1.0 + tl.exp(-logits))
    choice = scores + tl.load(bias_ptr + expert, mask=expert < experts, other=0.0)[None, :]
    choice = tl.where((expert < experts)[None, :], choice, -float("inf"))
    if GROUPS > 1:
        choice = group_limited(choice, expert, groups, group_size, kept, E, GROUPS)
    chosen = (expert[None, :] < 0) & (choice == choice)
    for _ in range(TOP):
        best = tl.max(tl.where(chosen, -float("inf"), choice), 1)
        at = tl.min(tl.where(~chosen & (choice == best[:, None]), expert[None, :], E), 1)
        chosen = chosen | (expert[None, :] == at[:, None])
    weights = tl.where(chosen, scores, 0.0)
    if NORMALISE:
        weights = weights / (tl.sum(weights, 1)[:, None] + 1e-20)
    place = tl.cumsum(chosen.to(tl.int32), 1) - 1
    to = row.to(tl.int64)[:, None] * TOP + place
    keep = chosen & (row < rows)[:, None]
    tl.store(ids_ptr + to, tl.broadcast_to(expert[None, :], to.shape), mask=keep)
    tl.store(weights_ptr + to, weights * scaling, mask=keep)


@triton.jit
def router_kernel(
    x_ptr, gate_ptr, bias_ptr, parts_ptr, arrived_ptr, ids_ptr, weights_ptr, rows, D, experts, groups, group_size, kept,
    scaling, x_row, NORMALISE: tl.constexpr, TOP: tl.constexpr, E: tl.constexpr, GROUPS: tl.constexpr, R: tl.constexpr,
    WIDE: tl.constexpr, CUTS: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (tile of R rows, tile of WIDE experts, share of channels). Parts: fp32 [row tiles, CUTS, R, E]."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    expert = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    share = tl.cdiv(tl.cdiv(D, STEP), CUTS) * STEP
    first = tl.program_id(2) * share
    k = tl.arange(0, STEP)
    x_at = x_ptr + row.to(tl.int64)[:, None] * x_row + k[None, :]
    gate_at = gate_ptr + expert[None, :] * D + k[:, None]
    logits = tl.zeros((R, WIDE), tl.float32)
    for start in range(first, tl.minimum(first + share, D), STEP):
        left = start + k < D
        x = tl.load(x_at + start, mask=(row < rows)[:, None] & left[None, :], other=0.0)
        gate = tl.load(gate_at + start, mask=(expert < experts)[None, :] & left[:, None], other=0.0).to(tl.float32)
        logits = tl.dot(x, gate, logits, input_precision=PRECISION)
    base = parts_ptr + tl.program_id(0).to(tl.int64) * (CUTS * R * E)
    tl.store(base + tl.program_id(2) * (R * E) + tl.arange(0, R)[:, None] * E + expert[None, :], logits)
    tl.debug_barrier()
    before = tl.atomic_add(arrived_ptr + tl.program_id(0), 1, sem="acq_rel", scope="gpu")
    if before == tl.num_programs(1) * CUTS - 1:
        tl.store(arrived_ptr + tl.program_id(0), 0)
        for first_row in range(0, R, 16):
            inside = first_row + tl.arange(0, 16)
            at = base + inside[:, None] * E + tl.arange(0, E)[None, :]
            whole = tl.zeros((16, E), tl.float32)
            for cut in range(CUTS):
                whole += tl.load(at + cut * (R * E), cache_modifier=".cg")
            choose(
                whole, tl.program_id(0) * R + inside, rows, bias_ptr, ids_ptr, weights_ptr, experts, groups,
                group_size, kept, scaling, NORMALISE, TOP, E, GROUPS,
            )  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class RouterTile:
    """R rows by `wide` experts, channels in `cuts` shares of whole steps."""

    rows: int
    wide: int
    cuts: int
    warps: int
    stages: int
    step: int


def choose_tile(rows: int, experts: int, deterministic: bool) -> RouterTile:
    """`experts` a power of two. A row's sum is cut at the same channels whatever the batch if deterministic."""
    if deterministic or rows <= FEW_ROWS:
        return RouterTile(16, min(64, experts), 16, 4, 3, 64)
    return RouterTile(64, min(128, experts), 1 if rows >= 4096 else 2, 8, 2, 32)


class TritonRouter:
    """Launches of one router must follow each other on one stream: they share the parts."""

    def __init__(self, context: KernelContext) -> None:
        self._deterministic = context.deterministic
        self._parts = torch.empty(0, device=context.device)
        self._arrived = torch.zeros(1024, dtype=torch.int32, device=context.device)

    def __call__(self, x: Tensor, gate: Tensor, bias: Tensor, rule: RouterRule) -> tuple[Tensor, Tensor]:
        (rows, width), experts = x.shape, gate.shape[0]
        x = x if x.stride(1) == 1 else x.contiguous()
        ids = torch.empty((rows, rule.top_k), dtype=torch.int32, device=x.device)
        weights = torch.empty((rows, rule.top_k), dtype=torch.float32, device=x.device)
        if not rows:
            return ids, weights
        padded = max(16, next_power_of_two(experts))
        tile = choose_tile(rows, padded, self._deterministic)
        tiles, cuts = ceil_div(rows, tile.rows), min(tile.cuts, ceil_div(width, tile.step))
        if self._parts.numel() < tiles * cuts * tile.rows * padded:
            self._parts = torch.empty(tiles * cuts * tile.rows * padded, dtype=torch.float32, device=x.device)
        if self._arrived.numel() < tiles:
            self._arrived = torch.zeros(2 * tiles, dtype=torch.int32, device=x.device)
        grouped = rule.groups > 1
        router_kernel[(tiles, ceil_div(padded, tile.wide), cuts)](
            x, gate.contiguous(), bias, self._parts, self._arrived, ids, weights, rows, width, experts, rule.groups,
            experts // rule.groups, rule.groups_kept, rule.scaling, x.stride(0), NORMALISE=rule.normalise,
            TOP=rule.top_k, E=padded, GROUPS=max(2, next_power_of_two(rule.groups)) if grouped else 1, R=tile.rows,
            WIDE=tile.wide, CUTS=cuts, STEP=tile.step, PRECISION=precision(x.device), num_warps=tile.warps,
            num_stages=tile.stages,
        )  # fmt: skip
        return ids, weights


def create(context: KernelContext) -> TritonRouter:
    return TritonRouter(context)
