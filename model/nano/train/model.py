"""The trainable model: decoder blocks, the MTP layer with its chained steps, and the losses of one batch.

Legend: B sequences, T positions trained on, H hidden, V vocabulary. Row i of the main model reads token i and predicts
token i + 1. Chained MTP step j on base row i reads token i + 1 + j and predicts token i + 2 + j; it looks at the
step-0 rows that row i selected, which is what index sharing between MTP iterations means at serving time.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from headrace.model.nano.train.attention import Attention, Projected, select
from headrace.model.nano.train.layers import DenseMLP, Mode, MoE, RMSNorm, rotary_table
from headrace.model.nano.train.shape import NanoShape


class BlockOutput(NamedTuple):
    """`x` [B, T, H]; `mask` bool [B, T, T] or None if dense; `load` [E−1] or None; distillation rows or None."""

    x: Tensor
    mask: Tensor | None
    load: Tensor | None
    projected: Projected
    probabilities: Tensor | None
    scores: Tensor | None


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: NanoShape, layer: int) -> None:
        super().__init__()
        out_gain = (2 * shape.num_hidden_layers) ** -0.5  # keeps the residual stream's variance near one at the start
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape, shape.has_indexer(layer), out_gain)
        self.mlp = DenseMLP(shape, out_gain) if shape.is_dense(layer) else MoE(shape, out_gain)

    def forward(self, x: Tensor, table: Tensor, mask: Tensor | None, rows: Tensor | None, mode: Mode) -> BlockOutput:
        """`table` is the rotary table of positions 0…T−1, `rows` [R] the query rows to distil on."""
        normed = self.input_layernorm(x)
        p = self.self_attn.project(normed, table, mode)
        if mode.sparse and self.self_attn.indexer is not None:
            mask = self.self_attn.selection(normed, p.c_q, table, mode)
        probabilities = scores = None
        if rows is not None:
            with torch.set_grad_enabled(mode.concentrate and torch.is_grad_enabled()):
                probabilities = self.self_attn.row_probabilities(p.q, p.k, rows)
            if self.self_attn.indexer is not None:
                scores = self.self_attn.row_scores(normed, p.c_q, table, rows, mode)
        x, load = self._finish(x, self.self_attn.attend(p.q, p, mask, mode), mode)
        return BlockOutput(x, mask, load, p, probabilities, scores)

    def chain(
        self, x: Tensor, table: Tensor, p: Projected, mask: Tensor | None, rows: Tensor | None, mode: Mode
    ) -> tuple[Tensor, Tensor | None]:
        """A later MTP step: queries of x at the positions of `table`, keys, values and selection of step 0."""
        q, _ = self.self_attn.project_queries(self.input_layernorm(x), table, mode)
        probabilities = None
        if rows is not None:
            with torch.no_grad():
                probabilities = self.self_attn.row_probabilities(q, p.k, rows)
        return self._finish(x, self.self_attn.attend(q, p, mask, mode), mode)[0], probabilities

    def _finish(self, x: Tensor, attended: Tensor, mode: Mode) -> tuple[Tensor, Tensor | None]:
        x = x + attended
        mixed, load = self.mlp(self.post_attention_layernorm(x), mode)
        return x + mixed, load


@dataclass
class Losses:
    """Scalars of one batch, and the expert loads of every MoE layer by layer number."""

    main: Tensor
    drafts: list[Tensor] = field(default_factory=list)
    indexers: list[Tensor] = field(default_factory=list)
    spreads: list[Tensor] = field(default_factory=list)
    loads: dict[int, Tensor] = field(default_factory=dict)


def divergence(target: Tensor, scores: Tensor) -> Tensor:
    """KL(target ‖ softmax(scores)) in nats a row; target fp32 [B, R, T], scores −inf where not visible."""
    log_q = scores.log_softmax(-1).clamp_min(-1e4)
    return (torch.xlogy(target, target) - target * log_q).sum(-1).mean()


def spread(probabilities: Tensor, mask: Tensor) -> Tensor:
    """Mean of −log of the attention that falls inside a selection: fp32 and bool [B, R, T], in nats a row."""
    inside = (probabilities * mask).sum(-1)
    return -inside.clamp_min(1e-6).log().mean()


def soft_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of logits [n, V] against softmax of target [n, V], mean over rows."""
    return -(target.float().softmax(-1) * logits.float().log_softmax(-1)).sum(-1).mean()


def hard_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of logits [n, V] against ids [n], mean over rows."""
    return functional.cross_entropy(logits.float(), labels)


class NanoModel(nn.Module):
    """Main model and MTP layer with shared embedding and head."""

    def __init__(self, shape: NanoShape) -> None:
        super().__init__()
        self.shape = shape
        width, eps = shape.hidden_size, shape.rms_norm_eps
        self.embed_tokens = nn.Parameter(torch.randn(shape.vocab_size, width) * 0.1)
        self.lm_head = nn.Parameter(torch.randn(shape.vocab_size, width) * 0.02)
        self.layers = nn.ModuleList([Block(shape, i) for i in range(shape.num_hidden_layers + 1)])
        self.norm = RMSNorm(width, eps)
        self.enorm, self.hnorm = RMSNorm(width, eps), RMSNorm(width, eps)
        self.eh_proj = nn.Parameter(torch.randn(width, 2 * width) * (2 * width) ** -0.5)
        self.shared_head_norm = RMSNorm(width, eps)
        self.dtype = torch.bfloat16
        self.hard_loss, self.soft_loss = hard_cross_entropy, soft_cross_entropy

    @property
    def mtp_block(self) -> Block:
        block = self.layers[self.shape.mtp_layer]
        assert isinstance(block, Block)
        return block

    def embed(self, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, self.embed_tokens.to(self.dtype))

    def head(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.lm_head.to(self.dtype))

    def combine(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Input of the MTP layer: eh_proj[enorm(embedding of the next token); hnorm(hidden)], never in FP8."""
        both = torch.cat((self.enorm(self.embed(tokens)), self.hnorm(hidden)), -1)
        return functional.linear(both, self.eh_proj.to(both.dtype))

    def trunk(self, tokens: Tensor, mode: Mode, rows: Tensor | None, losses: Losses | None = None) -> Tensor:
        """Hidden state after the final norm [B, T, H] of tokens [B, T]; adds indexer losses and loads to `losses`."""
        x = self.embed(tokens)
        table = rotary_table(torch.arange(tokens.shape[1], device=x.device), self.shape)
        mask: Tensor | None = None
        scores: Tensor | None = None
        chosen: Tensor | None = None
        group: list[Tensor] = []
        for i, block in enumerate(self.layers[: self.shape.mtp_layer]):
            out = block(x, table, mask, rows, mode)
            x, mask = out.x, out.mask
            if losses is not None and out.load is not None:
                losses.loads[i] = out.load
            if rows is None or losses is None:
                continue
            if out.scores is not None:
                self._distil(group, scores, losses)
                group, scores = [], out.scores
                chosen = select(scores.detach(), rows, self.shape.index_topk) if mode.concentrate else None
            if chosen is not None:
                losses.spreads.append(spread(out.probabilities, chosen))
            group.append(out.probabilities.detach())
        if losses is not None:
            self._distil(group, scores, losses)
        return self.norm(x)

    @staticmethod
    def _distil(group: list[Tensor], scores: Tensor | None, losses: Losses) -> None:
        # A shared selection should serve every layer that uses it, so its target is their mean.
        if scores is not None:
            losses.indexers.append(divergence(torch.stack(group).mean(0), scores))

    def draft(
        self,
        hidden: Tensor,
        next_tokens: Callable[[int, Tensor | None], Tensor],
        mode: Mode,
        rows: Tensor | None = None,
        share: int | None = None,
        losses: Losses | None = None,
    ) -> list[Tensor]:
        """Post-norm MTP outputs of every step: [B, T, H] for step 0, [share, T, H] for the chained ones.

        `hidden` [B, T, H] is the trunk's output; `next_tokens(step, last output)` gives the ids [B, T] that the base
        rows read at a step: the text when training, the drafts themselves when drafting.
        """
        positions = torch.arange(hidden.shape[1], device=hidden.device)
        block = self.mtp_block
        u = self.combine(next_tokens(0, None), hidden)
        out = block(u, rotary_table(positions, self.shape), None, rows, mode)
        states, p = [self.shared_head_norm(out.x)], out.projected
        if losses is not None and out.load is not None:
            losses.loads[self.shape.mtp_layer] = out.load
        few = Projected(p.q[:share], p.k[:share], p.v[:share], p.c_q[:share])
        mask = None if out.mask is None else out.mask[:share]
        group = [] if out.probabilities is None else [out.probabilities[:share].detach()]
        if losses is not None and rows is not None and mode.concentrate:
            chosen = select(out.scores.detach(), rows, self.shape.index_topk)
            losses.spreads.append(spread(out.probabilities, chosen))
        for step in range(1, mode.draft_steps):
            u = self.combine(next_tokens(step, states[-1])[:share], states[-1][:share])
            x, probabilities = block.chain(u, rotary_table(positions + step, self.shape), few, mask, rows, mode)
            states.append(self.shared_head_norm(x))
            if probabilities is not None:
                group.append(probabilities)
        if losses is not None and out.scores is not None:
            self._distil(group, out.scores[:share], losses)
        return states

    def draft_losses(self, states: list[Tensor], logits: Tensor, tokens: Tensor, mode: Mode) -> list[Tensor]:
        """Loss of each MTP step; `logits` [B, T, V] are the trunk's, `tokens` [B, T + 1 + draft_steps]."""
        length, found = logits.shape[1], []
        for step, state in enumerate(states):
            count = state.shape[0]
            if mode.soft_drafts:
                usable = length - mode.draft_steps  # the trunk has no logits past its last row
                target = logits[:count, 1 + step : 1 + step + usable].detach().flatten(0, 1)
                found.append(self.soft_loss(self.head(state[:, :usable]).flatten(0, 1), target))
            else:
                labels = tokens[:count, step + 2 : step + 2 + length].flatten()
                found.append(self.hard_loss(self.head(state).flatten(0, 1), labels))
        return found

    def forward(self, tokens: Tensor, rows: Tensor | None, mode: Mode, chain_share: float = 0.5) -> Losses:
        """Losses of tokens [B, T + 1 + draft_steps]; chained MTP steps run on a share of the sequences."""
        length = tokens.shape[1] - 1 - mode.draft_steps
        losses = Losses(main=torch.zeros(()))
        hidden = self.trunk(tokens[:, :length], mode, rows, losses)
        logits = self.head(hidden)
        losses.main = self.hard_loss(logits.flatten(0, 1), tokens[:, 1 : length + 1].flatten())
        share = max(1, int(tokens.shape[0] * chain_share))
        states = self.draft(hidden, lambda step, _: tokens[:, 1 + step : 1 + step + length], mode, rows, share, losses)
        losses.drafts = self.draft_losses(states, logits, tokens, mode)
        return losses

    def compile_parts(self) -> None:
        """Compiles blocks and losses separately: identical layers then share one compiled graph."""
        # Each kind of layer, stage and stance is a variant of one code object: more than the default limit of eight.
        torch._dynamo.config.recompile_limit = 64
        for block in self.layers:
            block.compile(dynamic=False)
        self.mtp_block.chain = torch.compile(self.mtp_block.chain, dynamic=False)  # type: ignore[method-assign]
        self.hard_loss = torch.compile(hard_cross_entropy, dynamic=False)
        self.soft_loss = torch.compile(soft_cross_entropy, dynamic=False)


def exported(mode: Mode) -> Mode:
    """The mode of an exported checkpoint: sparse, FP8 rows and activations, weights already on the FP8 grid."""
    return replace(mode, sparse=True, fp8_weights=False, fp8_activations=True, distil_rows=0)
