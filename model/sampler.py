"""Sampling state of one sequence, and acceptance of drafts.

A row's token is drawn from the target's own distribution with noise keyed by (seed, choice, output index); a draft is
accepted iff it equals that token. So the text does not depend on how much was drafted, by whom, or in which batch.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from headrace.errors import EngineError, InputError
from headrace.kernels.sampling.reference import Filters, adjust, log_probs, noise_key, sample
from headrace.messages import SamplingParams, TokenLogprob
from headrace.model.grammar import Grammars, Matcher


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
        known = list(earlier)
        self._counts: Counter[int] = Counter(known)
        self._behind: list[int] | None = known if params.grammar else None
        """Tokens the matcher has still to take; None: there is no grammar, or it is bound."""
        self._matcher: Matcher | None = None
        self._stops = frozenset(params.stop_token_ids)
        self._filters = Filters(params.temperature, params.top_k, params.top_p, params.min_p)
        self._plain = not (params.presence_penalty or params.frequency_penalty or params.logit_bias)

    def bind(self, grammars: Grammars | None) -> None:
        """Set the request's grammar up, if it has one; needs `earlier` to be the whole answer so far. Harmless when
        repeated. Raises InputError when this rank has no grammars, EngineError when `earlier` breaks it."""
        if self._behind is None:
            return
        if grammars is None:
            raise InputError("this checkpoint has no tokenizer that grammars can be checked with")
        matcher = grammars.matcher(self.params.grammar)
        for token in self._behind:
            matcher.advance(token)
        self._behind, self._matcher = None, matcher

    def possible(self, drafts: Sequence[int]) -> int:
        """How many of `drafts` the grammar lets through: the first ones."""
        return len(drafts) if self._matcher is None else self._matcher.possible(drafts)

    def draft(self, logits: Tensor, drafts: Sequence[int]) -> int:
        """The draft after `drafts` from [V] logits: the best one that the grammar allows."""
        allowed = None if self._matcher is None else self._matcher.after(drafts)
        if allowed is not None:
            logits = logits.masked_fill(~torch.from_numpy(allowed).to(logits.device), -torch.inf)
        return int(logits.argmax())

    @property
    def constrained(self) -> bool:
        return self._matcher is not None

    def draw(self, logits: Tensor) -> tuple[int, TokenLogprob | None]:
        """Draw the next token from fp32 [V] without committing it."""
        if self._behind is not None:
            raise EngineError("a request with a grammar is sampled before its grammar was set up")
        params = self.params
        scores = logits
        if not self._plain:
            scores = adjust(logits, self._counts, params.presence_penalty, params.frequency_penalty, params.logit_bias)
        if self.output_index < params.min_tokens and self._stops:
            scores = scores.clone()
            scores[list(self._stops)] = -torch.inf
        if self._matcher is not None:
            scores = self._masked(scores, self._matcher)
        token = sample(scores, self._filters, noise_key(params.seed, params.choice, self.output_index))
        return token, self._logprob(logits, token)

    def _masked(self, scores: Tensor, matcher: Matcher) -> Tensor:
        allowed = matcher.allowed()
        if matcher.accepting and self._stops:
            allowed[list(self._stops)] = True
        return scores.masked_fill(~torch.from_numpy(allowed).to(scores.device), -torch.inf)

    def commit(self, token: int) -> str | None:
        """Append a token to the answer; why it ended with it, or None."""
        self._counts[token] += 1
        self.output_index += 1
        if token in self._stops and self.output_index > self.params.min_tokens:
            return "stop"
        if self._matcher is not None:
            self._matcher.advance(token)
            if self._matcher.finished:
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
