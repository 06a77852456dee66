"""A trace made smaller for a small machine: lengths divided by a factor, sharing kept.

A chain keeps the id of every `stride`-th block. An id stands for its block and everything before it, so what remains
shares exactly where the original shared, in coarser steps.
"""

import dataclasses

from headrace.errors import InputError
from headrace.kernels.formats import BLOCK_TOKENS
from headrace.lab.traces.form import Request, Trace, to_runs


def shrink(trace: Trace, factor: int) -> Trace:
    """`trace` with all lengths divided by `factor`, in blocks of 64 tokens. Raises InputError when the factor does not
    turn whole blocks into whole blocks."""
    stride, rest = divmod(factor * BLOCK_TOKENS, trace.block_tokens)
    if rest or stride < 1:
        raise InputError(f"blocks of {trace.block_tokens} tokens cannot be divided by {factor} into blocks of 64")

    def smaller(request: Request) -> Request:
        kept = request.blocks()[stride - 1 :: stride]
        tokens = max(request.input_tokens // factor, 1)
        return dataclasses.replace(
            request,
            input_tokens=tokens,
            output_tokens=max(request.output_tokens // factor, 1),
            runs=to_runs(kept[: tokens // BLOCK_TOKENS]),
        )

    sessions = tuple(dataclasses.replace(s, requests=tuple(map(smaller, s.requests))) for s in trace.sessions)
    return dataclasses.replace(trace, block_tokens=BLOCK_TOKENS, sessions=sessions)
