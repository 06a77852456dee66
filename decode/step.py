"""One step of one rank: verify, sample, extend, draft. Numbers as in sequence.py.

    verify   rows L..L+n       [pending, d1..dn]         -> hidden, logits; sampling commits m = accepted + 1 tokens
    extend   MTP positions L..L+m-1, tokens t_{L+1}..t_{L+m}, true hidden -> MTP rows L+1..L+m, first new draft
    draft j  MTP position L+m-1+j, token d_j             -> d_{j+1}

Every rank of the group runs the phases that have rows anywhere, with the row counts agreed in lockstep.py. Only exact
rows enter the model: no padding and no rejected row after the verify. An error of one sequence (its sampler, say) ends
that sequence alone; an error inside the model ends the group, because its ranks can no longer agree.
"""

import dataclasses
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from headrace.decode.lockstep import Lockstep, Plan, Tail
from headrace.decode.rows import Run, build_rows
from headrace.decode.sequence import Emission, Sequence
from headrace.model.base import CachePlanes, Exchange, LanguageModel, MtpOutput
from headrace.model.exchange import GroupExchange
from headrace.model.grammar import Grammars
from headrace.model.sampler import verify


@dataclasses.dataclass(slots=True)
class Outcome:
    """What a step did to one sequence: either an emission or an error."""

    sequence: Sequence
    emission: Emission | None = None
    error: Exception | None = None


@dataclasses.dataclass(slots=True)
class _Chain:
    """Sequences that go on drafting, with their last MTP output, row for row."""

    members: list[Sequence]
    wanted: list[int]
    hidden: Tensor
    selection: Tensor


class StepRunner:
    """Executes agreed steps. Holds no request state of its own."""

    def __init__(
        self,
        model: LanguageModel,
        cache: CachePlanes,
        exchange: Exchange,
        lockstep: Lockstep,
        *,
        has_mtp: bool = True,
        grammars: Grammars | None = None,
    ) -> None:
        self._grammars = grammars
        self._has_mtp = has_mtp
        self._model = model
        self._cache = cache
        self._exchange = exchange
        self._lockstep = lockstep

    def run(self, sequences: Seq[Sequence], plan: Plan) -> list[Outcome]:
        """One agreed step. `sequences` are those counted in `plan.verify[rank]`."""
        with torch.inference_mode():
            starts = [sequence.committed for sequence in sequences]
            hidden, outcomes = self._verify(sequences, plan)
            going = [o.sequence for o in outcomes if o.emission is not None]
            wanted = [0 if s.finish_reason else max(0, min(plan.draft_tokens, s.remaining - 1)) for s in going]
            steps = [sum(w > j for w in wanted) for j in range(1, plan.draft_tokens)]
            extend_rows = sum(len(o.emission.tokens) for o in outcomes if o.emission is not None)
            tail = self._lockstep.agree_tail(extend_rows if self._has_mtp else 0, steps)
            if sum(tail.extend):
                self._extend_and_draft(outcomes, starts, hidden, wanted, tail)
            return outcomes

    def _begin(self, counts: list[int]) -> None:
        if isinstance(self._exchange, GroupExchange):
            self._exchange.begin_step(counts)

    def _verify(self, sequences: Seq[Sequence], plan: Plan) -> tuple[Tensor, list[Outcome]]:
        runs = [Run(s.blocks, s.committed, [s.pending, *s.drafts]) for s in sequences]
        rows = build_rows(runs, self._model.device)
        self._begin(plan.verify)
        hidden = self._model.forward(rows, self._cache, self._exchange)
        if not sequences:
            return hidden, []
        logits = self._model.logits(hidden).split([len(run.tokens) for run in runs])
        return hidden, [self._sample(s, part) for s, part in zip(sequences, logits)]

    def _sample(self, sequence: Sequence, logits: Tensor) -> Outcome:
        drafts = sequence.drafts
        try:
            sequence.sampler.bind(self._grammars)
            done = verify(sequence.sampler, logits, drafts)
            emission = Emission(done.tokens, done.logprobs, len(drafts), done.accepted, done.finish_reason)
            sequence.commit(emission)
        except Exception as error:
            return Outcome(sequence, error=error)
        return Outcome(sequence, emission)

    def _extend_and_draft(
        self, outcomes: list[Outcome], starts: list[int], hidden: Tensor, wanted: list[int], tail: Tail
    ) -> None:
        runs: list[Run] = []
        kept: list[int] = []  # rows of the verify that became tokens
        offset = 0
        for outcome, start in zip(outcomes, starts):
            sequence = outcome.sequence
            if outcome.emission is not None:
                tokens = outcome.emission.tokens
                runs.append(Run(sequence.blocks, start, tokens))
                kept += range(offset, offset + len(tokens))
                offset += 1 + outcome.emission.drafted
            else:
                offset += 1 + len(sequence.drafts)
        self._begin(tail.extend)
        rows = build_rows(runs, self._model.device)
        taken = hidden[torch.tensor(kept, dtype=torch.int64, device=hidden.device)]
        out = self._model.mtp_extend(rows, taken, self._cache, self._exchange)
        chain = self._first_drafts(outcomes, runs, wanted, out)
        for step, counts in enumerate(tail.drafts, start=1):
            self._begin(counts)
            self._draft(chain, step)

    def _first_drafts(self, outcomes: list[Outcome], runs: list[Run], wanted: list[int], out: MtpOutput) -> _Chain:
        """The extend's last row of each sequence gives its first draft."""
        going = [o.sequence for o in outcomes if o.emission is not None]
        ends = torch.tensor([len(run.tokens) for run in runs], dtype=torch.int64).cumsum(0) - 1
        members = [at for at, want in enumerate(wanted) if want]
        last = ends[members].to(out.hidden.device) if members else ends[:0].to(out.hidden.device)
        chain = _Chain(
            [going[at] for at in members], [wanted[at] for at in members], out.hidden[last], out.selection[last]
        )
        self._append_drafts(chain)
        return chain

    def _append_drafts(self, chain: _Chain) -> None:
        if chain.members:
            logits = self._model.logits(chain.hidden)
            tokens = logits.argmax(-1).tolist()
            for at, sequence in enumerate(chain.members):
                if sequence.sampler.constrained:
                    tokens[at] = sequence.sampler.draft(logits[at], sequence.drafts)
                sequence.drafts.append(tokens[at])

    def _draft(self, chain: _Chain, step: int) -> None:
        """Draft step `step`: those that want more than `step` drafts feed their newest one."""
        stay = [at for at, want in enumerate(chain.wanted) if want > step]
        where = torch.tensor(stay, dtype=torch.int64, device=chain.hidden.device)
        chain.members = [chain.members[at] for at in stay]
        chain.wanted = [chain.wanted[at] for at in stay]
        runs = [Run(s.blocks, s.committed - 1 + step, s.drafts[-1:]) for s in chain.members]
        rows = build_rows(runs, self._model.device)
        out = self._model.mtp_draft(rows, chain.hidden[where], chain.selection[where], self._cache, self._exchange)
        chain.hidden, chain.selection = out.hidden, out.selection
        self._append_drafts(chain)
