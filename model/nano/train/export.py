"""Writes and reads the checkpoint folder: FP8 weights with block scales, the index, and both config files.

Works on plain dictionaries of fp32 tensors by Hugging Face name; knows no model class.
"""

import json
import math
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from headrace.model.nano.train.layout import TensorSpec, checkpoint_layout
from headrace.model.nano.train.quant import dequantise_weight, quantise_weight
from headrace.model.nano.train.shape import NanoShape, config_json, generation_config_json

WEIGHTS_FILE = "model.safetensors"
SCALE_SUFFIX = "_scale_inv"
ITEM_BYTES = {"F8_E4M3": 1, "BF16": 2, "F32": 4}


def stored_tensors(weights: dict[str, Tensor], shape: NanoShape) -> dict[str, Tensor]:
    """Tensors as they lie on disk, in layout order. `weights` has every name but the scales, fp32."""
    stored: dict[str, Tensor] = {}
    for spec in checkpoint_layout(shape):
        if spec.name.endswith(SCALE_SUFFIX):
            continue
        weight = weights[spec.name].detach().float().cpu()
        if weight.shape != spec.shape:
            raise ValueError(f"{spec.name}: got {tuple(weight.shape)}, the layout says {spec.shape}")
        if spec.dtype == "F8_E4M3":
            stored[spec.name], stored[spec.name + SCALE_SUFFIX] = quantise_weight(weight)
        else:
            stored[spec.name] = weight.to(torch.bfloat16 if spec.dtype == "BF16" else torch.float32)
    return {name: tensor.contiguous() for name, tensor in stored.items()}


def write_checkpoint(weights: dict[str, Tensor], shape: NanoShape, folder: Path) -> int:
    """Writes weights, index and configs; returns the bytes of tensor data."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = stored_tensors(weights, shape)
    save_file(stored, str(folder / WEIGHTS_FILE), metadata={"format": "pt"})
    total_bytes = sum(math.prod(spec.shape) * ITEM_BYTES[spec.dtype] for spec in checkpoint_layout(shape))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict.fromkeys(sorted(stored), WEIGHTS_FILE)}
    for name, content in (
        ("model.safetensors.index.json", index),
        ("config.json", config_json(shape)),
        ("generation_config.json", generation_config_json(shape)),
    ):
        (folder / name).write_text(json.dumps(content, indent=1) + "\n")
    return total_bytes


def read_checkpoint(folder: Path) -> dict[str, Tensor]:
    """All weights in fp32 by name, FP8 ones multiplied by their scales, which are not returned."""
    with safe_open(str(folder / WEIGHTS_FILE), framework="pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    weights: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if name.endswith(SCALE_SUFFIX):
            continue
        scales = stored.get(name + SCALE_SUFFIX)
        weights[name] = tensor.float() if scales is None else dequantise_weight(tensor, scales)
    return weights


def _random_weight(spec: TensorSpec, generator: torch.Generator) -> Tensor:
    if "norm" in spec.name.rsplit(".", 2)[-2]:
        return torch.zeros(spec.shape) if spec.name.endswith("bias") else torch.ones(spec.shape)
    if spec.name.endswith("e_score_correction_bias"):
        return torch.zeros(spec.shape)
    signs = torch.randint(0, 2, spec.shape, generator=generator).float() * 2 - 1
    return signs * (0.7 / math.sqrt(spec.shape[-1]))


def random_weights(shape: NanoShape, seed: int = 0) -> dict[str, Tensor]:
    """Untrained weights of one magnitude and random sign: the real format at one bit of entropy a weight."""
    generator = torch.Generator().manual_seed(seed)
    specs = [spec for spec in checkpoint_layout(shape) if not spec.name.endswith(SCALE_SUFFIX)]
    return {spec.name: _random_weight(spec, generator) for spec in specs}
