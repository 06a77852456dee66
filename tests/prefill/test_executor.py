"""One rank, the real tiny model: bytes and tokens equal to the reference engine's."""

import pytest
import torch

from headrace.errors import InputError
from headrace.messages import SamplingParams
from headrace.model.sampler import SamplerState
from headrace.prefill.fake import MemoryStore
from headrace.prefill.testing import PrefillHouse, make_request, mono_reference, random_prompt

LENGTHS = [1, 2, 63, 64, 65, 127, 128, 129, 200]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize("length", LENGTHS)
def test_bytes_tokens_and_handover_equal_the_reference_engine(length):
    house = PrefillHouse()
    tokens = random_prompt(length)
    answer = house.run(tokens)
    expected = mono_reference(house.model, tokens)
    assert answer.first_token == expected.first_token
    assert answer.handover.draft_tokens == expected.draft_tokens
    assert answer.handover.mtp_hidden == expected.mtp_hidden
    assert answer.handover.index_seed == expected.index_seed
    assert house.slabs(tokens, answer) == expected.slabs


@pytest.mark.parametrize("chunk", [64, 128])
def test_chunking_changes_no_byte(chunk):
    tokens = random_prompt(200)
    one, many = PrefillHouse(chunk=512), PrefillHouse(chunk=chunk)
    first, second = one.run(tokens), many.run(tokens)
    assert first.handover.draft_tokens == second.handover.draft_tokens
    assert first.handover.mtp_hidden == second.handover.mtp_hidden
    assert one.slabs(tokens, first) == many.slabs(tokens, second)


def test_a_batch_mix_changes_no_byte():
    prompts = [random_prompt(length, seed) for seed, length in enumerate([150, 64, 1, 70])]
    together = PrefillHouse(chunk=128)
    answers = together.run_all(prompts)
    for tokens, answer in zip(prompts, answers):
        alone = PrefillHouse()
        expected = alone.run(tokens)
        assert together.slabs(tokens, answer) == alone.slabs(tokens, expected)
        assert answer.first_token == expected.first_token
        assert answer.handover.draft_tokens == expected.handover.draft_tokens


@pytest.mark.parametrize("length", [64, 100, 128, 129])
@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_hit_gives_the_same_bytes_and_tokens_as_computing(length, tier):
    house = PrefillHouse()
    tokens = random_prompt(length)
    cold = house.run(tokens)
    expected = house.slabs(tokens, cold)
    house.close(cold)
    if tier == "host":
        house.scheduler.flush()
        house.pool.latent.fill_(0xAA)
        house.pool.index.fill_(0xAA)
    warm = house.run(tokens)
    hit = min(64 * (length // 64), length - 1)
    assert warm.cached_tokens == {"device": 0, "host": 0} | {tier: hit}
    assert warm.first_token == cold.first_token
    assert warm.handover.draft_tokens == cold.handover.draft_tokens
    assert warm.handover.mtp_hidden == cold.handover.mtp_hidden
    assert warm.handover.index_seed == cold.handover.index_seed
    assert house.slabs(tokens, warm) == expected
    assert house.scheduler.status()["query_only_rows_total"] == 1


def test_two_prompts_that_share_a_block_and_differ_in_the_next_token_share_its_bytes():
    shared = random_prompt(64)
    slabs = []
    for following in (5, 6):
        house = PrefillHouse()
        answer = house.run([*shared, following])
        slabs.append(house.slabs([*shared, following], answer)[0])
    assert slabs[0] == slabs[1]


def test_without_index_sharing_draft_rows_do_not_reach_the_store():
    house = PrefillHouse(shares_draft_index=False)
    tokens = random_prompt(62)
    answer = house.run(tokens)
    expected = mono_reference(house.model, tokens)
    assert answer.handover.index_seed == b""
    assert answer.handover.draft_tokens == expected.draft_tokens
    row_bytes = house.pool.layout.format.latent_row_bytes
    plane = house.slabs(tokens, answer)[0][: house.pool.layout.latent_bytes][-64 * row_bytes :]
    assert plane[62 * row_bytes : 63 * row_bytes] != bytes(row_bytes)
    assert plane[63 * row_bytes :] == bytes(row_bytes)


def test_ranks_carry_nothing_when_all_prompts_are_answered():
    house = PrefillHouse()
    house.run_all([random_prompt(length, length) for length in (5, 64, 130)])
    house.run(random_prompt(30), sampling=SamplingParams(max_tokens=1))
    house.drain()
    assert house.executor.carried == 0
    assert isinstance(house.store, MemoryStore)


def test_a_resumed_answer_counts_what_was_sent_already():
    """An interrupted stream: the prompt ends with two sampled tokens, penalties see them, max_tokens counts them."""
    house = PrefillHouse()
    tokens = random_prompt(70)
    sampling = SamplingParams(max_tokens=3, temperature=0.0, frequency_penalty=2.0)
    first = house.run(tokens, sampling=sampling).first_token
    second = house.run([*tokens, first], sampling=sampling, output_index=1).first_token
    answer = house.run([*tokens, first, second], sampling=sampling, output_index=2)
    assert answer.finish_reason == "length"
    state = SamplerState(sampling, 2, [first, second])
    expected = mono_reference(house.model, [*tokens, first, second])
    assert answer.first_token == state.draw(expected.logits)[0]


def test_a_rank_that_cannot_reach_the_arena_of_a_plan_neither_reads_nor_writes_another():
    house = PrefillHouse()
    tokens = random_prompt(130)
    request = make_request(tokens)
    house.scheduler.submit(request)
    for _ in range(2):
        plan = house.scheduler.next_plan()
        house.store.arena = "another daemon's"
        before = bytes(house.store.slot_view(0))
        outcome = house.executor.run(plan)
        assert outcome.digests == {}
        assert bytes(house.store.slot_view(0)) == before
        house.store.arena = "fake arena"
        house.scheduler.finish(plan, outcome)
    house.drain()
    answer = house.answers[request.request_id]
    assert house.slabs(tokens, answer) == mono_reference(house.model, tokens).slabs
    house.close(answer)
    house.scheduler.flush()

    house.scheduler.submit(make_request(tokens))
    plan = house.scheduler.next_plan()
    assert len(plan.restores) == 2
    house.store.arena = "another daemon's"
    assert house.executor.run(plan).bad == {restore.name for restore in plan.restores}


def test_a_grammar_that_cannot_run_fails_its_prompt_only():
    house = PrefillHouse()
    bad = make_request(random_prompt(70), sampling=SamplingParams(max_tokens=4, grammar='start: "a"'))
    good = make_request(random_prompt(90, seed=1))
    for request in (bad, good):
        house.scheduler.submit(request)
    house.drain()
    [(failed, error)] = house.scheduler.take_failures()
    assert failed == bad.request_id
    assert isinstance(error, InputError)
    house.close(house.answers[good.request_id])
    house.scheduler.close(failed)
    assert house.scheduler.idle
    assert house.index.free_count + house.index.cached_count == house.index.num_slots


@pytest.mark.parametrize("chunk", [64, 512])
def test_a_prompts_own_tokens_are_scored(chunk):
    house = PrefillHouse(chunk=chunk)
    tokens = random_prompt(200)
    answer = house.run(tokens, prompt_logprobs=2)
    assert len(answer.prompt_logprobs) == 199
    whole = PrefillHouse(chunk=512).run(tokens, prompt_logprobs=2)
    assert answer.prompt_logprobs == whole.prompt_logprobs
    for length in (1, 64, 65, 130):
        # The first token of a greedy answer is the best one after the prompt's last row.
        first = PrefillHouse().run(tokens[:length]).first_token
        assert whole.prompt_logprobs[length - 1].top[0][0] == first
    assert house.run(tokens, prompt_logprobs=-1).prompt_logprobs == ()
