"""What a checkpoint directory says about its model, checked. Torch-free.

Reads Hugging Face `config.json` of `glm_moe_dsa` (GLM-5, 5.1, 5.2) and `deepseek_v32`, `generation_config.json` for the
end-of-sequence ids, and the vocabulary size that the tokenizer really uses. Knows nothing of tensors.
"""

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

from headrace.errors import CheckpointError
from headrace.kernels.formats import INDEX_DIM, LATENT_DIM, ROPE_DIM
from headrace.kvstore.layout import SlabLayout

NANO = "nano"
PRESETS = {"glm-5.1": "glm-5", "glm-5.1-fp8": "glm-5-fp8"}
"""Presets that are another one under their own name: GLM-5.1 differs from GLM-5 in its weights only."""
MODEL_TYPES = ("glm_moe_dsa", "deepseek_v32")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    theta: float
    yarn_factor: float = 1.0
    """1.0: no YaRN; the other fields matter only otherwise."""
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Dimensions and rules of one model. Field names follow `config.json` where it has one."""

    model_type: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    dense_layers: tuple[int, ...]
    full_layers: tuple[int, ...]
    """Layers that own an indexer, ascending; the MTP layer always owns one and is not listed."""
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    rope_interleaved: bool
    """RoPE of the main attention turns neighbours (2j, 2j + 1); False: halves (j, j + 32). So does the next, of the
    indexer: GLM's turns neighbours, DeepSeek's halves."""
    indexer_interleaved: bool
    has_mtp: bool
    shares_draft_index: bool
    rope: RopeSpec
    max_position_embeddings: int
    vocab_size: int
    used_vocab_size: int
    """Ids from here on are padding of the matrix and are never sampled."""
    tie_word_embeddings: bool
    rms_norm_eps: float
    eos_token_ids: tuple[int, ...]
    quantised: bool = True
    """What the config announces. Dummy weights and plans believe it; in a checkpoint the tensors themselves decide."""

    @classmethod
    def from_dir(cls, path: str | Path) -> "ModelSpec":
        """Parse and check a checkpoint directory, `nano` or a preset. Raises CheckpointError listing every problem."""
        directory = resolve_path(path)
        raw = _read_json(directory / "config.json")
        generation = directory / "generation_config.json"
        extra = _read_json(generation) if generation.exists() else {}
        return parse_config(raw, extra, _tokenizer_size(directory / "tokenizer.json"), str(directory))

    @property
    def mtp_layer(self) -> int:
        return self.num_hidden_layers

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def attention_scale(self) -> float:
        """qk_head_dim^-0.5, times YaRN's m^2."""
        scale = self.qk_head_dim**-0.5
        if self.rope.yarn_factor > 1 and self.rope.mscale_all_dim:
            scale *= (0.1 * self.rope.mscale_all_dim * math.log(self.rope.yarn_factor) + 1) ** 2
        return scale

    def has_indexer(self, layer: int) -> bool:
        return layer == self.mtp_layer or layer in self.full_layers

    def is_dense(self, layer: int) -> bool:
        return layer in self.dense_layers

    def slab_layout(self, row_format: str) -> SlabLayout:
        return SlabLayout(self.num_hidden_layers, self.full_layers, self.has_mtp, row_format)


def resolve_path(path: str | Path) -> Path:
    """The directory of a checkpoint. `nano` is the one that ships with Headrace; a preset (`preset_names`) is a
    published model's config.json without weights, and an existing directory of that name wins over it."""
    room = Path(__file__).resolve().parent
    if str(path) == NANO:
        return room / "nano" / "checkpoint"
    if Path(path).is_dir():
        return Path(path)
    name = str(path).lower()
    if name in preset_names():
        return room / "presets" / PRESETS.get(name, name)
    known = ", ".join((NANO, *preset_names()))
    raise CheckpointError(f"{path}: no such checkpoint directory, and not one of {known}")


def preset_names() -> list[str]:
    folder = Path(__file__).resolve().parent / "presets"
    return sorted([*(entry.name for entry in folder.iterdir() if (entry / "config.json").exists()), *PRESETS])


def parse_config(raw: dict[str, Any], generation: dict[str, Any], tokenizer_size: int | None, where: str) -> ModelSpec:
    """`config.json` as a checked spec."""
    reader = _Reader(raw)
    layers = reader.integer("num_hidden_layers")
    heads = reader.integer("num_attention_heads")
    vocab = reader.integer("vocab_size")
    nextn = reader.integer("num_nextn_predict_layers", 0, minimum=0)
    model_type = str(raw.get("model_type"))
    spec = ModelSpec(
        model_type=model_type,
        hidden_size=reader.integer("hidden_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        q_lora_rank=reader.integer("q_lora_rank"),
        kv_lora_rank=reader.integer("kv_lora_rank"),
        qk_nope_head_dim=reader.integer("qk_nope_head_dim"),
        qk_rope_head_dim=reader.integer("qk_rope_head_dim"),
        v_head_dim=reader.integer("v_head_dim"),
        intermediate_size=reader.integer("intermediate_size"),
        moe_intermediate_size=reader.integer("moe_intermediate_size"),
        n_routed_experts=reader.integer("n_routed_experts"),
        n_shared_experts=reader.integer("n_shared_experts", 1, minimum=0),
        num_experts_per_tok=reader.integer("num_experts_per_tok"),
        n_group=reader.integer("n_group", 1),
        topk_group=reader.integer("topk_group", 1),
        norm_topk_prob=reader.boolean("norm_topk_prob", True),
        routed_scaling_factor=reader.positive("routed_scaling_factor", 1.0),
        dense_layers=_dense_layers(reader, layers),
        full_layers=_full_layers(reader, layers),
        index_n_heads=reader.integer("index_n_heads"),
        index_head_dim=reader.integer("index_head_dim"),
        index_topk=reader.integer("index_topk"),
        rope_interleaved=reader.boolean("rope_interleave", True),
        indexer_interleaved=reader.boolean("indexer_rope_interleave", model_type == "glm_moe_dsa"),
        has_mtp=nextn > 0,
        shares_draft_index=reader.boolean("index_share_for_mtp_iteration", False),
        rope=_rope(reader),
        max_position_embeddings=reader.integer("max_position_embeddings"),
        vocab_size=vocab,
        used_vocab_size=min(vocab, tokenizer_size or vocab),
        tie_word_embeddings=reader.boolean("tie_word_embeddings", False),
        rms_norm_eps=reader.positive("rms_norm_eps", 1e-5),
        eos_token_ids=_eos_ids(reader, generation),
        quantised=bool(raw.get("quantization_config")),
    )
    problems = reader.problems + _problems(spec, reader, nextn)
    if problems:
        raise CheckpointError(f"{where}: config.json cannot be served:\n  " + "\n  ".join(problems))
    return spec


class _Reader:
    """Typed access to a JSON mapping that collects what is wrong instead of stopping at the first."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self.raw = raw
        self.problems: list[str] = []

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        value = self.raw.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            self.problems.append(f"{key}: expected an integer >= {minimum}, got {value!r}")
            return max(minimum, 1)
        return value

    def number(self, key: str, default: float, source: dict[str, Any] | None = None) -> float:
        value = (self.raw if source is None else source).get(key)
        if value is None:
            return default
        # JSON as Python reads it has NaN and Infinity, and integers that no float holds.
        known = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
        if not known:
            self.problems.append(f"{key}: expected a finite number, got {value!r}")
            return default
        return float(value)

    def positive(self, key: str, default: float, source: dict[str, Any] | None = None) -> float:
        value = self.number(key, default, source)
        if value > 0:
            return value
        self.problems.append(f"{key}: expected a number above 0, got {value!r}")
        return default

    def boolean(self, key: str, default: bool) -> bool:
        value = self.raw.get(key)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        self.problems.append(f"{key}: expected true or false, got {value!r}")
        return default

    def mapping(self, key: str) -> dict[str, Any]:
        value = self.raw.get(key)
        if value is None or isinstance(value, dict):
            return value or {}
        self.problems.append(f"{key}: expected an object, got {value!r}")
        return {}


def _full_layers(reader: _Reader, layers: int) -> tuple[int, ...]:
    """Precedence: indexer_types, index_topk_pattern (a string of F and S, or a list), then the freq/offset rule."""
    raw = reader.raw
    for key in ("indexer_types", "index_topk_pattern"):
        kinds = raw.get(key)
        if kinds is None:
            continue
        words = [str(kind).lower() for kind in kinds] if isinstance(kinds, (list, str)) else []
        unknown = sorted({word for word in words if word not in ("full", "shared", "f", "s")})
        if unknown or len(words) < layers:
            reader.problems.append(f"{key}: expected {layers} of full/shared (F/S), got {len(words)} with {unknown}")
            return (0,)
        return tuple(i for i in range(layers) if words[i][0] == "f")
    freq = reader.integer("index_topk_freq", 1)
    offset = reader.integer("index_skip_topk_offset", 2, minimum=0)
    return tuple(i for i in range(layers) if max(i - offset + 1, 0) % freq == 0)


def _dense_layers(reader: _Reader, layers: int) -> tuple[int, ...]:
    kinds = reader.raw.get("mlp_layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) < layers or any(kind not in ("dense", "sparse") for kind in kinds):
            reader.problems.append(f"mlp_layer_types: expected {layers} of dense/sparse, got {kinds!r}")
            return ()
        return tuple(i for i in range(layers) if kinds[i] == "dense")
    first = reader.integer("first_k_dense_replace", 0, minimum=0)
    freq = reader.integer("moe_layer_freq", 1)
    return tuple(i for i in range(layers) if i < first or i % freq)


def _rope(reader: _Reader) -> RopeSpec:
    """`rope_parameters` (transformers 5) or top-level `rope_theta` with `rope_scaling` (before)."""
    nested = reader.mapping("rope_parameters") or reader.mapping("rope_scaling")
    theta = reader.positive("rope_theta", reader.positive("rope_theta", 10000.0), nested)
    kind = nested.get("rope_type", nested.get("type", "default"))
    if kind == "default":
        return RopeSpec(theta=theta)
    if kind != "yarn":
        reader.problems.append(f"rope_parameters.rope_type: {kind!r} is not one of default, yarn")
    for key, only in (("attention_factor", None), ("truncate", True)):
        if nested.get(key, only) != only:
            reader.problems.append(f"rope_parameters.{key}: {nested[key]!r} is not supported, only {only!r}")
    return RopeSpec(
        theta=theta,
        yarn_factor=reader.positive("factor", 1.0, nested),
        original_max_position=int(reader.positive("original_max_position_embeddings", 4096, nested)),
        beta_fast=reader.number("beta_fast", 32.0, nested),
        beta_slow=reader.number("beta_slow", 1.0, nested),
        mscale=reader.number("mscale", 1.0, nested),
        mscale_all_dim=reader.number("mscale_all_dim", 0.0, nested),
    )


def _eos_ids(reader: _Reader, generation: dict[str, Any]) -> tuple[int, ...]:
    ids = generation.get("eos_token_id", reader.raw.get("eos_token_id"))
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        reader.problems.append(f"eos_token_id: expected token ids, got {ids!r}")
        return ()
    return tuple(ids)


def _problems(spec: ModelSpec, reader: _Reader, nextn: int) -> list[str]:
    """Rules between fields; those of one field's own type are `reader.problems`."""
    raw = reader.raw
    found: list[str] = []

    def need(ok: bool, text: str) -> None:
        if not ok:
            found.append(text)

    need(spec.model_type in MODEL_TYPES, f"model_type: {spec.model_type!r} is not one of {', '.join(MODEL_TYPES)}")
    need(spec.kv_lora_rank == LATENT_DIM, f"kv_lora_rank: {spec.kv_lora_rank}, cache rows hold {LATENT_DIM}")
    need(spec.qk_rope_head_dim == ROPE_DIM, f"qk_rope_head_dim: {spec.qk_rope_head_dim}, cache rows hold {ROPE_DIM}")
    need(spec.index_head_dim == INDEX_DIM, f"index_head_dim: {spec.index_head_dim}, index rows hold {INDEX_DIM}")
    need(0 in spec.full_layers, "layer 0 shares an index but no layer before it owns one")
    need(nextn <= 1, f"num_nextn_predict_layers: {nextn}, at most 1 is supported")
    for key, only in (("hidden_act", "silu"), ("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        need(raw.get(key, only) == only, f"{key}: {raw.get(key)!r}, only {only!r} is supported")
    need(not raw.get("attention_bias", False), "attention_bias: true is not supported")
    need(spec.n_routed_experts % spec.n_group == 0, f"{spec.n_routed_experts} experts in {spec.n_group} groups")
    need(spec.topk_group <= spec.n_group, f"topk_group {spec.topk_group} > n_group {spec.n_group}")
    need(
        spec.num_experts_per_tok * spec.n_group <= spec.n_routed_experts * spec.topk_group,
        f"num_experts_per_tok: {spec.num_experts_per_tok} of {spec.n_routed_experts} experts",
    )
    given = raw.get("quantization_config")
    quantisation = given if isinstance(given, dict) else {}
    need(given is None or isinstance(given, dict), f"quantization_config: expected an object, got {given!r}")
    block = quantisation.get("weight_block_size", [128, 128])
    method = quantisation.get("quant_method", "fp8")
    need(method == "fp8" and block == [128, 128], f"quantization_config: {method} {block}, want fp8 [128, 128]")
    return found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text())
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: expected an object, got {type(raw).__name__}")
    return raw


def _tokenizer_size(path: Path) -> int | None:
    """Number of ids the tokenizer uses, or None without a tokenizer."""
    if not path.exists():
        return None
    raw = _read_json(path)
    try:
        ids = [int(token["id"]) for token in raw.get("added_tokens", [])]
        vocab = raw.get("model", {}).get("vocab", {})
        if isinstance(vocab, dict):
            ids += [int(i) for i in vocab.values()]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path}: not a tokenizer: {error!r} among its tokens") from error
    return max(ids) + 1 if ids else None
