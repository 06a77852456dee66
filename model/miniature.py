"""Shape-faithful miniatures of published checkpoints: every layer and every tensor name of the real one, its config in
its own words, FP8 with scales or BF16, sharded with an index; only widths and the number of experts shrink.

What makes the real shapes awkward stays: nope width is not v width, heads of kv_b_proj cross scale blocks, rows and
columns end in partial blocks, and DeepSeek's MTP layer repeats embedding and head.
"""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from headrace.model.dummy import DummySource
from headrace.model.source import INDEX_FILE
from headrace.model.spec import ModelSpec, parse_config, resolve_path
from headrace.model.tensors import SCALE_SUFFIX, stored_tensors

WIDTHS: dict[str, int] = {
    "hidden_size": 160,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 96,
    "intermediate_size": 144,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 3,
    "index_n_heads": 2,
    "index_topk": 32,
    "vocab_size": 300,
}
"""KV latent 512, rotary 64 and index head 128 are fixed by the cache rows."""
HEADS = {"glm_moe_dsa": (24, 32), "deepseek_v32": (24, 24)}
"""(nope, v) per head: 56 or 48 rows of kv_b_proj a head, so heads cross the 128-row blocks."""


def miniature_config(model: str | Path, experts: int = 16) -> dict[str, Any]:
    """`config.json` of a published model with small widths; layers, sharing, routing and RoPE as they are."""
    raw: dict[str, Any] = json.loads((resolve_path(model) / "config.json").read_text())
    nope, v_dim = HEADS[raw["model_type"]]
    changes = WIDTHS | {"n_routed_experts": experts, "qk_nope_head_dim": nope, "v_head_dim": v_dim, "eos_token_id": 1}
    if "qk_head_dim" in raw:
        changes["qk_head_dim"] = nope + raw["qk_rope_head_dim"]
    return raw | changes


def write_miniature(
    model: str | Path, directory: Path, *, experts: int = 16, shards: int = 4, seed: int = 0
) -> ModelSpec:
    """Write a miniature of a directory or preset; returns its spec. Shards hold consecutive tensors, cut between a
    weight and its scale where there are scales. Memory: one shard."""
    directory.mkdir(parents=True, exist_ok=True)
    raw = miniature_config(model, experts)
    (directory / "config.json").write_text(json.dumps(raw, indent=1))
    spec = parse_config(raw, {}, None, str(directory))
    source = DummySource(spec, seed)
    names = [(tensor.name, tensor.name) for tensor in stored_tensors(spec)]
    if spec.model_type == "deepseek_v32":
        prefix = f"model.layers.{spec.mtp_layer}."
        names.append((f"{prefix}embed_tokens.weight", "model.embed_tokens.weight"))
        names.append((f"{prefix}shared_head.head.weight", "lm_head.weight"))
    weight_map: dict[str, str] = {}
    total = 0
    for shard in range(shards):
        part = names[_cut(names, shard, shards) : _cut(names, shard + 1, shards)]
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        tensors: dict[str, Tensor] = {name: source.get(origin) for name, origin in part}
        save_file(tensors, directory / file)
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=1))
    return spec


def _cut(names: list[tuple[str, str]], shard: int, shards: int) -> int:
    """Where a shard begins: at its even share, or at the first scale after it."""
    even = shard * len(names) // shards
    if shard in (0, shards):
        return even
    return next((i for i in range(even, len(names)) if names[i][0].endswith(SCALE_SUFFIX)), even)
