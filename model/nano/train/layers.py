"""Building blocks of the trainable model: linear layers with optional FP8 round trips, norms, rotary tables, MLP, MoE.

Legend: B sequences, T tokens, H hidden, E experts (routed, then the shared one last), I expert width.
Parameters are fp32 masters; products run in the dtype of the activations.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from headrace.model.nano.train.quant import round_activation, round_weight
from headrace.model.nano.train.shape import NanoShape


@dataclass(frozen=True)
class Mode:
    """What one forward pass does. Hashable, so that each combination compiles once."""

    sparse: bool = False  # attend to the indexer's selection only
    fp8_weights: bool = False  # round weights to e4m3; off when they are already on that grid
    fp8_activations: bool = False  # round linear inputs, latent rows and index keys as the serving path does
    distil_rows: int = 0  # query rows a sequence on which the indexer is fitted to dense attention
    draft_steps: int = 1  # chained MTP steps
    soft_drafts: bool = False  # MTP learns the main model's distribution instead of the text
    concentrate: bool = False  # attention learns to leave little outside the selection, on the distillation rows


def as_stored(weight: Tensor, mode: Mode) -> Tensor:
    """The weight with the rounding it will have on disk, if the mode asks for it."""
    return round_weight(weight) if mode.fp8_weights else weight


def linear(x: Tensor, weight: Tensor, mode: Mode, group: int = 128) -> Tensor:
    """x [..., in] · weight [out, in]ᵀ, through FP8 on both sides if the mode says so."""
    if mode.fp8_activations:
        x = round_activation(x, group)
    return functional.linear(x, as_stored(weight, mode).to(x.dtype))


class RMSNorm(nn.Module):
    """Normalises the last dimension in fp32, rounds to the activation dtype, then scales."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight.to(x.dtype)


def rotary_table(positions: Tensor, shape: NanoShape) -> Tensor:
    """fp32 [2, T, 32]: cosines and sines of `positions` [T] for the 32 rotary pairs."""
    pairs = torch.arange(0, shape.qk_rope_head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions.float()[:, None] * shape.rope_theta ** (-pairs / shape.qk_rope_head_dim)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotates neighbouring pairs of x [B, T, heads, 64] in place of each other (interleaved), in fp32."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = table[0][:, None], table[1][:, None]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2).to(x.dtype)


def matrix(out: int, inner: int, gain: float = 1.0, copies: tuple[int, ...] = ()) -> nn.Parameter:
    """fp32 [*copies, out, in], normal with deviation gain/√in."""
    return nn.Parameter(torch.randn(*copies, out, inner) * (gain * inner**-0.5))


class DenseMLP(nn.Module):
    """SwiGLU of the leading dense layers."""

    def __init__(self, shape: NanoShape, out_gain: float) -> None:
        super().__init__()
        self.gate_proj = matrix(shape.intermediate_size, shape.hidden_size)
        self.up_proj = matrix(shape.intermediate_size, shape.hidden_size)
        self.down_proj = matrix(shape.hidden_size, shape.intermediate_size, out_gain)

    def forward(self, x: Tensor, mode: Mode) -> tuple[Tensor, Tensor | None]:
        inner = functional.silu(linear(x, self.gate_proj, mode)) * linear(x, self.up_proj, mode)
        return linear(inner, self.down_proj, mode), None


class MoE(nn.Module):
    """Sigmoid-routed experts plus a shared one, computed densely: at this width one wide product beats a dispatch."""

    bias: Tensor  # fp32 [E − 1]: added to the scores for the choice only

    def __init__(self, shape: NanoShape, out_gain: float) -> None:
        super().__init__()
        self.shape = shape
        experts = (shape.n_routed_experts + 1,)
        self.gate = matrix(shape.n_routed_experts, shape.hidden_size, 0.2)
        self.register_buffer("bias", torch.zeros(shape.n_routed_experts))
        self.gate_proj = matrix(shape.moe_intermediate_size, shape.hidden_size, copies=experts)
        self.up_proj = matrix(shape.moe_intermediate_size, shape.hidden_size, copies=experts)
        self.down_proj = matrix(shape.hidden_size, shape.moe_intermediate_size, out_gain, copies=experts)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights fp32 [..., E] (zero where not chosen) and the mean share of tokens each routed expert got [E−1]."""
        scores = torch.sigmoid(functional.linear(x.float(), self.gate.to(torch.bfloat16).float()))
        choice = scores.detach() + self.bias
        rank = (choice[..., None, :] > choice[..., :, None]).sum(-1)
        chosen = (rank < self.shape.num_experts_per_tok).float()
        weights = scores * chosen
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.shape.routed_scaling_factor
        shared = torch.ones_like(weights[..., :1])
        return torch.cat((weights, shared), -1), chosen.flatten(0, -2).mean(0)

    def forward(self, x: Tensor, mode: Mode) -> tuple[Tensor, Tensor | None]:
        weights, load = self.route(x)
        count, width = self.gate_proj.shape[:2]
        gate_up = torch.cat((as_stored(self.gate_proj, mode), as_stored(self.up_proj, mode))).flatten(0, 1)
        source = round_activation(x) if mode.fp8_activations else x
        gate, up = functional.linear(source, gate_up.to(x.dtype)).chunk(2, -1)
        inner = (functional.silu(gate) * up).unflatten(-1, (count, width))  # [..., E, I]
        if mode.fp8_activations:
            inner = round_activation(inner, width)
        inner = (inner * weights[..., None].to(x.dtype)).flatten(-2)
        down = as_stored(self.down_proj, mode).transpose(0, 1).flatten(1)  # [H, E·I]
        return functional.linear(inner, down.to(x.dtype)), load
