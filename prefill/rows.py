"""Turns the chunks of a plan into the rows of a model step. Pure numpy; the same on every rank.

Main rows of a chunk are [start, start + n). Its MTP positions are those whose next token is in the chunk and whose
hidden state somebody has: start - 1 if it is carried (or nothing is before it), then start .. start + n - 2.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.kernels.formats import BLOCK_TOKENS
from headrace.prefill.deal import deal_rows
from headrace.prefill.plan import ChunkPlan, TailPlan, unpack_table, unpack_tokens

Array = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """`StepRows` before it becomes tensors, for all ranks at once. T rows, S sequences, B blocks."""

    token_ids: Array
    positions: Array
    seq: Array
    write: npt.NDArray[np.bool_]
    owner: Array
    """Rank that computes each row, [T]"""
    source: Array
    """Where a row's hidden state comes from, [T]: index of a main row, or -1 - sequence for the carried one. Empty for
    main rows."""
    tables: Array
    """[S, B], -1 padded"""


def main_rows(chunks: Sequence[ChunkPlan], ranks: int) -> Rows:
    tokens = [unpack_tokens(chunk.tokens) for chunk in chunks]
    counts = [len(part) for part in tokens]
    positions = np.concatenate([chunk.start + np.arange(n) for chunk, n in zip(chunks, counts)])
    write = np.ones(len(positions), dtype=np.bool_)
    write[last_rows(chunks) - np.array(counts) + 1] = [not chunk.query_only for chunk in chunks]
    return Rows(
        token_ids=np.concatenate(tokens),
        positions=positions,
        seq=np.repeat(np.arange(len(chunks)), counts),
        write=write,
        owner=deal_rows(positions, ranks),
        source=np.empty(0, dtype=np.int64),
        tables=_tables([chunk.table for chunk in chunks]),
    )


def last_rows(chunks: Sequence[ChunkPlan]) -> Array:
    """Index of each chunk's last row among the main rows, [S]."""
    return np.cumsum([len(chunk.tokens) // 4 for chunk in chunks]) - 1


def mtp_rows(chunks: Sequence[ChunkPlan], main: Rows, ranks: int) -> Rows:
    """MTP position p is computed by the rank that computed main row p, so its hidden state never moves; a carried one
    is on every rank and is dealt in turn. May have no rows at all."""
    tokens, positions, seq, source, owner = [], [], [], [], []
    first = 0
    for i, chunk in enumerate(chunks):
        ids = unpack_tokens(chunk.tokens)
        n = len(ids)
        inner = np.arange(first, first + n - 1)
        if chunk.carry:
            tokens.append(ids)
            positions.append(chunk.start - 1 + np.arange(n))
            source.append(np.concatenate([[-1 - i], inner]))
            owner.append(np.concatenate([[i % ranks], main.owner[inner]]))
        else:
            tokens.append(ids[1:])
            positions.append(chunk.start + np.arange(n - 1))
            source.append(inner)
            owner.append(main.owner[inner])
        seq.append(np.full(len(tokens[-1]), i))
        first += n
    joined = [np.concatenate(part).astype(np.int64) for part in (tokens, positions, seq, owner, source)]
    write = np.ones(len(joined[0]), dtype=np.bool_)
    return Rows(joined[0], joined[1], joined[2], write, joined[3], joined[4], main.tables)


def tail_rows(tails: Sequence[TailPlan]) -> Rows:
    """One MTP row a prompt, all on rank 0: it alone samples, so it alone knows the drafts while the chain runs."""
    count = len(tails)
    return Rows(
        token_ids=np.array([tail.token for tail in tails], dtype=np.int64),
        positions=np.array([tail.position for tail in tails], dtype=np.int64),
        seq=np.arange(count),
        write=np.ones(count, dtype=np.bool_),
        owner=np.zeros(count, dtype=np.int64),
        source=-1 - np.arange(count),
        tables=_tables([tail.table for tail in tails], max(tail.position + tail.drafts for tail in tails) + 2),
    )


def _tables(packed: Sequence[bytes], rows: int = 0) -> Array:
    """Padded to the longest, and to `rows` cache rows (draft positions may lie beyond the last block)."""
    tables = [unpack_table(table) for table in packed]
    width = max(-(-rows // BLOCK_TOKENS), *map(len, tables))
    out = np.full((len(tables), width), -1, dtype=np.int64)
    for row, table in zip(out, tables):
        row[: len(table)] = table
    return out
