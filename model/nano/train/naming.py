"""Translates between the trainable model's parameters and the checkpoint's tensor names."""

import torch
from torch import Tensor

from headrace.model.nano.train.layers import MoE
from headrace.model.nano.train.model import NanoModel

# Trainable name to checkpoint name, for what is not inside a decoder layer.
OUTER = {
    "embed_tokens": "model.embed_tokens.weight",
    "lm_head": "lm_head.weight",
    "norm.weight": "model.norm.weight",
}
MTP_OUTER = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "eh_proj": "eh_proj.weight",
    "shared_head_norm.weight": "shared_head.norm.weight",
}


def _moe_views(prefix: str, moe: MoE) -> dict[str, Tensor]:
    """Views of the stacked expert tensors under their unfused names; the last expert is the shared one."""
    views = {f"{prefix}.gate.weight": moe.gate.data, f"{prefix}.gate.e_score_correction_bias": moe.bias}
    routed = moe.shape.n_routed_experts
    for kind in ("gate_proj", "up_proj", "down_proj"):
        stacked = getattr(moe, kind).data
        for expert in range(routed):
            views[f"{prefix}.experts.{expert}.{kind}.weight"] = stacked[expert]
        views[f"{prefix}.shared_experts.{kind}.weight"] = stacked[routed]
    return views


def named_views(model: NanoModel) -> dict[str, Tensor]:
    """Every parameter and router bias by checkpoint name, as views: writing to one writes to the model."""
    mtp = f"model.layers.{model.shape.mtp_layer}."
    views = {name: model.get_parameter(own).data for own, name in OUTER.items()}
    views |= {mtp + name: model.get_parameter(own).data for own, name in MTP_OUTER.items()}
    for i, block in enumerate(model.layers):
        for own, parameter in block.named_parameters():
            if own.startswith("mlp.") and isinstance(block.mlp, MoE):
                continue
            name = own if own.endswith((".weight", ".bias")) else own + ".weight"
            views[f"model.layers.{i}.{name}"] = parameter.data
        if isinstance(block.mlp, MoE):
            views |= _moe_views(f"model.layers.{i}.mlp", block.mlp)
    return views


@torch.no_grad()
def load_weights(model: NanoModel, weights: dict[str, Tensor]) -> None:
    """Copies fp32 tensors by checkpoint name into the model; every name must be there, and no other."""
    views = named_views(model)
    if views.keys() != weights.keys():
        raise ValueError(f"names differ: {sorted(views.keys() ^ weights.keys())[:6]}")
    for name, view in views.items():
        view.copy_(weights[name])
