"""Definition of the router, all in fp32: sigmoid scores, bias for the choice only, group limits, lower id wins ties."""

import torch
from torch import Tensor

from headrace.kernels.base import KernelContext, RouterRule
from headrace.kernels.tiles import matmul_rows, pad_rows


class ReferenceRouter:
    def __init__(self, context: KernelContext) -> None:
        self._deterministic = context.deterministic

    def __call__(self, x: Tensor, gate: Tensor, bias: Tensor, rule: RouterRule) -> tuple[Tensor, Tensor]:
        rows = x.shape[0]
        if self._deterministic:
            x = pad_rows(x)
        scores = torch.sigmoid(matmul_rows(x, gate.t(), self._deterministic))
        choice = limit_groups(scores + bias, rule) if rule.groups > 1 else scores + bias
        ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : rule.top_k].sort(-1).values
        weights = scores.gather(1, ids)
        if rule.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return ids[:rows].to(torch.int32), (weights * rule.scaling)[:rows]


def limit_groups(choice: Tensor, rule: RouterRule) -> Tensor:
    """-inf outside the best groups; a group's score is the sum of its two best experts."""
    grouped = choice.view(choice.shape[0], rule.groups, -1)
    score = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
    best = score.sort(dim=-1, descending=True, stable=True).indices[:, : rule.groups_kept]
    kept = torch.zeros_like(score, dtype=torch.bool).scatter_(1, best, True)
    return grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1)


def create(context: KernelContext) -> ReferenceRouter:
    return ReferenceRouter(context)
