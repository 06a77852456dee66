"""Dimensions of the nano model, and the `config.json` and `generation_config.json` that state them.

The file keys and their order follow GLM-5.2's; only the numbers are smaller.
"""

from dataclasses import dataclass
from typing import Any

BLOCK = 128  # side of an FP8 weight block, and channels per activation scale


@dataclass(frozen=True)
class NanoShape:
    """All sizes in elements. `used_vocab_size` ids exist in the tokenizer; the rest of the matrix is padding."""

    hidden_size: int = 256
    num_hidden_layers: int = 6
    first_k_dense_replace: int = 1
    intermediate_size: int = 512
    num_attention_heads: int = 4
    q_lora_rank: int = 256
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 64
    v_head_dim: int = 96  # differs from the nope width, so kv_b's head boundaries cross scale blocks as in GLM-5.2
    index_n_heads: int = 4
    index_head_dim: int = 128
    index_topk: int = 256
    index_topk_freq: int = 3
    index_skip_topk_offset: int = 2
    n_routed_experts: int = 16
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 64
    routed_scaling_factor: float = 2.5
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1_000_000.0
    max_position_embeddings: int = 65_536
    vocab_size: int = 3_840
    used_vocab_size: int = 3_812
    base_vocab_size: int = 3_776  # ids below this are BPE tokens, the 36 after it are added tokens

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def mtp_layer(self) -> int:
        return self.num_hidden_layers

    @property
    def indexer_types(self) -> list[str]:
        """`full` layers run an indexer, `shared` layers reuse the selection of the nearest full layer below."""
        past = [max(i - self.index_skip_topk_offset + 1, 0) for i in range(self.num_hidden_layers)]
        return ["full" if p % self.index_topk_freq == 0 else "shared" for p in past]

    def has_indexer(self, layer: int) -> bool:
        return layer == self.mtp_layer or self.indexer_types[layer] == "full"

    def is_dense(self, layer: int) -> bool:
        return layer < self.first_k_dense_replace


def unconverted_modules(shape: NanoShape) -> list[str]:
    """The `modules_to_not_convert` list in the published repositories' form.

    `indexers_proj` is their misnomer, kept on purpose: a loader must go by which `_scale_inv` tensors exist.
    """
    names: list[str] = []
    for i in range(shape.num_hidden_layers + 1):
        prefix = f"model.layers.{i}"
        names += [f"{prefix}.input_layernorm", f"{prefix}.post_attention_layernorm"]
        names += [f"{prefix}.self_attn.q_a_layernorm", f"{prefix}.self_attn.kv_a_layernorm"]
        if not shape.is_dense(i):
            names += [f"{prefix}.mlp.gate", f"{prefix}.mlp.gate.e_score_correction_bias"]
        if shape.has_indexer(i):
            indexer = f"{prefix}.self_attn.indexer"
            names += [f"{indexer}.k_norm", f"{indexer}.k_norm.bias", f"{prefix}.self_attn.indexers_proj"]
    mtp = f"model.layers.{shape.mtp_layer}"
    names += [f"{mtp}.hnorm", f"{mtp}.enorm", f"{mtp}.eh_proj", f"{mtp}.shared_head.norm"]
    return [*names, "model.norm", "lm_head", "model.embed_tokens"]


def _token_ids(shape: NanoShape) -> dict[str, Any]:
    # <|endoftext|>, <|user|>, <|observation|>: the model ends a turn by starting the next role.
    base = shape.base_vocab_size
    return {"eos_token_id": [base, base + 7, base + 9], "pad_token_id": base}


def config_json(shape: NanoShape) -> dict[str, Any]:
    """Content of `config.json`."""
    dense = shape.first_k_dense_replace
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        **_token_ids(shape),
        "ep_size": 1,
        "first_k_dense_replace": dense,
        "head_dim": shape.qk_nope_head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "index_head_dim": shape.index_head_dim,
        "index_n_heads": shape.index_n_heads,
        "index_share_for_mtp_iteration": True,
        "index_skip_topk_offset": shape.index_skip_topk_offset,
        "index_topk": shape.index_topk,
        "index_topk_freq": shape.index_topk_freq,
        "index_topk_pattern": None,
        "indexer_rope_interleave": True,
        "indexer_types": shape.indexer_types,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "kv_lora_rank": shape.kv_lora_rank,
        "max_position_embeddings": shape.max_position_embeddings,
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (shape.num_hidden_layers - dense),
        "model_type": "glm_moe_dsa",
        "moe_intermediate_size": shape.moe_intermediate_size,
        "moe_layer_freq": 1,
        "moe_router_dtype": "float32",
        "n_group": 1,
        "n_routed_experts": shape.n_routed_experts,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": shape.num_attention_heads,
        "num_experts_per_tok": shape.num_experts_per_tok,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_key_value_heads": shape.num_attention_heads,
        "num_nextn_predict_layers": 1,
        "pretraining_tp": 1,
        "q_lora_rank": shape.q_lora_rank,
        "qk_head_dim": shape.qk_head_dim,
        "qk_nope_head_dim": shape.qk_nope_head_dim,
        "qk_rope_head_dim": shape.qk_rope_head_dim,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "modules_to_not_convert": unconverted_modules(shape),
            "quant_method": "fp8",
            "weight_block_size": [BLOCK, BLOCK],
        },
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_interleave": True,
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        "routed_scaling_factor": shape.routed_scaling_factor,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "transformers_version": "5.12.0",
        "use_cache": True,
        "v_head_dim": shape.v_head_dim,
        "vocab_size": shape.vocab_size,
    }


def generation_config_json(shape: NanoShape) -> dict[str, Any]:
    """Content of `generation_config.json`. Sampling defaults are GLM-5.2's."""
    return {**_token_ids(shape), "do_sample": True, "temperature": 1.0, "top_p": 0.95, "transformers_version": "5.12.0"}
