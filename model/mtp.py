"""The drafting chain, the same for prefill (after the last chunk) and decode (after every verification).

Every rank of a group makes the same calls: one extend, then `count - 1` draft steps and `count` head products, whatever
the number of its sequences, zero included.
"""

import dataclasses

import torch
from torch import Tensor

from headrace.model.base import CachePlanes, Exchange, LanguageModel, StepRows


@dataclasses.dataclass(slots=True)
class Drafted:
    tokens: Tensor
    """int64 [S, count], greedy, lowest id on ties"""
    hidden: Tensor
    """fp32 [S, D], MTP output of each sequence's last true row"""
    selection: Tensor
    """int32 [S, K], its selection (request-relative MTP cache rows)"""


def extend_and_draft(
    model: LanguageModel,
    rows: StepRows,
    hidden: Tensor,
    last: Tensor,
    count: int,
    cache: CachePlanes,
    exchange: Exchange,
    draft_exchange: Exchange | None = None,
) -> Drafted:
    """Extend over true tokens, then draft `count` tokens for each sequence.

    `last` int64 [S]: the local row (0..t-1) of each sequence's last true token; S may be less than the sequences of
    the step (a prompt's earlier chunks draft nothing). The draft steps have S rows on this rank: `draft_exchange` is
    the exchange begun with those counts (None: `exchange` serves both, as it does alone).
    """
    out = model.mtp_extend(rows, hidden, cache, exchange)
    kept = rows.local[last]
    tokens = draft(
        model,
        out.hidden[last],
        out.selection[last],
        rows.positions[kept],
        rows.seq[kept],
        rows.block_tables,
        count,
        cache,
        draft_exchange or exchange,
    )
    return Drafted(tokens, out.hidden[last], out.selection[last])


def draft(
    model: LanguageModel,
    hidden: Tensor,
    selection: Tensor,
    positions: Tensor,
    seq: Tensor,
    block_tables: Tensor,
    count: int,
    cache: CachePlanes,
    exchange: Exchange,
) -> Tensor:
    """Greedy chain from each sequence's last true MTP row: `hidden` [S, D] and `selection` [S, K] are that row's
    output, `positions` [S] its MTP position. Returns int64 [S, count]."""
    tokens = torch.empty((hidden.shape[0], count), dtype=torch.int64, device=hidden.device)
    every = torch.arange(hidden.shape[0], device=hidden.device)
    for step in range(count):
        tokens[:, step] = model.logits(hidden).argmax(-1)
        if step + 1 == count:
            break
        rows = StepRows(
            token_ids=tokens[:, step].contiguous(),
            positions=positions + step + 1,
            seq=seq,
            write=torch.ones_like(seq, dtype=torch.bool),
            block_tables=block_tables,
            local=every,
        )
        out = model.mtp_draft(rows, hidden, selection, cache, exchange)
        hidden, selection = out.hidden, out.selection
    return tokens
