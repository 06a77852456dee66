"""Sampling state of one sequence, and acceptance of drafts.

A row's token is drawn from the target's own distribution with noise keyed by (seed, choice, output index); a draft is
accepted iff it equals that token. So the text does not depend on how much was drafted, by whom, or in which batch.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from headrace.kernels.sampling.reference import Filters, adjust, log_probs, noise_key, sample
from headrace.messages import SamplingParams, TokenLogprob


@dataclasses.dataclass(frozen=True, slots=True)
class Verified:
    """What one verification gave one sequence; already committed to its state."""

    tokens: list[int]
    """New tokens: accepted drafts, then one drawn token; cut after a stop id and at max_tokens. Never empty."""
    logprobs: list[TokenLogprob]
    """One per token if the request wants them, else empty."""
    accepted: int
    """Drafts that became tokens."""
    finish_reason: str | None


class SamplerState:
    """`output_index` tokens of the answer are known already (`earlier`, oldest first, if penalties need them)."""

    def __init__(self, params: SamplingParams, output_index: int = 0, earlier: Iterable[int] = ()) -> None:
        self.params = params
        self.output_index = output_index
        self._counts: Counter[int] = Counter(earlier)
        self._stops = frozenset(params.stop_token_ids)
        self._filters = Filters(params.temperature, params.top_k, params.top_p, params.min_p)
        self._plain = not (params.presence_penalty or params.frequency_penalty or params.logit_bias)

    def draw(self, logits: Tensor) -> tuple[int, TokenLogprob | None]:
        """Draw the next token from fp32 [V] without committing it."""
        params = self.params
        scores = logits
        if not self._plain:
            scores = adjust(logits, self._counts, params.presence_penalty, params.frequency_penalty, params.logit_bias)
        if self.output_index < params.min_tokens and self._stops:
            scores = scores.clone()
            scores[list(self._stops)] = -torch.inf
        token = sample(scores, self._filters, noise_key(params.seed, params.choice, self.output_index))
        return token, self._logprob(logits, token)

    def commit(self, token: int) -> str | None:
        """Append a token to the answer; why it ended with it, or None."""
        self._counts[token] += 1
        self.output_index += 1
        if token in self._stops and self.output_index > self.params.min_tokens:
            return "stop"
        return "length" if self.output_index >= self.params.max_tokens else None

    def _logprob(self, logits: Tensor, token: int) -> TokenLogprob | None:
        if self.params.top_logprobs < 0:
            return None
        own, best = log_probs(logits, token, self.params.top_logprobs)
        return TokenLogprob(logprob=own, top=tuple(best))


def sample_rows(logits: Tensor, states: Sequence[SamplerState]) -> list[tuple[int, TokenLogprob | None, str | None]]:
    """One row per sequence, fp32 [S, V]: draw and commit. (token, logprob, finish reason) each."""
    out = []
    for row, state in zip(logits, states):
        token, logprob = state.draw(row)
        out.append((token, logprob, state.commit(token)))
    return out


def verify(state: SamplerState, logits: Tensor, drafts: Sequence[int]) -> Verified:
    """Rows of one sequence, fp32 [1 + len(drafts), V]: row 0 follows the pending token, row j draft j."""
    if logits.shape[0] != len(drafts) + 1:
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(drafts)} drafts")
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    accepted = 0
    for row, proposed in zip(logits, [*drafts, None]):
        token, logprob = state.draw(row)
        reason = state.commit(token)
        tokens.append(token)
        if logprob is not None:
            logprobs.append(logprob)
        accepted += token == proposed
        if reason is not None or token != proposed:
            return Verified(tokens, logprobs, accepted, reason)
    raise AssertionError("the row after the last draft always ends the loop")
