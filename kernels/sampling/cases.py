"""Problems of sampling: a step's rows with every filter, penalties, log-probabilities and acceptance of drafts."""

import functools
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.cases import EXACT, Case
from headrace.kernels.sampling.reference import Filters, noise_key, sample_rows

FILTERS = (
    Filters(0.0),
    Filters(1.0),
    Filters(1.0, top_p=0.95),
    Filters(0.7, top_k=40),
    Filters(1.2, top_k=100, top_p=0.9, min_p=0.01),
)


def draw(kernel: Any, device: torch.device, rows: int, vocabulary: int) -> tuple[Tensor, ...]:
    logits = torch.randn(rows, vocabulary, device=device) * 3
    row = torch.arange(rows, device=device)
    kernel.edit(logits, row, row % vocabulary, torch.full((rows,), -0.5, device=device))
    filters = [FILTERS[i % len(FILTERS)] for i in range(rows)]
    tokens = kernel.sample(logits, sample_rows(filters, [noise_key(3, 0, i) for i in range(rows)], device))
    return (tokens, logits)


CASES = tuple(
    Case("sampling", f"{rows} rows of {vocabulary}", functools.partial(draw, rows=rows, vocabulary=vocabulary),
         tiny=tiny, tolerance=EXACT)
    for rows, vocabulary, tiny in ((5, 300, True), (16, 154_880, False))
)  # fmt: skip
