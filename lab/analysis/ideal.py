"""Ideal hit rate: what an unlimited prefix cache would give, by the three definitions people publish.

They differ by several points on the same trace, so a number without its definition says little:

    block_weighted    hit blocks / blocks, over the whole trace
    token_weighted    hit tokens / prompt tokens, over the whole trace
    request_mean      mean over requests of that request's hit tokens / prompt tokens: a short
                      prompt counts as much as a long one
"""

import dataclasses

import numpy as np

from headrace.lab.traces.form import Request, Trace


@dataclasses.dataclass(slots=True)
class HitTally:
    """Sums over requests from which every definition follows."""

    block_tokens: int
    requests: int = 0
    requests_hit: int = 0
    blocks: int = 0
    hit_blocks: int = 0
    tokens: int = 0
    hit_tokens: int = 0
    ratio_sum: float = 0.0

    def add(self, request: Request, num_blocks: int, hit_blocks: int) -> None:
        """Count one request of which the leading `hit_blocks` blocks were found."""
        hit_tokens = min(hit_blocks * self.block_tokens, request.input_tokens)
        self.requests += 1
        self.requests_hit += hit_blocks > 0
        self.blocks += num_blocks
        self.hit_blocks += hit_blocks
        self.tokens += request.input_tokens
        self.hit_tokens += hit_tokens
        self.ratio_sum += hit_tokens / request.input_tokens if request.input_tokens else 0.0

    @property
    def block_weighted(self) -> float:
        return self.hit_blocks / self.blocks if self.blocks else 0.0

    @property
    def token_weighted(self) -> float:
        return self.hit_tokens / self.tokens if self.tokens else 0.0

    @property
    def request_mean(self) -> float:
        return self.ratio_sum / self.requests if self.requests else 0.0

    def rates(self) -> dict[str, float]:
        return {
            "block_weighted": self.block_weighted,
            "token_weighted": self.token_weighted,
            "request_mean": self.request_mean,
        }


def ideal_hits(trace: Trace) -> HitTally:
    """Replay in recorded order against a cache that never forgets."""
    tally = HitTally(trace.block_tokens)
    seen = np.zeros(trace.num_blocks, dtype=bool)
    for arrival in trace.arrivals():
        request = arrival.request
        tally.add(request, request.num_blocks, _leading_run(request, seen))
        for first, count in request.runs:
            seen[first : first + count] = True
    return tally


def _leading_run(request: Request, seen: np.ndarray) -> int:
    hit = 0
    for first, count in request.runs:
        part = seen[first : first + count]
        if not part.all():
            return hit + int(part.argmin())
        hit += count
    return hit
