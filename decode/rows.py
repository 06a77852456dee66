"""Turn runs of consecutive tokens of sequences into the tensors of one model step."""

import dataclasses
from collections.abc import Sequence as Seq

import torch

from headrace.model.base import StepRows


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Tokens of one sequence at positions start, start + 1, ... and the slots of its blocks."""

    blocks: Seq[int]
    start: int
    tokens: Seq[int]


def build_rows(runs: Seq[Run], device: torch.device) -> StepRows:
    """StepRows of all runs, in order; every row is written and computed here. With no runs, zero rows."""
    counts = torch.tensor([len(run.tokens) for run in runs], dtype=torch.int64)
    tokens = [token for run in runs for token in run.tokens]
    positions = [run.start + at for run in runs for at in range(len(run.tokens))]
    tables = torch.full((max(1, len(runs)), max([1, *(len(run.blocks) for run in runs)])), -1, dtype=torch.int64)
    for at, run in enumerate(runs):
        tables[at, : len(run.blocks)] = torch.tensor(run.blocks, dtype=torch.int64)
    return StepRows(
        token_ids=torch.tensor(tokens, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        seq=torch.repeat_interleave(torch.arange(len(runs)), counts).to(device),
        write=torch.ones(len(tokens), dtype=torch.bool, device=device),
        block_tables=tables.to(device),
        local=torch.arange(len(tokens), device=device),
    )
