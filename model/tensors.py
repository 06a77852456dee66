"""Every tensor a checkpoint of a model must hold, from its dimensions alone. Torch-free.

`model_tensors` is what a loader needs: whether a matrix is FP8 is decided by the presence of `<name>_scale_inv` in the
checkpoint. `stored_tensors` is what the published repositories hold: dtypes, scales and bytes.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator

from headrace.model.spec import ModelSpec

SCALE_SUFFIX = "_scale_inv"
SCALE_BLOCK = 128
DTYPE_BYTES = {"F8_E4M3": 1, "BF16": 2, "F16": 2, "F32": 4}


@dataclasses.dataclass(frozen=True, slots=True)
class TensorShape:
    name: str
    shape: tuple[int, ...]
    quantisable: bool = False
    """True: published FP8 checkpoints store it as e4m3 with 128 x 128 block scales."""
    expert: int = -1
    """Routed expert it belongs to; -1: every rank needs it."""


def scale_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """One scale a 128 x 128 block; the last ones of a row or column may be partial."""
    return -(-shape[0] // SCALE_BLOCK), -(-shape[1] // SCALE_BLOCK)


@dataclasses.dataclass(frozen=True, slots=True)
class StoredTensor:
    """One entry of a published checkpoint; `dtype` is the safetensors name."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    expert: int = -1

    @property
    def values(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.values * DTYPE_BYTES[self.dtype]


def stored_tensors(spec: ModelSpec, is_fp8: Callable[[str], bool] | None = None) -> Iterator[StoredTensor]:
    """The published layout. `is_fp8` says of a matrix that could be FP8 whether it is; None: as the config announces.
    A scale follows its weight."""
    for tensor in model_tensors(spec):
        if tensor.quantisable and (spec.quantised if is_fp8 is None else is_fp8(tensor.name)):
            yield StoredTensor(tensor.name, tensor.shape, "F8_E4M3", tensor.expert)
            yield StoredTensor(tensor.name + SCALE_SUFFIX, scale_shape(tensor.shape), "F32", tensor.expert)
        else:
            dtype = "F32" if tensor.name.endswith("e_score_correction_bias") else "BF16"
            yield StoredTensor(tensor.name, tensor.shape, dtype, tensor.expert)


def model_tensors(spec: ModelSpec) -> Iterator[TensorShape]:
    hidden, vocab = spec.hidden_size, spec.vocab_size
    yield TensorShape("model.embed_tokens.weight", (vocab, hidden))
    yield TensorShape("model.norm.weight", (hidden,))
    if not spec.tie_word_embeddings:
        yield TensorShape("lm_head.weight", (vocab, hidden))
    for layer in range(spec.num_hidden_layers + int(spec.has_mtp)):
        yield from layer_tensors(spec, layer)


def layer_tensors(spec: ModelSpec, layer: int) -> Iterator[TensorShape]:
    prefix, hidden = f"model.layers.{layer}.", spec.hidden_size
    yield TensorShape(f"{prefix}input_layernorm.weight", (hidden,))
    yield TensorShape(f"{prefix}post_attention_layernorm.weight", (hidden,))
    yield from _attention(spec, f"{prefix}self_attn.")
    if spec.has_indexer(layer):
        yield from _indexer(spec, f"{prefix}self_attn.indexer.")
    if spec.is_dense(layer):
        yield from _mlp(f"{prefix}mlp.", hidden, spec.intermediate_size)
    else:
        yield TensorShape(f"{prefix}mlp.gate.weight", (spec.n_routed_experts, hidden))
        yield TensorShape(f"{prefix}mlp.gate.e_score_correction_bias", (spec.n_routed_experts,))
        if spec.n_shared_experts:
            width = spec.moe_intermediate_size * spec.n_shared_experts
            yield from _mlp(f"{prefix}mlp.shared_experts.", hidden, width)
        for expert in range(spec.n_routed_experts):
            yield from _mlp(f"{prefix}mlp.experts.{expert}.", hidden, spec.moe_intermediate_size, expert)
    if layer == spec.mtp_layer:
        for name in ("enorm", "hnorm", "shared_head.norm"):
            yield TensorShape(f"{prefix}{name}.weight", (hidden,))
        yield TensorShape(f"{prefix}eh_proj.weight", (hidden, 2 * hidden))


def _attention(spec: ModelSpec, prefix: str) -> Iterator[TensorShape]:
    heads, latent = spec.num_attention_heads, spec.kv_lora_rank
    yield TensorShape(f"{prefix}q_a_proj.weight", (spec.q_lora_rank, spec.hidden_size), True)
    yield TensorShape(f"{prefix}q_a_layernorm.weight", (spec.q_lora_rank,))
    yield TensorShape(f"{prefix}q_b_proj.weight", (heads * spec.qk_head_dim, spec.q_lora_rank), True)
    rows = latent + spec.qk_rope_head_dim
    yield TensorShape(f"{prefix}kv_a_proj_with_mqa.weight", (rows, spec.hidden_size), True)
    yield TensorShape(f"{prefix}kv_a_layernorm.weight", (latent,))
    rows = heads * (spec.qk_nope_head_dim + spec.v_head_dim)
    yield TensorShape(f"{prefix}kv_b_proj.weight", (rows, latent), True)
    yield TensorShape(f"{prefix}o_proj.weight", (spec.hidden_size, heads * spec.v_head_dim), True)


def _indexer(spec: ModelSpec, prefix: str) -> Iterator[TensorShape]:
    dim = spec.index_head_dim
    yield TensorShape(f"{prefix}wq_b.weight", (spec.index_n_heads * dim, spec.q_lora_rank), True)
    yield TensorShape(f"{prefix}wk.weight", (dim, spec.hidden_size), True)
    yield TensorShape(f"{prefix}weights_proj.weight", (spec.index_n_heads, spec.hidden_size))
    yield TensorShape(f"{prefix}k_norm.weight", (dim,))
    yield TensorShape(f"{prefix}k_norm.bias", (dim,))


def _mlp(prefix: str, hidden: int, inner: int, expert: int = -1) -> Iterator[TensorShape]:
    yield TensorShape(f"{prefix}gate_proj.weight", (inner, hidden), True, expert)
    yield TensorShape(f"{prefix}up_proj.weight", (inner, hidden), True, expert)
    yield TensorShape(f"{prefix}down_proj.weight", (hidden, inner), True, expert)
