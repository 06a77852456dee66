"""Speculation is lossless: accepted drafts follow the target's distribution, and greedy text is the same without it."""

import random

import pytest
import torch

from headrace.decode.fake import MemoryStore
from headrace.messages import SamplingParams
from headrace.model.sampler import SamplerState, verify

VOCAB = 6
DRAFTS = 3
FILTERS = {
    "temperature": SamplingParams(max_tokens=1000, temperature=0.8, seed=0),
    "top_p": SamplingParams(max_tokens=1000, temperature=1.3, top_p=0.8, seed=0),
    "top_k and min_p": SamplingParams(max_tokens=1000, temperature=1.0, top_k=4, min_p=0.15, seed=0),
}
CRITICAL = {2: 13.8, 3: 16.3, 4: 18.5, 5: 20.5}
"""Chi-square quantiles at 0.999 by degrees of freedom."""


def target(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Probabilities after the filters, written down again: temperature, top-k, top-p, min-p in that order."""
    p = torch.softmax(logits.double() / params.temperature, 0)
    order = p.argsort(descending=True)
    keep = torch.ones(VOCAB, dtype=torch.bool)
    if params.top_k > 0:
        keep[order[params.top_k :]] = False
    if params.top_p < 1:
        before = p[order].cumsum(0) - p[order]
        keep[order[before >= params.top_p]] = False
    keep &= p >= params.min_p * p.max()
    p = p * keep
    return p / p.sum()


def guessing(state: SamplerState, logits: torch.Tensor, drafts: list[int]) -> list[int]:
    """A broken acceptance: a draft passes with its own probability, as in rejection sampling, but a rejected one is
    replaced by a draw from the whole distribution instead of the residual."""
    tokens = []
    dice = random.Random(f"{state.params.seed}")
    for row, draft in zip(logits, drafts):
        if dice.random() < float(target(row, state.params)[draft]):
            tokens.append(draft)
            continue
        return [*tokens, state.draw(row)[0]]
    return [*tokens, state.draw(logits[len(drafts)])[0]]


def statistic(params: SamplingParams, rounds: int, accept) -> list[tuple[float, int]]:
    """(chi-square, degrees of freedom) of the tokens at each place of a step, over `rounds` steps with fresh seeds."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(DRAFTS + 1, VOCAB, generator=generator) * 1.5
    wanted = torch.stack([target(row, params) for row in logits])
    dice = random.Random(1)
    counts = torch.zeros(DRAFTS + 1, VOCAB, dtype=torch.float64)
    for seed in range(rounds):
        fields = {name: getattr(params, name) for name in params.__dataclass_fields__} | {"seed": seed}
        state = SamplerState(SamplingParams(**fields))
        # A drafter that is right about what is likely and knows nothing of the noise.
        drafts = [int(wanted[at].argmax()) if dice.random() < 0.8 else dice.randrange(VOCAB) for at in range(DRAFTS)]
        for at, token in enumerate(accept(state, logits, drafts)):
            counts[at, token] += 1
    out = []
    for row, p in zip(counts, wanted):
        expected = row.sum() * p
        assert float(row[p == 0].sum()) == 0, "a token that the filters exclude was drawn"
        used = expected > 0
        chi = ((row - expected).square()[used] / expected[used]).sum()
        out.append((float(chi), int(used.sum()) - 1))
    return out


@pytest.mark.parametrize("name", FILTERS)
def test_tokens_of_accepted_and_rejected_drafts_follow_the_target(name):
    """About 8,000 draws a case; `test_a_hundred_thousand_draws` is the same with more."""
    for chi, freedom in statistic(FILTERS[name], 4_000, lambda s, x, d: verify(s, x, d).tokens):
        assert freedom == 0 or chi < CRITICAL.get(freedom, 10.8), name


@pytest.mark.slow
def test_a_hundred_thousand_draws():
    for chi, freedom in statistic(FILTERS["temperature"], 50_000, lambda s, x, d: verify(s, x, d).tokens):
        assert chi < CRITICAL[freedom]


def test_the_statistic_finds_a_wrong_acceptance_rule():
    found = statistic(FILTERS["temperature"], 4_000, guessing)
    assert max(chi / CRITICAL[freedom] for chi, freedom in found) > 3


@pytest.mark.parametrize("prompts", [24, pytest.param(500, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_greedy_text_is_the_same_with_and_without_drafts(agreeing_model, house, make_prompt, prompts):
    """Prompts of 1 to 140 tokens, answers of 2 to 24, batches of eight; the model agrees with itself often enough that
    most steps accept something."""
    rng = random.Random(9)
    cases = [(str(at), rng.randrange(1, 141), rng.randrange(2, 25)) for at in range(prompts)]
    texts, accepted = [], []
    for drafts in (0, 4):
        store = MemoryStore(agreeing_model.spec.slab_layout("tile656").slot_bytes, slots=4 * prompts)
        here = house(agreeing_model, draft_tokens=drafts, max_queued=prompts, store=store)
        for at in range(0, prompts, 64):
            part = cases[at : at + 64]
            for name, length, answer in part:
                params = SamplingParams(max_tokens=answer, temperature=0.0)
                here.submit(name, make_prompt(length, int(name)), params)
            here.finish(*(name for name, _, _ in part))
        texts.append({name: here.sink.tokens(name) for name, _, _ in cases})
        accepted.append(here.rank.status()["accepted_total"])
    assert texts[0] == texts[1]
    assert accepted[0] == 0
    assert accepted[1] > prompts
    assert all(len(texts[0][name]) == answer - 1 for name, _, answer in cases)
