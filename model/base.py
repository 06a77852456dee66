"""Contracts of the model room: what the pools hand to the model, and what the model asks of them.

Shape letters: T rows of the step, t rows this rank computes, S sequences, B blocks of the longest sequence,
D hidden size, V vocabulary, K index_topk, N rows of all ranks.

The model knows rows, block tables and cache planes. It does not know HTTP, tiers, schedulers, or which pool calls it.
"""

import dataclasses
from typing import Protocol

import torch
from torch import Tensor


@dataclasses.dataclass(slots=True)
class StepRows:
    """The rows of one step.

    A row is one token at one position of one sequence. All T rows are written to this rank's cache; the rank computes
    the t rows listed in `local` and receives the cache bytes of the others from `Exchange.gather_rows`. In decode, and
    alone, `local` is all rows.
    """

    token_ids: Tensor
    """int64 [T]"""
    positions: Tensor
    """int64 [T], request-relative position; for MTP rows the MTP position p (the cache row written is p + 1)."""
    seq: Tensor
    """int64 [T], index into `block_tables`"""
    write: Tensor
    """bool [T]; False: a query-only row. It reads the cache but its own cache write is dropped."""
    block_tables: Tensor
    """int64 [S, B] device slot of each block of 64 rows; -1 where a sequence has none. Rows 0..position of a row's
    sequence are valid cache rows when the step runs (earlier ones from before, later ones written by this step)."""
    local: Tensor
    """int64 [t], ascending indices into the T rows"""


@dataclasses.dataclass(slots=True)
class MtpOutput:
    hidden: Tensor
    """fp32 [t, D], after shared_head.norm: input of `logits` and of the next draft step"""
    selection: Tensor
    """int32 [t, K], MTP cache rows (request-relative, = MTP position + 1) each row selected, ascending, -1 padded"""


class CachePlanes(Protocol):
    """A rank's device pool, plane-major. `kvstore.pool.DevicePool` is the implementation."""

    latent: Tensor
    """uint8 [latent planes, slots, 64, latent row bytes]"""
    index: Tensor
    """uint8 [index planes, slots, index plane bytes], planar inside a block (kernels/formats.py)"""


class Exchange(Protocol):
    """What ranks that step together exchange inside one step. Every rank makes the same calls in the same order, also
    with zero rows. `counts` (rows per rank) is agreed before the step, outside the model.
    """

    rank: int
    size: int
    splits_layers: bool
    """True: every rank computes every row with its part of every layer (`Placement.head_split`)."""

    def sum_parts(self, part: Tensor) -> Tensor:
        """fp32 [t, D], one part per rank of a layer's output -> the sum. Identity where layers are whole."""
        ...

    def gather_rows(self, local: Tensor) -> Tensor:
        """uint8 [t, bytes] of this rank -> uint8 [T, bytes] in the order of the step's rows. Identity when every rank
        keeps its own cache (decode)."""
        ...

    def gather_tokens(self, local: Tensor) -> Tensor:
        """[t, ...] any dtype but fp8 -> [N, ...]: rows of rank 0, then rank 1, ... Used by the expert exchange."""
        ...

    def reduce_scatter(self, partial: Tensor) -> Tensor:
        """float64 [N, D], one partial sum per rank -> float64 [t, D], the sum of this rank's rows."""
        ...


class LanguageModel(Protocol):
    """One loaded model on one rank (`model.load.load_model` makes it). Not thread-safe: one step at a time."""

    vocab_size: int
    hidden_size: int
    device: torch.device
    shares_draft_index: bool
    """`index_share_for_mtp_iteration`: draft steps reuse the selection of the extend step and write no cache rows."""

    def forward(self, rows: StepRows, cache: CachePlanes, exchange: Exchange) -> Tensor:
        """Main model. Writes the cache rows of all T rows in every layer. Returns fp32 [t, D], after `model.norm`."""
        ...

    def mtp_extend(self, rows: StepRows, hidden: Tensor, cache: CachePlanes, exchange: Exchange) -> MtpOutput:
        """MTP layer over true tokens: `rows.token_ids[i]` is the token at `positions[i] + 1`, `hidden` fp32 [t, D] the
        main model's output at `positions[local]`. Writes MTP cache row p + 1 for MTP position p (row 0 of a sequence
        stays zero and is never attended to)."""
        ...

    def mtp_draft(
        self, rows: StepRows, hidden: Tensor, selection: Tensor, cache: CachePlanes, exchange: Exchange
    ) -> MtpOutput:
        """One later draft step: `hidden` is the previous MTP output, `rows.token_ids` the drafted tokens, `positions`
        their MTP positions. With `shares_draft_index` it attends to `selection` and writes nothing; otherwise it is an
        extend whose rows the next true extend overwrites."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [n, D] -> fp32 [n, V]; ids that are not real tokens are -inf."""
        ...
