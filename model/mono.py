"""The one-process reference engine: one sequence, one rank, no store. Every other path is compared with it.

Life of a prompt here: chunks through the model, each followed by its MTP rows; the last chunk samples the first token;
then decode steps of pending token + drafts, verification, draft-extend, new drafts.
"""

import dataclasses
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.errors import InputError, PromptTooLong
from headrace.kernels.formats import BLOCK_TOKENS
from headrace.kvstore.pool import DevicePool
from headrace.messages import SamplingParams, TokenLogprob
from headrace.model.base import StepRows
from headrace.model.exchange import LocalExchange
from headrace.model.mtp import extend_and_draft
from headrace.model.sampler import SamplerState, verify
from headrace.model.transformer import Transformer


@dataclasses.dataclass(slots=True)
class Generation:
    tokens: list[int]
    logprobs: list[TokenLogprob]
    finish_reason: str
    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    """Decode steps (verifications)."""
    prefill_s: float = 0.0
    decode_s: float = 0.0


class MonoEngine:
    """Owns one pool, in which block b of the sequence is slot b. `prefill_chunk` 0: the prompt in one step."""

    def __init__(self, model: Transformer, *, prefill_chunk: int = 512) -> None:
        self.model = model
        self.prefill_chunk = prefill_chunk
        self.exchange = LocalExchange()
        self.pool: DevicePool | None = None

    def generate(self, tokens: Sequence[int], params: SamplingParams, draft_tokens: int = 4) -> Generation:
        """Answer one prompt. Raises InputError (empty prompt, unknown ids), PromptTooLong."""
        self._check(tokens, params)
        count = draft_tokens if self.model.spec.has_mtp else 0
        rows = len(tokens) + params.max_tokens + count + 2
        self.pool = DevicePool(
            self.model.spec.slab_layout(self.model.fmt.name), -(-rows // BLOCK_TOKENS), self.model.device
        )
        state = SamplerState(params)
        started = time.perf_counter()
        result, drafts = self._prefill(list(tokens), state, count)
        result.prefill_s = time.perf_counter() - started
        if not result.finish_reason:
            self._decode(len(tokens), result, drafts, state, count)
            result.decode_s = time.perf_counter() - started - result.prefill_s
        return result

    def slab(self, block: int) -> bytes:
        """Payload bytes of a block of the last sequence, in slab order."""
        assert self.pool is not None
        planes = (self.pool.latent[:, block], self.pool.index[:, block])
        return b"".join(plane.contiguous().cpu().numpy().tobytes() for plane in planes)

    def _prefill(self, tokens: list[int], state: SamplerState, count: int) -> tuple[Generation, list[int]]:
        length = len(tokens)
        chunk = self.prefill_chunk or length
        for start in range(0, length, chunk):
            end = min(start + chunk, length)
            rows = self._rows(tokens[start:end], start)
            hidden = self.model.forward(rows, self._pool, self.exchange)
            if end < length:
                self._extend(tokens[start + 1 : end + 1], start, hidden, 0)
        logits = self.model.logits(hidden[-1:])
        token, logprob = state.draw(logits[0])
        reason = state.commit(token)
        result = Generation([token], [logprob] if logprob is not None else [], reason or "")
        drafts = self._extend([*tokens[start + 1 :], token], start, hidden, 0 if reason else count)
        return result, drafts

    def _decode(self, length: int, result: Generation, drafts: list[int], state: SamplerState, count: int) -> None:
        """`length` rows have KV; the last token of the answer is pending."""
        while not result.finish_reason:
            # Drafting past max_tokens would only produce tokens to throw away.
            drafts = drafts[: state.params.max_tokens - state.output_index - 1]
            hidden = self.model.forward(self._rows([result.tokens[-1], *drafts], length), self._pool, self.exchange)
            checked = verify(state, self.model.logits(hidden), drafts)
            result.tokens += checked.tokens
            result.logprobs += checked.logprobs
            result.drafted += len(drafts)
            result.accepted += checked.accepted
            result.steps += 1
            result.finish_reason = checked.finish_reason or ""
            new = len(checked.tokens)
            drafts = self._extend(checked.tokens, length, hidden[:new], 0 if checked.finish_reason else count)
            length += new

    def _extend(self, next_tokens: list[int], start: int, hidden: Tensor, count: int) -> list[int]:
        """MTP rows of positions start.. with their next tokens; then `count` drafts."""
        if not self.model.spec.has_mtp:
            return []
        rows = self._rows(next_tokens, start)
        last = torch.tensor([len(next_tokens) - 1], device=self.model.device)
        out = extend_and_draft(self.model, rows, hidden, last, count, self._pool, self.exchange)
        return out.tokens[0].tolist()

    @property
    def _pool(self) -> DevicePool:
        assert self.pool is not None
        return self.pool

    def _rows(self, tokens: list[int], start: int) -> StepRows:
        device, count = self.model.device, len(tokens)
        every = torch.arange(count, device=device)
        return StepRows(
            token_ids=torch.tensor(tokens, dtype=torch.int64, device=device),
            positions=every + start,
            seq=torch.zeros_like(every),
            write=torch.ones_like(every, dtype=torch.bool),
            block_tables=torch.arange(self._pool.slots, device=device).unsqueeze(0),
            local=every,
        )

    def _check(self, tokens: Sequence[int], params: SamplingParams) -> None:
        spec = self.model.spec
        if not tokens:
            raise InputError("the prompt has no tokens")
        if min(tokens) < 0 or max(tokens) >= spec.vocab_size:
            raise InputError(f"token ids must be in 0..{spec.vocab_size - 1}, got {min(tokens)}..{max(tokens)}")
        if len(tokens) + params.max_tokens > spec.max_position_embeddings:
            raise PromptTooLong(
                f"{len(tokens)} prompt + {params.max_tokens} new tokens exceed {spec.max_position_embeddings}"
            )
