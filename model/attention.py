"""MLA in absorbed form on the paged cache, with its indexer. One definition for prefill, decode and the MTP layer, with
all heads or a rank's share of them (then the output is a part that the exchange sums).

Shapes: t local rows, T rows of the step, H heads of this rank, K index_topk.
"""

import dataclasses

import torch
from torch import Tensor

from headrace.kernels.base import QueryRows
from headrace.kernels.formats import RowFormat
from headrace.kernels.registry import KernelSet
from headrace.model.base import CachePlanes, Exchange
from headrace.model.spec import ModelSpec

INDEX_NORM_EPS = 1e-6


@dataclasses.dataclass(slots=True)
class IndexerWeights:
    wq_b: object
    wk: object
    weights_proj: object
    k_norm_weight: Tensor
    k_norm_bias: Tensor


@dataclasses.dataclass(slots=True)
class AttentionWeights:
    q_a: object
    q_a_norm: Tensor
    q_b: object
    kv_a: object
    kv_a_norm: Tensor
    w_uk: Tensor
    """fp32 [H, nope, 512]: takes a query into latent space"""
    w_uv: Tensor
    """fp32 [H, 512, v]: takes an attended latent to values"""
    o: object
    indexer: IndexerWeights | None


@dataclasses.dataclass(slots=True)
class StepView:
    """One step as the layers see it; built once, used by all of them."""

    cos: Tensor
    """fp32 [t, 32] of the local rows"""
    sin: Tensor
    query: QueryRows
    """of the local rows"""
    write_rows: Tensor
    """int64 [T] cache row each step row writes, -1: dropped"""


class Attention:
    def __init__(
        self,
        spec: ModelSpec,
        weights: AttentionWeights,
        kernels: KernelSet,
        fmt: RowFormat,
        latent_plane: int,
        index_plane: int,
    ) -> None:
        self._spec, self._w, self._k, self._fmt = spec, weights, kernels, fmt
        self._latent_plane, self._index_plane = latent_plane, index_plane
        self._scale = spec.attention_scale
        self._index_scale = spec.index_head_dim**-0.5 * spec.index_n_heads**-0.5

    def forward(
        self, x: Tensor, step: StepView, selection: Tensor | None, cache: CachePlanes, exchange: Exchange, write: bool
    ) -> tuple[Tensor, Tensor]:
        """x fp32 [t, D] (normed) -> (output [t, D], selection int32 [t, K]).

        With an indexer and no `selection` given, selects; otherwise attends to `selection`. `write`: the rows' latent
        and index keys go into the cache (all T of them, through the exchange) before anything is read.
        """
        latent_q = self._k.norm.rms(self._k.linear(x, self._w.q_a), self._w.q_a_norm, self._spec.rms_norm_eps)
        if write:
            self._write_cache(x, step, cache, exchange)
        if selection is None:
            selection = self._select(x, latent_q, step, cache)
        attended = self._attend(self._query(latent_q, step), selection, step, cache)
        values = self._k.linear.per_head(attended, self._w.w_uv)
        return exchange.sum_parts(self._k.linear(values.flatten(1), self._w.o)), selection

    def _write_cache(self, x: Tensor, step: StepView, cache: CachePlanes, exchange: Exchange) -> None:
        spec, k, fmt = self._spec, self._k, self._fmt
        latent, rope = k.linear(x, self._w.kv_a).split([spec.kv_lora_rank, spec.qk_rope_head_dim], -1)
        latent = k.norm.rms(latent.contiguous(), self._w.kv_a_norm, spec.rms_norm_eps)
        rope = k.rope(rope, step.cos, step.sin, interleaved=spec.rope_interleaved)
        rows = k.latent_rows.quantise(latent, rope, fmt)
        if self._w.indexer is None:
            k.latent_rows.write(cache.latent[self._latent_plane], step.write_rows, exchange.gather_rows(rows))
            return
        keys = k.index_keys.quantise(self._index_keys(x, step, self._w.indexer), fmt)
        both = exchange.gather_rows(torch.cat((rows, keys), -1))
        width = fmt.latent_row_bytes
        k.latent_rows.write(cache.latent[self._latent_plane], step.write_rows, both[:, :width])
        k.index_keys.write(cache.index[self._index_plane], step.write_rows, both[:, width:], fmt)

    def _index_keys(self, x: Tensor, step: StepView, w: IndexerWeights) -> Tensor:
        keys = self._k.linear(x, w.wk)
        keys = self._k.norm.layer(keys, w.k_norm_weight, w.k_norm_bias, INDEX_NORM_EPS)
        return self._rotate_first(keys, step)

    def _rotate_first(self, x: Tensor, step: StepView) -> Tensor:
        """RoPE on the first 64 of the last dim (the main attention has its rope dims last)."""
        dim = self._spec.qk_rope_head_dim
        turned = self._k.rope(x[..., :dim], step.cos, step.sin, interleaved=self._spec.indexer_interleaved)
        return torch.cat((turned, x[..., dim:]), -1)

    def _select(self, x: Tensor, latent_q: Tensor, step: StepView, cache: CachePlanes) -> Tensor:
        w, spec = self._w.indexer, self._spec
        if w is None:
            raise AssertionError("a layer that shares its index ran without a selection")
        q = self._k.linear(latent_q, w.wq_b).view(-1, spec.index_n_heads, spec.index_head_dim)
        weights = self._k.linear(x, w.weights_proj) * self._index_scale
        plane = cache.index[self._index_plane]
        return self._k.index_topk(self._rotate_first(q, step), weights, step.query, plane, self._fmt, spec.index_topk)

    def _query(self, latent_q: Tensor, step: StepView) -> Tensor:
        """[t, H, 576]: the absorbed query, latent part first."""
        spec = self._spec
        q = self._k.linear(latent_q, self._w.q_b).view(latent_q.shape[0], self._w.w_uk.shape[0], spec.qk_head_dim)
        nope, rope = q.split([spec.qk_nope_head_dim, spec.qk_rope_head_dim], -1)
        rope = self._k.rope(rope, step.cos, step.sin, interleaved=spec.rope_interleaved)
        return torch.cat((self._k.linear.per_head(nope, self._w.w_uk), rope), -1)

    def _attend(self, q: Tensor, selection: Tensor, step: StepView, cache: CachePlanes) -> Tensor:
        plane = cache.latent[self._latent_plane]
        return self._k.sparse_mla(q, plane, selection, step.query, self._fmt, self._scale)


def split_kv_b(matrix: Tensor, spec: ModelSpec) -> tuple[Tensor, Tensor]:
    """kv_b_proj fp32 [H * (nope + v), 512] (whole matrix dequantised: its head borders cross scale blocks)
    -> w_uk [H, nope, 512], w_uv [H, 512, v]."""
    per_head = matrix.view(spec.num_attention_heads, spec.qk_nope_head_dim + spec.v_head_dim, spec.kv_lora_rank)
    w_uk, w_uv = per_head.split([spec.qk_nope_head_dim, spec.v_head_dim], 1)
    return w_uk.contiguous(), w_uv.transpose(1, 2).contiguous()
