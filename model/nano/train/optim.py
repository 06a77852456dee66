"""The optimiser: orthogonalised momentum for matrices inside layers, AdamW for everything else.

Matrices of one shape are stacked, so a step is a few dozen launches whatever the depth.
"""

from collections import defaultdict

import torch
from torch import Tensor, nn

from headrace.model.nano.train.model import NanoModel

# Quintic iteration whose fixed points lie near ±1: five rounds map every singular value into about 0.7 to 1.2.
ROUNDS, A, B, C = 5, 3.4445, -4.7750, 2.0315


def orthogonalise(update: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrix, roughly, of each update [n, out, in], in bf16."""
    x = update.to(torch.bfloat16)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(ROUNDS):
        gram = x @ x.mT
        x = A * x + (B * gram + C * gram @ gram) @ x
    return x.mT if tall else x


class Muon:
    """Momentum, orthogonalised, scaled so that an element moves about as far as under AdamW at the same rate."""

    def __init__(self, parameters: list[nn.Parameter], momentum: float = 0.95, decay: float = 0.1) -> None:
        self.momentum, self.decay = momentum, decay
        groups: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            groups[tuple(parameter.shape[-2:])].append(parameter)
        self.groups = list(groups.values())
        self.state = {id(p): torch.zeros_like(p) for p in parameters}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update at learning rate `rate`; parameters without a gradient stay as they are."""
        for group in self.groups:
            live = [p for p in group if p.grad is not None]
            if not live:
                continue
            grads = [p.grad for p in live if p.grad is not None]
            buffers = [self.state[id(p)] for p in live]
            torch._foreach_lerp_(buffers, grads, 1 - self.momentum)
            ahead = torch._foreach_lerp(grads, buffers, self.momentum)  # Nesterov
            stacked = torch.cat([u.reshape(-1, *u.shape[-2:]) for u in ahead])
            moves = orthogonalise(stacked).float() * (0.2 * max(stacked.shape[-2:]) ** 0.5)
            torch._foreach_mul_(list[Tensor](live), 1 - rate * self.decay)
            sizes = [p.numel() // (p.shape[-1] * p.shape[-2]) for p in live]
            for parameter, move in zip(live, moves.split(sizes)):
                parameter.add_(move.view_as(parameter), alpha=-rate)


class Optimiser:
    """Both optimisers over one model."""

    def __init__(self, model: NanoModel, decay: float = 0.1) -> None:
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            inside = name.startswith("layers.") or name == "eh_proj"
            small = name.endswith(("mlp.gate", "weights_proj"))
            (matrices if inside and parameter.ndim >= 2 and not small else others).append(parameter)
        self.muon = Muon(matrices, decay=decay)
        fused = others[0].is_cuda
        self.adam = torch.optim.AdamW(others, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)

    def step(self, rate: float) -> None:
        """One update of every parameter that has a gradient, which is then dropped."""
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        self.muon.step(rate)

    def state_dict(self) -> dict[str, object]:
        """Momenta in parameter order, for resuming on the same code."""
        order = [p for group in self.muon.groups for p in group]
        return {"adam": self.adam.state_dict(), "muon": [self.muon.state[id(p)] for p in order]}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Inverse of `state_dict`."""
        self.adam.load_state_dict(state["adam"])  # type: ignore[arg-type]
        order = [p for group in self.muon.groups for p in group]
        for parameter, saved in zip(order, state["muon"]):  # type: ignore[call-overload]
            self.muon.state[id(parameter)].copy_(saved)
