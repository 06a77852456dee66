"""Every tensor of the checkpoint by name, shape and dtype, derived from the dimensions alone.

Convention: an `fp8` weight `X.weight` [out, in] comes with `X.weight_scale_inv` fp32 [ceil(out/128), ceil(in/128)],
which *multiplies* its block; last blocks may be partial. The export writes this list and the tests compare to it.
"""

from dataclasses import dataclass

from headrace.model.nano.train.shape import BLOCK, NanoShape


@dataclass(frozen=True)
class TensorSpec:
    """`dtype` is the safetensors name: F8_E4M3, BF16 or F32."""

    name: str
    shape: tuple[int, ...]
    dtype: str


def scale_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Shape of the scales of an [out, in] weight, in blocks."""
    out, inner = shape
    return -(-out // BLOCK), -(-inner // BLOCK)


def _fp8(name: str, out: int, inner: int) -> list[TensorSpec]:
    return [
        TensorSpec(f"{name}.weight", (out, inner), "F8_E4M3"),
        TensorSpec(f"{name}.weight_scale_inv", scale_shape((out, inner)), "F32"),
    ]


def _bf16(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, shape, "BF16")


def _mlp(prefix: str, hidden: int, inner: int) -> list[TensorSpec]:
    return [
        *_fp8(f"{prefix}.gate_proj", inner, hidden),
        *_fp8(f"{prefix}.up_proj", inner, hidden),
        *_fp8(f"{prefix}.down_proj", hidden, inner),
    ]


def _attention(prefix: str, s: NanoShape) -> list[TensorSpec]:
    heads, latent = s.num_attention_heads, s.kv_lora_rank
    return [
        *_fp8(f"{prefix}.q_a_proj", s.q_lora_rank, s.hidden_size),
        _bf16(f"{prefix}.q_a_layernorm.weight", s.q_lora_rank),
        *_fp8(f"{prefix}.q_b_proj", heads * s.qk_head_dim, s.q_lora_rank),
        *_fp8(f"{prefix}.kv_a_proj_with_mqa", latent + s.qk_rope_head_dim, s.hidden_size),
        _bf16(f"{prefix}.kv_a_layernorm.weight", latent),
        *_fp8(f"{prefix}.kv_b_proj", heads * (s.qk_nope_head_dim + s.v_head_dim), latent),
        *_fp8(f"{prefix}.o_proj", s.hidden_size, heads * s.v_head_dim),
    ]


def _indexer(prefix: str, s: NanoShape) -> list[TensorSpec]:
    return [
        *_fp8(f"{prefix}.wq_b", s.index_n_heads * s.index_head_dim, s.q_lora_rank),
        *_fp8(f"{prefix}.wk", s.index_head_dim, s.hidden_size),
        _bf16(f"{prefix}.weights_proj.weight", s.index_n_heads, s.hidden_size),
        _bf16(f"{prefix}.k_norm.weight", s.index_head_dim),
        _bf16(f"{prefix}.k_norm.bias", s.index_head_dim),
    ]


def _moe(prefix: str, s: NanoShape) -> list[TensorSpec]:
    specs = [
        _bf16(f"{prefix}.gate.weight", s.n_routed_experts, s.hidden_size),
        TensorSpec(f"{prefix}.gate.e_score_correction_bias", (s.n_routed_experts,), "F32"),
    ]
    for expert in range(s.n_routed_experts):
        specs += _mlp(f"{prefix}.experts.{expert}", s.hidden_size, s.moe_intermediate_size)
    return specs + _mlp(f"{prefix}.shared_experts", s.hidden_size, s.moe_intermediate_size)


def _layer(layer: int, s: NanoShape) -> list[TensorSpec]:
    prefix = f"model.layers.{layer}"
    specs = [
        _bf16(f"{prefix}.input_layernorm.weight", s.hidden_size),
        _bf16(f"{prefix}.post_attention_layernorm.weight", s.hidden_size),
        *_attention(f"{prefix}.self_attn", s),
    ]
    if s.has_indexer(layer):
        specs += _indexer(f"{prefix}.self_attn.indexer", s)
    if s.is_dense(layer):
        specs += _mlp(f"{prefix}.mlp", s.hidden_size, s.intermediate_size)
    else:
        specs += _moe(f"{prefix}.mlp", s)
    if layer == s.mtp_layer:
        specs += [
            _bf16(f"{prefix}.enorm.weight", s.hidden_size),
            _bf16(f"{prefix}.hnorm.weight", s.hidden_size),
            _bf16(f"{prefix}.eh_proj.weight", s.hidden_size, 2 * s.hidden_size),
            _bf16(f"{prefix}.shared_head.norm.weight", s.hidden_size),
        ]
    return specs


def checkpoint_layout(s: NanoShape) -> list[TensorSpec]:
    """All tensors in file order: embedding, layers (the MTP layer last), final norm, head."""
    specs = [_bf16("model.embed_tokens.weight", s.vocab_size, s.hidden_size)]
    for layer in range(s.num_hidden_layers + 1):
        specs += _layer(layer, s)
    return [*specs, _bf16("model.norm.weight", s.hidden_size), _bf16("lm_head.weight", s.vocab_size, s.hidden_size)]
