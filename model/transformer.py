"""The language model: embedding, decoder layers, the MTP layer, the head (`model.base.LanguageModel`).

The residual stream is fp32 on every device this runs on with the reference kernels; FP8 weights quantise their inputs
themselves. Nothing here knows who calls it: a prefill rank, a decode rank, or the mono engine.
"""

import dataclasses

import torch
from torch import Tensor

from headrace.kernels.base import QueryRows
from headrace.kernels.formats import BLOCK_TOKENS, RowFormat
from headrace.kernels.registry import KernelSet
from headrace.kernels.rows import cache_rows
from headrace.model.attention import Attention, StepView
from headrace.model.base import CachePlanes, Exchange, MtpOutput, StepRows
from headrace.model.moe import Mlp, Moe
from headrace.model.rotary import RotaryTable
from headrace.model.spec import ModelSpec


@dataclasses.dataclass(slots=True)
class Layer:
    """One decoder block. `owns_index` False: it uses the selection of the nearest full layer before it."""

    input_norm: Tensor
    attention: Attention
    post_norm: Tensor
    mlp: Mlp | Moe
    owns_index: bool


@dataclasses.dataclass(slots=True)
class MtpLayer:
    enorm: Tensor
    hnorm: Tensor
    eh_proj: object
    layer: Layer
    head_norm: Tensor


class Transformer:
    def __init__(
        self,
        spec: ModelSpec,
        kernels: KernelSet,
        device: torch.device,
        embedding: Tensor,
        layers: list[Layer],
        norm: Tensor,
        head: object,
        mtp: MtpLayer | None,
        fmt: RowFormat,
    ) -> None:
        self.spec, self.device, self.kernels, self.fmt = spec, device, kernels, fmt
        self.vocab_size, self.hidden_size = spec.vocab_size, spec.hidden_size
        self.shares_draft_index = spec.shares_draft_index
        self._embedding, self._layers, self._norm, self._head, self._mtp = embedding, layers, norm, head, mtp
        self._rotary = RotaryTable(spec.rope, spec.qk_rope_head_dim, device)

    @torch.inference_mode()
    def forward(self, rows: StepRows, cache: CachePlanes, exchange: Exchange) -> Tensor:
        step = self._view(rows, shift=0)
        x = self._embed(rows.token_ids[rows.local])
        selection: Tensor | None = None
        for layer in self._layers:
            x, selection = self._block(layer, x, step, None if layer.owns_index else selection, cache, exchange)
        return self.kernels.norm.rms(x, self._norm, self.spec.rms_norm_eps)

    @torch.inference_mode()
    def mtp_extend(self, rows: StepRows, hidden: Tensor, cache: CachePlanes, exchange: Exchange) -> MtpOutput:
        self._clear_first_rows(rows, cache)
        return self._mtp_forward(rows, hidden, None, cache, exchange)

    @torch.inference_mode()
    def mtp_draft(
        self, rows: StepRows, hidden: Tensor, selection: Tensor, cache: CachePlanes, exchange: Exchange
    ) -> MtpOutput:
        return self._mtp_forward(rows, hidden, selection if self.shares_draft_index else None, cache, exchange)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        scores = self.kernels.linear(hidden, self._head)
        scores[:, self.spec.used_vocab_size :] = -torch.inf
        return scores

    def _mtp_forward(
        self, rows: StepRows, hidden: Tensor, selection: Tensor | None, cache: CachePlanes, exchange: Exchange
    ) -> MtpOutput:
        mtp = self._mtp
        if mtp is None:
            raise AssertionError("this model has no MTP layer")
        eps = self.spec.rms_norm_eps
        step = self._view(rows, shift=1)
        embedded = self.kernels.norm.rms(self._embed(rows.token_ids[rows.local]), mtp.enorm, eps)
        joined = torch.cat((embedded, self.kernels.norm.rms(hidden, mtp.hnorm, eps)), -1)
        x = self.kernels.linear(joined, mtp.eh_proj)
        x, selection = self._block(mtp.layer, x, step, selection, cache, exchange, write=selection is None)
        return MtpOutput(self.kernels.norm.rms(x, mtp.head_norm, eps), selection)

    def _block(
        self,
        layer: Layer,
        x: Tensor,
        step: StepView,
        selection: Tensor | None,
        cache: CachePlanes,
        exchange: Exchange,
        write: bool = True,
    ) -> tuple[Tensor, Tensor]:
        norm, eps = self.kernels.norm.rms, self.spec.rms_norm_eps
        attended, selection = layer.attention.forward(
            norm(x, layer.input_norm, eps), step, selection, cache, exchange, write
        )
        x = x + attended
        return x + layer.mlp.forward(norm(x, layer.post_norm, eps), exchange), selection

    def _embed(self, token_ids: Tensor) -> Tensor:
        return self._embedding.index_select(0, token_ids).to(torch.float32)

    def _view(self, rows: StepRows, shift: int) -> StepView:
        """`shift` 1: the MTP layer, which stores position p in row p + 1 and never reads row 0."""
        local = rows.local
        positions, seq = rows.positions[local], rows.seq[local]
        cos, sin = self._rotary.at(positions)
        write = cache_rows(rows.block_tables, rows.seq, rows.positions + shift)
        return StepView(
            cos=cos,
            sin=sin,
            query=QueryRows(seq, positions + shift, rows.block_tables, first_row=shift),
            write_rows=torch.where(rows.write, write, -1),
        )

    def _clear_first_rows(self, rows: StepRows, cache: CachePlanes) -> None:
        """MTP row 0 holds no position: zero it, whatever the slot held before."""
        first = (rows.positions == 0) & rows.write
        if not bool(first.any()):
            return
        slots = rows.block_tables[rows.seq[first], 0]
        layout = self.spec.slab_layout(self.fmt.name)
        cache.latent[layout.num_layers][slots, 0] = 0
        index = cache.index[layout.index_plane(layout.num_layers)]
        nothing = index.new_zeros((slots.shape[0], self.fmt.index_plane_bytes // BLOCK_TOKENS))
        self.kernels.index_keys.write(index, slots * BLOCK_TOKENS, nothing, self.fmt)
