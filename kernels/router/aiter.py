"""aiter's choice of experts (sigmoid scores, bias, group limits). Logits are a plain fp32 product."""

import torch
from torch import Tensor

from headrace.kernels.aiter_library import call
from headrace.kernels.base import KernelContext, RouterRule


class AiterRouter:
    def __call__(self, x: Tensor, gate: Tensor, bias: Tensor, rule: RouterRule) -> tuple[Tensor, Tensor]:
        rows = x.shape[0]
        ids = torch.empty((rows, rule.top_k), dtype=torch.int32, device=x.device)
        weights = torch.empty((rows, rule.top_k), dtype=torch.float32, device=x.device)
        if rows:
            call(
                "biased_grouped_topk", gating_output=x @ gate.t(), correction_bias=bias, topk_weights=weights,
                topk_ids=ids, num_expert_group=rule.groups, topk_group=rule.groups_kept,
                need_renorm=rule.normalise, routed_scaling_factor=rule.scaling,
            )  # fmt: skip
        ids, order = ids.sort(-1)
        return ids, weights.gather(1, order)


def create(context: KernelContext) -> AiterRouter:
    return AiterRouter()
