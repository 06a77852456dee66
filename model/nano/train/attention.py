"""Multi-head latent attention and its indexer, for training: whole sequences, dense or masked to a selection.

Legend: B sequences, T tokens, N heads, R sampled query rows. Masks are bool, True where a query may look.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from headrace.model.nano.train.layers import Mode, RMSNorm, as_stored, linear, matrix, rotate
from headrace.model.nano.train.quant import round_cache
from headrace.model.nano.train.shape import NanoShape


class Projected(NamedTuple):
    """Attention inputs of one layer: q and k [B, N, T, 128], v [B, N, T, 96], query latent c_q [B, T, 256]."""

    q: Tensor
    k: Tensor
    v: Tensor
    c_q: Tensor


def causal_mask(rows: Tensor, keys: int) -> Tensor:
    """bool [R, keys]: key s is visible to the query at index rows[r] iff s ≤ rows[r]."""
    return torch.arange(keys, device=rows.device) <= rows[:, None]


class Indexer(nn.Module):
    """Cheap scores that decide which rows a query attends to. Sees detached inputs: only distillation trains it."""

    def __init__(self, shape: NanoShape) -> None:
        super().__init__()
        self.shape = shape
        self.wq_b = matrix(shape.index_n_heads * shape.index_head_dim, shape.q_lora_rank)
        self.wk = matrix(shape.index_head_dim, shape.hidden_size)
        self.weights_proj = matrix(shape.index_n_heads, shape.hidden_size)
        self.k_norm = nn.LayerNorm(shape.index_head_dim, eps=1e-6)

    def _rotate_front(self, x: Tensor, table: Tensor) -> Tensor:
        rope = self.shape.qk_rope_head_dim
        return torch.cat((rotate(x[..., :rope], table), x[..., rope:]), -1)

    def keys(self, x: Tensor, table: Tensor, mode: Mode) -> Tensor:
        """Index keys [B, T, 128], rotary dims first, of normed layer inputs x [B, T, H]."""
        k = functional.layer_norm(
            linear(x, self.wk, mode).float(), self.k_norm.normalized_shape, self.k_norm.weight, self.k_norm.bias, 1e-6
        ).to(x.dtype)
        k = self._rotate_front(k[:, :, None], table)[:, :, 0]
        return round_cache(k) if mode.fp8_activations else k

    def queries(self, x: Tensor, c_q: Tensor, table: Tensor, mode: Mode) -> tuple[Tensor, Tensor]:
        """Index queries [B, N, R, 128] and head weights fp32 [B, N, R] of the given rows."""
        heads, width = self.shape.index_n_heads, self.shape.index_head_dim
        q = self._rotate_front(linear(c_q, self.wq_b, mode).unflatten(-1, (heads, width)), table)
        if mode.fp8_activations:
            q = round_cache(q)
        weights = functional.linear(x, self.weights_proj.to(x.dtype)).float() * (heads * width) ** -0.5
        return q.transpose(1, 2), weights.transpose(1, 2)

    @staticmethod
    def scores(q: Tensor, weights: Tensor, k: Tensor) -> Tensor:
        """fp32 [B, R, T]: weighted sum over heads of relu(q·k), one head at a time to keep the peak low."""
        keys = k.transpose(1, 2)
        total = functional.relu(q[:, 0] @ keys).float() * weights[:, 0, :, None]
        for head in range(1, q.shape[1]):
            total = total + functional.relu(q[:, head] @ keys).float() * weights[:, head, :, None]
        return total


def select(scores: Tensor, rows: Tensor, top_k: int) -> Tensor:
    """bool mask [B, R, T] of the `top_k` best causally visible keys of each row."""
    visible = causal_mask(rows, scores.shape[-1])
    if scores.shape[-1] <= top_k:
        return visible.expand_as(scores)
    best = scores.masked_fill(~visible, float("-inf")).topk(top_k, -1, sorted=False).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True) & visible


class Attention(nn.Module):
    """MLA in its expanded form. `indexer` is None on layers that reuse a selection."""

    def __init__(self, shape: NanoShape, has_indexer: bool, out_gain: float) -> None:
        super().__init__()
        s, heads = shape, shape.num_attention_heads
        self.shape = shape
        self.q_a_proj = matrix(s.q_lora_rank, s.hidden_size)
        self.q_a_layernorm = RMSNorm(s.q_lora_rank, s.rms_norm_eps)
        self.q_b_proj = matrix(heads * s.qk_head_dim, s.q_lora_rank)
        self.kv_a_proj_with_mqa = matrix(s.kv_lora_rank + s.qk_rope_head_dim, s.hidden_size)
        self.kv_a_layernorm = RMSNorm(s.kv_lora_rank, s.rms_norm_eps)
        self.kv_b_proj = matrix(heads * (s.qk_nope_head_dim + s.v_head_dim), s.kv_lora_rank)
        self.o_proj = matrix(s.hidden_size, heads * s.v_head_dim, out_gain)
        self.indexer = Indexer(shape) if has_indexer else None

    def project_queries(self, x: Tensor, table: Tensor, mode: Mode) -> tuple[Tensor, Tensor]:
        """q [B, N, T, 128] (plain dims first, rotary dims last) and c_q [B, T, 256] of normed inputs x [B, T, H]."""
        s = self.shape
        c_q = self.q_a_layernorm(linear(x, self.q_a_proj, mode))
        q = linear(c_q, self.q_b_proj, mode).unflatten(-1, (s.num_attention_heads, s.qk_head_dim))
        plain, rope = q.split([s.qk_nope_head_dim, s.qk_rope_head_dim], -1)
        return torch.cat((plain, rotate(rope, table)), -1).transpose(1, 2), c_q

    def project(self, x: Tensor, table: Tensor, mode: Mode) -> Projected:
        """Queries, keys and values of normed inputs x [B, T, H]."""
        s, heads = self.shape, self.shape.num_attention_heads
        q, c_q = self.project_queries(x, table, mode)
        latent, rope = linear(x, self.kv_a_proj_with_mqa, mode).split([s.kv_lora_rank, s.qk_rope_head_dim], -1)
        latent = self.kv_a_layernorm(latent)
        if mode.fp8_activations:
            latent = round_cache(latent)
        # The serving path absorbs kv_b in bf16, so its input is the cached latent, not an FP8 activation.
        kv = functional.linear(latent, as_stored(self.kv_b_proj, mode).to(x.dtype))
        by_head = kv.unflatten(-1, (heads, s.qk_nope_head_dim + s.v_head_dim))
        k_plain, v = by_head.split([s.qk_nope_head_dim, s.v_head_dim], -1)
        k_rope = rotate(rope[:, :, None], table).expand(-1, -1, heads, -1)
        return Projected(q, torch.cat((k_plain, k_rope), -1).transpose(1, 2), v.transpose(1, 2), c_q)

    def attend(self, q: Tensor, p: Projected, mask: Tensor | None, mode: Mode) -> Tensor:
        """Output [B, T, H] of queries q against the keys of `p`: causal if `mask` is None, else masked [B, T, T]."""
        scale = self.shape.qk_head_dim**-0.5
        if mask is None:
            # Flash kernels want equal widths; zero columns of v give zero columns of the output.
            v = functional.pad(p.v, (0, p.k.shape[-1] - p.v.shape[-1]))
            out = functional.scaled_dot_product_attention(q, p.k, v, is_causal=True, scale=scale)
            out = out[..., : p.v.shape[-1]]
        else:
            out = functional.scaled_dot_product_attention(q, p.k, p.v, attn_mask=mask[:, None], scale=scale)
        return linear(out.transpose(1, 2).flatten(2), self.o_proj, mode)

    def row_probabilities(self, q: Tensor, k: Tensor, rows: Tensor) -> Tensor:
        """Head-averaged dense attention fp32 [B, R, T] of the query rows `rows` [R]: what the indexer should find."""
        logits = (q[:, :, rows] @ k.transpose(-1, -2)).float() * self.shape.qk_head_dim**-0.5
        hidden = ~causal_mask(rows, k.shape[-2])
        return logits.masked_fill(hidden, float("-inf")).softmax(-1).mean(1)

    @torch.no_grad()
    def selection(self, x: Tensor, c_q: Tensor, table: Tensor, mode: Mode) -> Tensor:
        """bool [B, T, T]: the rows every query attends to, one sequence group at a time."""
        if self.indexer is None:
            raise ValueError("a shared layer has no indexer of its own")
        keys = self.indexer.keys(x, table, mode)
        q, weights = self.indexer.queries(x, c_q, table, mode)
        rows = torch.arange(x.shape[1], device=x.device)
        step = max(1, (1 << 26) // x.shape[1] ** 2)
        parts = [
            select(
                self.indexer.scores(q[i : i + step], weights[i : i + step], keys[i : i + step]),
                rows,
                self.shape.index_topk,
            )
            for i in range(0, x.shape[0], step)
        ]
        return torch.cat(parts)

    def row_scores(self, x: Tensor, c_q: Tensor, table: Tensor, rows: Tensor, mode: Mode) -> Tensor:
        """Index scores fp32 [B, R, T] of the query rows, −inf where not visible, with gradient to the indexer only."""
        if self.indexer is None:
            raise ValueError("a shared layer has no indexer of its own")
        x, c_q = x.detach(), c_q.detach()
        keys = self.indexer.keys(x, table, mode)
        q, weights = self.indexer.queries(x[:, rows], c_q[:, rows], table[:, rows], mode)
        return self.indexer.scores(q, weights, keys).masked_fill(~causal_mask(rows, x.shape[1]), float("-inf"))
