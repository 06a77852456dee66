"""Reads given tokens with the serving code: losses, the drafts it would have made, where attention looks.

Everything goes through the paged FP8 cache in chunks, as in a prefill. T tokens, D hidden size, K index_topk.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from headrace.kernels.base import QueryRows
from headrace.kernels.formats import BLOCK_TOKENS, RowFormat
from headrace.kernels.latent_rows.reference import ReferenceLatentRows
from headrace.kernels.rows import history_slots
from headrace.kvstore.pool import DevicePool
from headrace.model.base import StepRows
from headrace.model.exchange import LocalExchange
from headrace.model.mtp import draft
from headrace.model.transformer import Transformer

CHUNK = 512


class Reader:
    """One sequence at a time; the pool lives as long as a call."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self._exchange = LocalExchange()

    def losses(self, tokens: Tensor) -> Tensor:
        """Nats fp32 [T - 1] of tokens[1:] given all before, tokens int64 [T]."""
        pool, parts = self._pool(len(tokens)), []
        for rows, following in self._chunks(tokens, pool):
            logits = self.model.logits(self.model.forward(rows, pool, self._exchange))
            parts.append(functional.cross_entropy(logits, following, reduction="none"))
        return torch.cat(parts)

    def drafts(self, tokens: Tensor, first: int, count: int = 4) -> Tensor:
        """int64 [T - 1 - first, count]: row i is what would be drafted once tokens[: first + i + 2] are committed.

        `first` is the first base row: the draft of base row r guesses tokens[r + 2:]. Draft steps write no cache rows,
        so all rows of a text can be drafted in one batch. A model that does not share its draft index would write.
        """
        pool, found = self._pool(len(tokens)), []
        for rows, following in self._chunks(tokens, pool):
            hidden = self.model.forward(rows, pool, self._exchange)
            nexts = StepRows(following, rows.positions, rows.seq, rows.write, rows.block_tables, rows.local)
            out = self.model.mtp_extend(nexts, hidden, pool, self._exchange)
            keep = rows.positions >= first
            if bool(keep.any()):
                found.append(
                    draft(
                        self.model,
                        out.hidden[keep],
                        out.selection[keep],
                        rows.positions[keep],
                        rows.seq[keep],
                        rows.block_tables,
                        count,
                        pool,
                        self._exchange,
                    )
                )
        return torch.cat(found)

    def attention_mass(self, tokens: Tensor, every: int, first: int = 0) -> list["Mass"]:
        """Per layer, the MTP layer last: how much of dense attention the selection catches, on every `every`-th row
        from position `first` on."""
        layers = self.model.spec.num_hidden_layers + 1
        probe = MassProbe(self.model.kernels.sparse_mla, layers, every, first)
        pool, inner = self._pool(len(tokens)), self.model.kernels.sparse_mla
        self.model.kernels.sparse_mla = probe
        try:
            for rows, following in self._chunks(tokens, pool):
                hidden = self.model.forward(rows, pool, self._exchange)
                nexts = StepRows(following, rows.positions, rows.seq, rows.write, rows.block_tables, rows.local)
                self.model.mtp_extend(nexts, hidden, pool, self._exchange)
        finally:
            self.model.kernels.sparse_mla = inner
        return probe.masses

    def _pool(self, length: int) -> DevicePool:
        layout = self.model.spec.slab_layout(self.model.fmt.name)
        return DevicePool(layout, -(-(length + 8) // BLOCK_TOKENS), self.model.device)

    def _chunks(self, tokens: Tensor, pool: DevicePool) -> Iterator[tuple[StepRows, Tensor]]:
        """Rows of tokens[:-1] in chunks, and the token after each row."""
        device, tokens = self.model.device, tokens.to(self.model.device)
        tables = torch.arange(pool.slots, device=device).unsqueeze(0)
        for start in range(0, len(tokens) - 1, CHUNK):
            end = min(start + CHUNK, len(tokens) - 1)
            every = torch.arange(end - start, device=device)
            written = torch.ones_like(every, dtype=torch.bool)
            rows = StepRows(tokens[start:end], every + start, torch.zeros_like(every), written, tables, every)
            yield rows, tokens[start + 1 : end + 1]


@dataclass
class Mass:
    """Of one layer, one entry a sampled query row: its position, the share of dense attention (mean over heads) on the
    rows it selected, and on the best K rows it could have selected."""

    positions: list[int] = field(default_factory=list)
    selected: list[float] = field(default_factory=list)
    best: list[float] = field(default_factory=list)

    def mean(self, values: list[float], low: int, high: int) -> float | None:
        """Mean of one entry a row over positions low <= p < high; None if no row was sampled there."""
        inside = [v for p, v in zip(self.positions, values) if low <= p < high]
        return sum(inside) / len(inside) if inside else None


class MassProbe:
    """Stands before the sparse attention of all layers and looks at some query rows on the way."""

    def __init__(self, inner: object, layers: int, every: int, first: int) -> None:
        self._inner, self._every, self._first = inner, every, first
        self.masses = [Mass() for _ in range(layers)]
        self._calls = 0
        self._rows = ReferenceLatentRows()

    def __call__(
        self, q: Tensor, plane: Tensor, selection: Tensor, rows: QueryRows, fmt: RowFormat, scale: float
    ) -> Tensor:
        mass = self.masses[self._calls % len(self.masses)]
        self._calls += 1
        watched = ((rows.last_row % self._every == self._every - 1) & (rows.last_row >= self._first)).nonzero()[:, 0]
        if len(watched):
            last = int(rows.last_row[watched[-1]])
            values = self._rows.gather_blocks(plane, history_slots(rows, 0, last + 1), fmt)[: last + 1].float()
            for row in watched.tolist():
                self._look(q[row] * scale, values, selection[row], int(rows.last_row[row]), rows.first_row, mass)
        return self._inner(q, plane, selection, rows, fmt, scale)  # type: ignore[operator, no-any-return]

    @staticmethod
    def _look(q: Tensor, values: Tensor, selection: Tensor, position: int, first_row: int, mass: Mass) -> None:
        dense = torch.softmax(q @ values[first_row : position + 1].t(), -1).mean(0)
        chosen = selection[selection >= 0].long() - first_row
        mass.positions.append(position)
        mass.selected.append(float(dense[chosen].sum()))
        mass.best.append(float(dense.topk(min(len(selection), len(dense))).values.sum()))
