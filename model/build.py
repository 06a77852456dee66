"""Builds the layers of a rank from named tensors: what each is, which kernel takes it, which part the rank keeps."""

import torch
from torch import Tensor

from headrace.errors import ConfigError
from headrace.kernels import fp8
from headrace.kernels.base import KernelContext, Pair, RouterRule
from headrace.kernels.formats import FORMATS, RowFormat
from headrace.kernels.registry import KernelSet, kernel_set
from headrace.model.attention import Attention, AttentionWeights, IndexerWeights, split_kv_b
from headrace.model.moe import Mlp, MlpWeights, Moe, MoeWeights
from headrace.model.placement import COLUMNS, Placement
from headrace.model.source import TensorSource
from headrace.model.spec import ModelSpec
from headrace.model.tensors import SCALE_BLOCK, SCALE_SUFFIX
from headrace.model.transformer import Layer, MtpLayer, Transformer


def build_model(
    source: TensorSource,
    spec: ModelSpec,
    device: torch.device | str,
    placement: Placement,
    row_format: str,
    deterministic: bool,
    *,
    kernels: str = "auto",
) -> Transformer:
    """`load_model` from any source. What a rank keeps of a matrix is cut out here; which part, `placement` says."""
    where = torch.device(device)
    shape = {
        "heads": len(placement.heads.of(spec.num_attention_heads)),
        "hidden": spec.hidden_size,
        "index_heads": spec.index_n_heads,
        "index_topk": spec.index_topk,
        "experts": spec.n_routed_experts,
    }
    context = KernelContext(where, deterministic, shape, row_format)
    return _Builder(source, spec, placement, kernel_set(context, kernels), where, FORMATS[row_format]).model()


class _Builder:
    """Reads tensors one at a time and hands each to the kernel that will use it."""

    def __init__(
        self,
        source: TensorSource,
        spec: ModelSpec,
        placement: Placement,
        kernels: KernelSet,
        device: torch.device,
        fmt: RowFormat,
    ) -> None:
        self._source, self._spec, self._placement = source, spec, placement
        self._kernels, self._device, self._fmt = kernels, device, fmt
        self._layout = spec.slab_layout(fmt.name)

    def model(self) -> Transformer:
        spec = self._spec
        layers = [self._layer(i) for i in range(spec.num_hidden_layers)]
        mtp = self._mtp() if spec.has_mtp else None
        embedding = self._whole("model.embed_tokens")
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

    def _layer(self, layer: int) -> Layer:
        prefix = f"model.layers.{layer}."
        mlp = self._mlp(f"{prefix}mlp.") if self._spec.is_dense(layer) else self._moe(f"{prefix}mlp.")
        return Layer(
            self._vector(f"{prefix}input_layernorm.weight"),
            self._attention(layer, f"{prefix}self_attn."),
            self._vector(f"{prefix}post_attention_layernorm.weight"),
            mlp,
            self._spec.has_indexer(layer),
        )

    def _mtp(self) -> MtpLayer:
        layer = self._spec.mtp_layer
        prefix = f"model.layers.{layer}."
        return MtpLayer(
            self._vector(f"{prefix}enorm.weight"),
            self._vector(f"{prefix}hnorm.weight"),
            self._linear(f"{prefix}eh_proj"),
            self._layer(layer),
            self._vector(f"{prefix}shared_head.norm.weight"),
        )

    def _attention(self, layer: int, prefix: str) -> Attention:
        spec = self._spec
        indexer = self._indexer(f"{prefix}indexer.") if spec.has_indexer(layer) else None
        w_uk, w_uv = split_kv_b(fp8.dequantise_weight(*self._pair(f"{prefix}kv_b_proj")), spec)
        heads = self._placement.heads.of(spec.num_attention_heads)
        if len(heads) < spec.num_attention_heads:
            w_uk, w_uv = (matrix[heads.start : heads.stop].clone() for matrix in (w_uk, w_uv))
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

    def _mlp_weights(self, prefix: str) -> MlpWeights | None:
        """None: the width is split so finely that this rank has nothing of it."""
        cut = self._placement.cut(f"{prefix}gate_proj", self._spec)
        gate_up, down = self._parts(f"{prefix}gate_proj", f"{prefix}up_proj"), self._parts(f"{prefix}down_proj")
        if cut is not None and not cut[1]:
            return None
        return MlpWeights(self._kernels.linear.prepare(*gate_up), self._kernels.linear.prepare(*down))

    def _moe(self, prefix: str) -> Moe:
        spec = self._spec
        mine = self._placement.experts.of(spec.n_routed_experts)
        parts = ("gate", "up", "down")
        # Ranks exchange encoded rows, so the experts of a layer are FP8 on all of them or on none.
        names = [f"{prefix}experts.{e}.{part}_proj.weight" for e in range(spec.n_routed_experts) for part in parts]
        fp8_layer = all(self._source.has(name + SCALE_SUFFIX) for name in names)
        gates, ups, downs = (
            _alike([self._pair(f"{prefix}experts.{expert}.{part}_proj") for expert in mine], fp8_layer)
            for part in parts
        )
        weights = MoeWeights(
            gate=self._whole(f"{prefix}gate").to(torch.float32),
            bias=self._vector(f"{prefix}gate.e_score_correction_bias"),
            experts=self._kernels.experts.prepare(gates, ups, downs),
            first_expert=mine.start,
            shared=self._mlp(f"{prefix}shared_experts.") if spec.n_shared_experts else None,
        )
        rule = RouterRule(
            spec.num_experts_per_tok, spec.n_group, spec.topk_group, spec.norm_topk_prob, spec.routed_scaling_factor
        )
        return Moe(weights, rule, self._kernels)

    def _linear(self, name: str) -> object:
        return self._kernels.linear.prepare(*self._parts(name))

    def _parts(self, *names: str) -> list[Pair]:
        """What this rank keeps of some matrices, to be stacked by rows."""
        found: list[Pair] = []
        for name in names:
            cut = self._placement.cut(name, self._spec)
            found += [self._pair(name)] if cut is None else cut_out(self._pair(name), *cut, name)
        return _alike(found, all(scale is not None for _, scale in found))

    def _pair(self, name: str) -> Pair:
        """(weight, scale or None): the presence of a scale decides, not a list in config.json."""
        weight = f"{name}.weight"
        scale = weight + SCALE_SUFFIX
        return self._raw(weight), self._raw(scale) if self._source.has(scale) else None

    def _whole(self, name: str) -> Tensor:
        """A matrix that no FP8 product takes, as floats."""
        weight, scale = self._pair(name)
        return weight if scale is None else fp8.dequantise_weight(weight, scale)

    def _vector(self, name: str) -> Tensor:
        return self._raw(name).to(torch.float32)

    def _raw(self, name: str) -> Tensor:
        return self._source.get(name).to(self._device)


def _alike(pairs: list[Pair], as_fp8: bool) -> list[Pair]:
    """Matrices of one product are FP8 together or floats together; a checkpoint may mix them."""
    return pairs if as_fp8 else [(pair[0] if pair[1] is None else fp8.dequantise_weight(*pair), None) for pair in pairs]


def cut_out(pair: Pair, dim: int, kept: range, name: str) -> list[Pair]:
    """Rows or columns of a stored matrix, exactly: as parts to be stacked by rows.

    FP8 rows that begin inside a block of 128 make a part of their own up to its end, with that block's scales. FP8
    columns must begin at a block, because activations are quantised by blocks: else ConfigError."""
    weight, scale = pair
    if dim == COLUMNS:
        # Copies: a view would keep the whole matrix alive.
        part = weight[:, kept.start : kept.stop].contiguous()
        if scale is None or not kept:
            return [(part.clone(), None if scale is None else scale[:, :0])]
        if kept.start % SCALE_BLOCK or (kept.stop % SCALE_BLOCK and kept.stop < weight.shape[1]):
            raise ConfigError(
                f"{name} is FP8 and cannot be split at columns {kept.start} to {kept.stop} of {weight.shape[1]}: "
                f"a rank needs whole blocks of {SCALE_BLOCK}; take fewer ranks, or bf16 weights"
            )
        blocks = slice(kept.start // SCALE_BLOCK, -(-kept.stop // SCALE_BLOCK))
        return [(part.clone(), scale[:, blocks].clone())]
    if scale is None or not kept:
        return [(weight[kept.start : kept.stop].clone(), None if scale is None else scale[:0])]
    border = min(-(-kept.start // SCALE_BLOCK) * SCALE_BLOCK, kept.stop)
    found: list[Pair] = []
    for start, stop in ((kept.start, border), (border, kept.stop)):
        if start < stop:
            blocks = slice(start // SCALE_BLOCK, -(-stop // SCALE_BLOCK))
            found.append((weight[start:stop].clone(), scale[blocks].clone()))
    return found
