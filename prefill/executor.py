"""Executes plans on one rank. Knows rows, slots and slabs; of requests only their id, nothing of scheduling.
Every rank makes the same collective calls for the same plan, also when it owns none of its rows.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.errors import HeadraceError
from headrace.ids import RequestId
from headrace.kernels.sampling.reference import log_probs
from headrace.kvstore.pool import DevicePool
from headrace.messages import TokenLogprob
from headrace.model.base import CachePlanes, LanguageModel, MtpOutput, StepRows
from headrace.model.grammar import Grammars
from headrace.model.mtp import draft
from headrace.model.sampler import SamplerState
from headrace.prefill.base import Slabs, StepExchange
from headrace.prefill.deal import rows_of
from headrace.prefill.plan import ChunkPlan, Drafted, Sampled, StepOutcome, StepPlan, TailPlan, unpack_tokens
from headrace.prefill.rows import Rows, last_rows, main_rows, mtp_rows, tail_rows

SCORED_ROWS = 256
"""Rows whose logits are in memory at a time when a prompt's own tokens are scored."""


class Executor:
    """One rank. Not thread-safe; `run` is called with plans in the order of their steps."""

    def __init__(
        self,
        model: LanguageModel,
        pool: DevicePool,
        slabs: Slabs,
        exchange: StepExchange,
        *,
        has_mtp: bool = True,
        grammars: Grammars | None = None,
    ) -> None:
        self._grammars = grammars
        self._model, self._pool, self._slabs, self._exchange = model, pool, slabs, exchange
        self._has_mtp = has_mtp
        self._planes: CachePlanes = pool
        """What the model reads and writes: the pool, or a view of it that waits for what is still being restored."""
        self._carried: dict[RequestId, Tensor] = {}

    @property
    def carried(self) -> int:
        """Prompts whose last hidden state this rank holds."""
        return len(self._carried)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepOutcome:
        outcome = StepOutcome()
        for request_id in plan.forget:
            self._carried.pop(request_id, None)
        reachable = not (plan.restores or plan.stores) or self._slabs.enter(plan.arena)
        restoring = self._slabs.begin_load(plan.restores, reachable=reachable)
        try:
            self._pool.zero(plan.zero)
            self._planes = restoring if plan.ahead else self._pool
            if plan.chunks:
                self._run_chunks(plan.chunks, outcome)
            extended = self._extend_tails(plan.tails) if plan.tails and self._has_mtp else None
        finally:
            self._planes = self._pool
            outcome.bad = {plan.restores[i].name for i in restoring.finish()}
        mine = [store for store in plan.stores if reachable and store.rank == self._exchange.rank]
        outcome.digests = dict(zip([store.name for store in mine], self._slabs.store(mine)))
        # Drafts come after the stores: without index sharing they leave rows behind that no block may hold.
        if plan.tails:
            self._draft(plan.tails, extended, outcome)
        for tail in plan.tails:
            del self._carried[tail.request_id]
        return outcome

    def _run_chunks(self, chunks: Sequence[ChunkPlan], outcome: StepOutcome) -> None:
        rows = main_rows(chunks, self._exchange.size)
        self._exchange.begin(rows.owner, shared_cache=True)
        hidden = self._model.forward(self._step_rows(rows), self._planes, self._exchange)  # [t, D]
        if self._has_mtp:
            self._extend(chunks, rows, hidden)
        last = self._gather_last(last_rows(chunks), rows, hidden)  # [S, D]
        for chunk, state in zip(chunks, last):
            self._carried[chunk.request_id] = state.clone()
        self._score(chunks, rows, hidden, outcome)
        if self._exchange.rank == 0:
            self._sample(chunks, last, outcome)

    def _extend(self, chunks: Sequence[ChunkPlan], main: Rows, hidden: Tensor) -> None:
        rows = mtp_rows(chunks, main, self._exchange.size)
        if not len(rows.positions):
            return
        mine = rows_of(rows.owner, self._exchange.rank)
        source = rows.source[mine]
        local = np.searchsorted(rows_of(main.owner, self._exchange.rank), source)
        states = hidden.new_empty((len(mine), hidden.shape[1]))
        here = np.nonzero(source >= 0)[0]
        states[self._index(here)] = hidden[self._index(local[here])]
        for i in np.nonzero(source < 0)[0]:
            states[i] = self._carried[chunks[-1 - source[i]].request_id]
        self._exchange.begin(rows.owner, shared_cache=True)
        self._model.mtp_extend(self._step_rows(rows), states, self._planes, self._exchange)

    def _gather_last(self, last: np.ndarray, rows: Rows, hidden: Tensor) -> Tensor:
        """Hidden states of the rows `last`, on every rank: fp32 [S, D]. They travel as bytes, so they arrive exact."""
        owner = rows.owner[last]
        mine = last[owner == self._exchange.rank]
        local = np.searchsorted(rows_of(rows.owner, self._exchange.rank), mine)
        self._exchange.begin(owner, shared_cache=True)
        sent = hidden[self._index(local)].contiguous().view(torch.uint8)
        return self._exchange.gather_rows(sent).view(torch.float32)

    def _score(self, chunks: Sequence[ChunkPlan], rows: Rows, hidden: Tensor, outcome: StepOutcome) -> None:
        """Logprobs of the tokens that follow each row of the chunks that ask for them."""
        for chunk, last in zip(chunks, last_rows(chunks).tolist()):
            if chunk.scored < 0:
                continue
            tokens = unpack_tokens(chunk.tokens)
            targets = [*tokens[1:].tolist(), *([chunk.following] if chunk.following >= 0 else [])]
            found = outcome.scores.setdefault(chunk.request_id, [])
            for at in range(0, len(targets), SCORED_ROWS):
                part = targets[at : at + SCORED_ROWS]
                where = last - len(tokens) + 1 + at + np.arange(len(part))
                states = self._gather_last(where, rows, hidden)
                if self._exchange.rank == 0:
                    for logits, token in zip(self._model.logits(states), part):
                        own, best = log_probs(logits, token, chunk.scored)
                        found.append(TokenLogprob(logprob=own, top=tuple(best)))

    def _sample(self, chunks: Sequence[ChunkPlan], last: Tensor, outcome: StepOutcome) -> None:
        ending = [i for i, chunk in enumerate(chunks) if chunk.sampling is not None]
        if not ending:
            return
        for i, logits in zip(ending, self._model.logits(last[self._index(np.array(ending))])):
            outcome.sampled[chunks[i].request_id] = _draw(chunks[i], logits, self._grammars)

    def _extend_tails(self, tails: Sequence[TailPlan]) -> MtpOutput:
        rows = tail_rows(tails)
        states = torch.stack([self._carried[tail.request_id] for tail in tails])
        self._exchange.begin(rows.owner, shared_cache=True)
        mine = rows_of(rows.owner, self._exchange.rank)
        step = self._step_rows(rows)
        return self._model.mtp_extend(step, states[self._index(mine)], self._planes, self._exchange)

    def _draft(self, tails: Sequence[TailPlan], extended: MtpOutput | None, outcome: StepOutcome) -> None:
        if extended is None:
            outcome.drafted = {tail.request_id: Drafted((), b"", b"") for tail in tails}
            return
        rows = tail_rows(tails)
        mine = self._index(rows_of(rows.owner, self._exchange.rank))
        step = self._step_rows(rows)
        # One chain length for all: shorter ones are cut, so that all ranks make the same calls.
        count = max(tail.drafts for tail in tails)
        self._exchange.begin(rows.owner, shared_cache=False)
        tokens = draft(
            self._model,
            extended.hidden,
            extended.selection,
            step.positions[mine],
            step.seq[mine],
            step.block_tables,
            count,
            self._pool,
            self._exchange,
        ).tolist()
        if self._exchange.rank == 0:
            for i, tail in enumerate(tails):
                outcome.drafted[tail.request_id] = Drafted(
                    tokens=tuple(tokens[i][: tail.drafts]),
                    mtp_hidden=_bytes(extended.hidden[i].float()),
                    index_seed=self._seed(extended.selection[i]),
                )

    def _seed(self, selection: Tensor) -> bytes:
        return _bytes(selection[selection >= 0].to(torch.int32)) if self._model.shares_draft_index else b""

    def _step_rows(self, rows: Rows) -> StepRows:
        return StepRows(
            token_ids=self._index(rows.token_ids),
            positions=self._index(rows.positions),
            seq=self._index(rows.seq),
            write=torch.from_numpy(rows.write).to(self._model.device),
            block_tables=self._index(rows.tables),
            local=self._index(rows_of(rows.owner, self._exchange.rank)),
        )

    def _index(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(self._model.device)


def _draw(chunk: ChunkPlan, logits: Tensor, grammars: Grammars | None) -> Sampled:
    assert chunk.sampling is not None
    state = SamplerState(chunk.sampling, chunk.output_index, unpack_tokens(chunk.answered).tolist())
    try:
        state.bind(grammars)
        token, logprob = state.draw(logits)
        return Sampled(token, logprob, state.commit(token))
    except HeadraceError as error:
        # A grammar that cannot go on is the request's own trouble, never the group's.
        return Sampled(0, None, None, error)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().numpy().tobytes()
