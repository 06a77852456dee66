"""The reference engine: what it must not depend on (chunking, drafting, slots), and the invariants of its blocks."""

from collections.abc import Sequence

import pytest
import torch

from headrace.errors import InputError, PromptTooLong
from headrace.messages import SamplingParams
from headrace.model.mono import Generation, MonoEngine
from headrace.model.testing import tiny_model, tiny_spec
from headrace.model.transformer import Transformer

ANSWER = 24
LENGTHS = (1, 63, 64, 65, 127, 128, 129, 300)


@pytest.fixture(scope="module", params=["shared-draft-index", "own-draft-index"])
def model(request: pytest.FixtureRequest) -> Transformer:
    torch.set_num_threads(1)
    return tiny_model(tiny_spec(shares_draft_index=request.param == "shared-draft-index"))


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 500, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def run(
    model: Transformer, tokens: Sequence[int], *, chunk: int = 0, drafts: int = 0, **params: object
) -> tuple[Generation, list[bytes]]:
    """The answer and the slabs of every block whose rows are all committed."""
    engine = MonoEngine(model, prefill_chunk=chunk)
    sampling = SamplingParams(**({"max_tokens": ANSWER, "temperature": 0.0} | params))  # type: ignore[arg-type]
    result = engine.generate(tokens, sampling, drafts)
    full = (len(tokens) + len(result.tokens) - 1) // 64
    return result, [engine.slab(block) for block in range(full)]


@pytest.mark.parametrize("length", LENGTHS)
def test_speculation_changes_no_token_and_no_byte(model: Transformer, length: int) -> None:
    plain, slabs = run(model, prompt(length))
    spec, spec_slabs = run(model, prompt(length), drafts=4)
    assert spec.tokens == plain.tokens
    assert spec_slabs == slabs
    assert spec.drafted > 0


@pytest.mark.parametrize("length", [65, 130, 300])
def test_chunked_equals_whole_equals_token_by_token(model: Transformer, length: int) -> None:
    whole, slabs = run(model, prompt(length), drafts=2)
    for chunk in (1, 64, 37):
        other, other_slabs = run(model, prompt(length), chunk=chunk, drafts=2)
        assert (other.tokens, other.drafted, other.accepted) == (whole.tokens, whole.drafted, whole.accepted)
        assert other_slabs == slabs


def test_seeded_sampling_does_not_depend_on_drafting(model: Transformer) -> None:
    for seed in range(3):
        params = {"temperature": 0.9, "top_p": 0.95, "seed": seed, "frequency_penalty": 0.3}
        assert run(model, prompt(70), drafts=4, **params)[0].tokens == run(model, prompt(70), **params)[0].tokens
    other = run(model, prompt(70), temperature=0.9, seed=99)[0].tokens
    assert other != run(model, prompt(70), temperature=0.9, seed=0)[0].tokens


def test_a_perfect_drafter_is_accepted(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Feed the known answer as drafts: every one is accepted, and nothing else changes."""
    plain, slabs = run(model, prompt(100))
    known = plain.tokens
    engine = MonoEngine(model)
    extend = engine._extend

    def oracle(next_tokens: list[int], start: int, hidden: torch.Tensor, count: int) -> list[int]:
        extend(next_tokens, start, hidden, count)
        done = start + len(next_tokens) - 99
        return known[done : done + count]

    monkeypatch.setattr(engine, "_extend", oracle)
    spec = engine.generate(prompt(100), SamplingParams(max_tokens=ANSWER, temperature=0.0), 4)
    assert spec.tokens == known
    assert spec.accepted == spec.drafted > 10
    assert spec.steps < 7
    assert [engine.slab(b) for b in range(len(slabs))] == slabs


def test_a_block_does_not_know_the_token_after_it(model: Transformer) -> None:
    """MTP rows are stored shifted, so two prompts that share a block and differ right after it share its bytes."""
    shared = prompt(64)
    engines = []
    for after in (5, 6):
        engine = MonoEngine(model)
        engine.generate([*shared, after, 7, 8], SamplingParams(max_tokens=2, temperature=0.0), 2)
        engines.append(engine)
    assert engines[0].slab(0) == engines[1].slab(0)
    assert engines[0].slab(1) != engines[1].slab(1)


def test_mtp_row_0_is_zero_even_in_a_dirty_pool(model: Transformer) -> None:
    engine = MonoEngine(model)
    make = engine.generate
    tokens = prompt(3)
    make(tokens, SamplingParams(max_tokens=2, temperature=0.0), 0)
    assert engine.pool is not None
    clean = engine.pool.latent.clone(), engine.pool.index.clone()
    engine.pool.latent.fill_(0xFF)
    engine.pool.index.fill_(0xFF)
    rows = engine._rows(tokens, 0)
    hidden = model.forward(rows, engine.pool, engine.exchange)
    model.mtp_extend(engine._rows([*tokens[1:], 9], 0), hidden, engine.pool, engine.exchange)
    mtp = model.spec.mtp_layer
    assert not engine.pool.latent[mtp, 0, 0].any()
    assert torch.equal(engine.pool.latent[:mtp, 0, :3], clean[0][:mtp, 0, :3])


def test_stop_min_and_max_tokens(model: Transformer) -> None:
    free = run(model, prompt(40))[0].tokens
    assert len(free) == ANSWER
    stop = free[5]
    first = free.index(stop)
    for drafts in (0, 4):
        cut, _ = run(model, prompt(40), drafts=drafts, stop_token_ids=(stop,))
        assert cut.tokens == free[: first + 1]
        assert cut.finish_reason == "stop"
        late, _ = run(model, prompt(40), drafts=drafts, stop_token_ids=(stop,), min_tokens=first + 3)
        assert stop not in late.tokens[: first + 3]
        one, _ = run(model, prompt(40), drafts=drafts, max_tokens=1)
        assert (one.tokens, one.finish_reason) == (free[:1], "length")


def test_logprobs(model: Transformer) -> None:
    for drafts in (0, 3):
        result, _ = run(model, prompt(10), drafts=drafts, top_logprobs=3)
        assert len(result.logprobs) == len(result.tokens)
        for token, logprob in zip(result.tokens, result.logprobs):
            assert logprob.top[0] == (token, logprob.logprob)
            assert len(logprob.top) == 3


def test_padding_ids_are_never_sampled(model: Transformer) -> None:
    result, _ = run(model, prompt(10), temperature=50.0, max_tokens=200)
    assert max(result.tokens) < model.spec.used_vocab_size


def test_refusals(model: Transformer) -> None:
    with pytest.raises(InputError, match="no tokens"):
        run(model, [])
    with pytest.raises(InputError, match=r"0\.\.511"):
        run(model, [600])
    with pytest.raises(PromptTooLong, match="4096"):
        run(model, [1, 2], max_tokens=4095)


@pytest.mark.parametrize("row_format", ["plain576", "bf16"])
@pytest.mark.parametrize("quantised", [True, False])
def test_other_formats_and_bf16_weights(row_format: str, quantised: bool) -> None:
    other = tiny_model(row_format=row_format, quantised=quantised)
    plain, slabs = run(other, prompt(100))
    spec, spec_slabs = run(other, prompt(100), chunk=64, drafts=4)
    assert (spec.tokens, spec_slabs) == (plain.tokens, slabs)
