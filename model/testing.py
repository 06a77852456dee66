"""Small models for tests of every room: real architecture, random weights, a second to build."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from headrace.model.build import build_model
from headrace.model.dummy import DummySource
from headrace.model.placement import Placement
from headrace.model.spec import ModelSpec, RopeSpec
from headrace.model.tensors import SCALE_SUFFIX, model_tensors
from headrace.model.transformer import Transformer

_TINY = ModelSpec(
    model_type="glm_moe_dsa",
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=2,
    q_lora_rank=64,
    kv_lora_rank=512,
    qk_nope_head_dim=32,
    qk_rope_head_dim=64,
    v_head_dim=48,
    intermediate_size=128,
    moe_intermediate_size=32,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    dense_layers=(0,),
    full_layers=(0, 2),
    index_n_heads=2,
    index_head_dim=128,
    index_topk=32,
    rope_interleaved=True,
    indexer_interleaved=True,
    has_mtp=True,
    shares_draft_index=True,
    rope=RopeSpec(theta=10000.0),
    max_position_embeddings=4096,
    vocab_size=512,
    used_vocab_size=500,
    tie_word_embeddings=False,
    rms_norm_eps=1e-5,
    eos_token_ids=(0,),
)


def tiny_spec(**changes: Any) -> ModelSpec:
    """Three layers (full, shared, full), 8 experts, index_topk 32, 512 tokens of vocabulary; any field can change."""
    return dataclasses.replace(_TINY, **changes)


def tiny_model(
    spec: ModelSpec | None = None,
    *,
    seed: int = 0,
    ep_rank: int = 0,
    ep_size: int = 1,
    placement: Placement | None = None,
    row_format: str = "tile656",
    deterministic: bool = True,
    quantised: bool | None = None,
) -> Transformer:
    """A CPU model with random weights; the same seed gives shards of the same model for any placement (default: its
    experts split over `ep_size` ranks)."""
    spec = spec or tiny_spec()
    source = DummySource(spec, seed, quantised)
    placement = placement or Placement.expert_split(ep_rank, ep_size)
    return build_model(source, spec, "cpu", placement, row_format, deterministic)


def config_json(spec: ModelSpec) -> dict[str, Any]:
    """A `config.json` that parses to `spec` (padding ids and YaRN excepted: they come from other files or tests)."""
    fields = dataclasses.asdict(spec)
    for derived in ("rope", "dense_layers", "full_layers", "has_mtp", "shares_draft_index", "used_vocab_size"):
        fields.pop(derived)
    if fields.pop("quantised"):
        fields["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    layers = range(spec.num_hidden_layers)
    return fields | {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "mlp_layer_types": ["dense" if spec.is_dense(i) else "sparse" for i in layers],
        "indexer_types": ["full" if i in spec.full_layers else "shared" for i in layers],
        "rope_interleave": fields.pop("rope_interleaved"),
        "indexer_rope_interleave": fields.pop("indexer_interleaved"),
        "num_nextn_predict_layers": int(spec.has_mtp),
        "index_share_for_mtp_iteration": spec.shares_draft_index,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope.theta},
        "eos_token_id": list(fields.pop("eos_token_ids")),
    }


def write_config(spec: ModelSpec, directory: Path) -> Path:
    """A checkpoint directory with a config only: enough for `load_format: dummy`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config_json(spec), indent=1))
    return directory


def write_checkpoint(
    spec: ModelSpec, directory: Path, *, seed: int = 0, quantised: bool | None = None, shards: int = 1
) -> Path:
    """The weights of `tiny_model(spec, seed=seed)` as a Hugging Face directory."""
    if quantised is not None:
        spec = dataclasses.replace(spec, quantised=quantised)
    write_config(spec, directory)
    source = DummySource(spec, seed)
    names = [n for t in model_tensors(spec) for n in (t.name, t.name + SCALE_SUFFIX) if source.has(n)]
    tensors: dict[str, torch.Tensor] = {name: source.get(name) for name in names}
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    weight_map = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(weight_map.values())):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory
