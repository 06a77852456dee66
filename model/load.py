"""Build a rank's model from a checkpoint directory or from random weights."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from headrace.errors import CheckpointError
from headrace.kernels import fp8
from headrace.kernels.base import KernelContext, RouterRule
from headrace.kernels.formats import FORMATS, RowFormat
from headrace.kernels.registry import KernelSet, kernel_set
from headrace.model.attention import Attention, AttentionWeights, IndexerWeights, split_kv_b
from headrace.model.moe import Mlp, MlpWeights, Moe, MoeWeights
from headrace.model.source import DummySource, SafetensorsSource, TensorSource, check_tensors, mtp_copies
from headrace.model.spec import ModelSpec, resolve_path
from headrace.model.stream import LoadReport, TensorStream
from headrace.model.tensors import SCALE_SUFFIX, TensorShape, model_tensors
from headrace.model.transformer import Layer, MtpLayer, Transformer


def load_model(
    spec: ModelSpec,
    path: str | Path,
    load_format: str,
    device: torch.device | str,
    ep_rank: int,
    ep_size: int,
    row_format: str,
    deterministic: bool,
    *,
    kernels: str = "auto",
    dummy_seed: int = 0,
    progress: Callable[[LoadReport], None] | None = None,
) -> Transformer:
    """One rank's model: everything but the routed experts, and of those a contiguous share of `ep_size`.

    `load_format` is `safetensors` or `dummy` (then `path` is not read). Raises CheckpointError listing every tensor
    that is missing, extra, misshapen or wrongly typed; KernelUnsupported when no backend takes the model. `progress`
    hears after every tensor read from files.
    """
    if load_format == "dummy":
        return build_model(
            DummySource(spec, dummy_seed), spec, device, ep_rank, ep_size, row_format, deterministic, kernels=kernels
        )
    if load_format != "safetensors":
        raise CheckpointError(f"load format {load_format!r} is not one of safetensors, dummy")
    source = SafetensorsSource(resolve_path(path))
    try:
        check_tensors(source, spec)
        names = read_order(source, spec, expert_share(spec.n_routed_experts, ep_rank, ep_size))
        stream = TensorStream(source, names, progress=progress, copies=mtp_copies(source, spec))
        try:
            return build_model(stream, spec, device, ep_rank, ep_size, row_format, deterministic, kernels=kernels)
        finally:
            stream.close()
    finally:
        source.close()


def read_order(source: TensorSource, spec: ModelSpec, experts: range) -> list[str]:
    """Names of a rank's tensors, nearly in the order in which `_Builder` asks for them: by layer, and in a layer the
    gates of all experts before the ups and the downs; embedding and head last."""
    mine = [tensor for tensor in model_tensors(spec) if tensor.expert < 0 or tensor.expert in experts]
    parts = ("gate_proj", "up_proj", "down_proj")

    def place(tensor: TensorShape) -> tuple[int, int]:
        words = tensor.name.split(".")
        layer = int(words[2]) if words[1] == "layers" else spec.mtp_layer + 1
        return layer, parts.index(words[-2]) if tensor.expert >= 0 else -1

    pairs = [(tensor.name, tensor.name + SCALE_SUFFIX) for tensor in sorted(mine, key=place)]
    return [name for pair in pairs for name in pair if source.has(name)]


def build_model(
    source: TensorSource,
    spec: ModelSpec,
    device: torch.device | str,
    ep_rank: int,
    ep_size: int,
    row_format: str,
    deterministic: bool,
    *,
    kernels: str = "auto",
) -> Transformer:
    """`load_model` from any source."""
    where = torch.device(device)
    shape = {
        "heads": spec.num_attention_heads,
        "hidden": spec.hidden_size,
        "index_topk": spec.index_topk,
        "experts": spec.n_routed_experts,
    }
    context = KernelContext(where, deterministic, shape, row_format)
    builder = _Builder(source, spec, kernel_set(context, kernels), where, FORMATS[row_format])
    return builder.model(expert_share(spec.n_routed_experts, ep_rank, ep_size))


def expert_share(experts: int, ep_rank: int, ep_size: int) -> range:
    """The contiguous experts of one rank."""
    return range(ep_rank * experts // ep_size, (ep_rank + 1) * experts // ep_size)


class _Builder:
    """Reads tensors one at a time and hands each to the kernel that will use it."""

    def __init__(
        self, source: TensorSource, spec: ModelSpec, kernels: KernelSet, device: torch.device, fmt: RowFormat
    ) -> None:
        self._source, self._spec, self._kernels, self._device, self._fmt = source, spec, kernels, device, fmt
        self._layout = spec.slab_layout(fmt.name)

    def model(self, experts: range) -> Transformer:
        spec = self._spec
        layers = [self._layer(i, experts) for i in range(spec.num_hidden_layers)]
        mtp = self._mtp(experts) if spec.has_mtp else None
        embedding = self._raw("model.embed_tokens.weight")
        head = "model.embed_tokens" if spec.tie_word_embeddings else "lm_head"
        return Transformer(
            spec,
            self._kernels,
            self._device,
            embedding,
            layers,
            self._vector("model.norm.weight"),
            self._linear(head),
            mtp,
            self._fmt,
        )

    def _layer(self, layer: int, experts: range) -> Layer:
        prefix = f"model.layers.{layer}."
        mlp = self._mlp(f"{prefix}mlp.") if self._spec.is_dense(layer) else self._moe(f"{prefix}mlp.", experts)
        return Layer(
            self._vector(f"{prefix}input_layernorm.weight"),
            self._attention(layer, f"{prefix}self_attn."),
            self._vector(f"{prefix}post_attention_layernorm.weight"),
            mlp,
            self._spec.has_indexer(layer),
        )

    def _mtp(self, experts: range) -> MtpLayer:
        layer = self._spec.mtp_layer
        prefix = f"model.layers.{layer}."
        return MtpLayer(
            self._vector(f"{prefix}enorm.weight"),
            self._vector(f"{prefix}hnorm.weight"),
            self._linear(f"{prefix}eh_proj"),
            self._layer(layer, experts),
            self._vector(f"{prefix}shared_head.norm.weight"),
        )

    def _attention(self, layer: int, prefix: str) -> Attention:
        spec = self._spec
        indexer = self._indexer(f"{prefix}indexer.") if spec.has_indexer(layer) else None
        w_uk, w_uv = split_kv_b(fp8.dequantise_weight(*self._pair(f"{prefix}kv_b_proj")), spec)
        weights = AttentionWeights(
            q_a=self._linear(f"{prefix}q_a_proj"),
            q_a_norm=self._vector(f"{prefix}q_a_layernorm.weight"),
            q_b=self._linear(f"{prefix}q_b_proj"),
            kv_a=self._linear(f"{prefix}kv_a_proj_with_mqa"),
            kv_a_norm=self._vector(f"{prefix}kv_a_layernorm.weight"),
            w_uk=w_uk,
            w_uv=w_uv,
            o=self._linear(f"{prefix}o_proj"),
            indexer=indexer,
        )
        index_plane = self._layout.index_plane(layer) if indexer is not None else -1
        return Attention(spec, weights, self._kernels, self._fmt, layer, index_plane)

    def _indexer(self, prefix: str) -> IndexerWeights:
        return IndexerWeights(
            wq_b=self._linear(f"{prefix}wq_b"),
            wk=self._linear(f"{prefix}wk"),
            weights_proj=self._linear(f"{prefix}weights_proj"),
            k_norm_weight=self._vector(f"{prefix}k_norm.weight"),
            k_norm_bias=self._vector(f"{prefix}k_norm.bias"),
        )

    def _mlp(self, prefix: str) -> Mlp:
        return Mlp(self._mlp_weights(prefix), self._kernels)

    def _mlp_weights(self, prefix: str) -> MlpWeights:
        gate, up = self._pair(f"{prefix}gate_proj"), self._pair(f"{prefix}up_proj")
        return MlpWeights(self._kernels.linear.prepare(gate, up), self._linear(f"{prefix}down_proj"))

    def _moe(self, prefix: str, experts: range) -> Moe:
        spec = self._spec
        gates, ups, downs = (
            [self._pair(f"{prefix}experts.{expert}.{part}_proj") for expert in experts]
            for part in ("gate", "up", "down")
        )
        weights = MoeWeights(
            gate=self._raw(f"{prefix}gate.weight").to(torch.float32),
            bias=self._vector(f"{prefix}gate.e_score_correction_bias"),
            experts=self._kernels.experts.prepare(gates, ups, downs),
            first_expert=experts.start,
            shared=self._mlp_weights(f"{prefix}shared_experts.") if spec.n_shared_experts else None,
        )
        rule = RouterRule(
            spec.num_experts_per_tok, spec.n_group, spec.topk_group, spec.norm_topk_prob, spec.routed_scaling_factor
        )
        return Moe(weights, rule, self._kernels)

    def _linear(self, name: str) -> object:
        return self._kernels.linear.prepare(self._pair(name))

    def _pair(self, name: str) -> tuple[Tensor, Tensor | None]:
        """(weight, scale or None): the presence of a scale decides, not a list in config.json."""
        weight = f"{name}.weight"
        scale = weight + SCALE_SUFFIX
        return self._raw(weight), self._raw(scale) if self._source.has(scale) else None

    def _vector(self, name: str) -> Tensor:
        return self._raw(name).to(torch.float32)

    def _raw(self, name: str) -> Tensor:
        return self._source.get(name).to(self._device)
