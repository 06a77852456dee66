"""One rank with the tiny model: tokens equal the reference engine's, whatever joins, leaves, aborts or fails."""

import random
import time

import pytest

from headrace.decode.fake import TEST_NAMESPACE
from headrace.kvstore.names import chain
from headrace.messages import Aborted, Accepted, Refused, SamplingParams, SequenceFailed
from headrace.model.mono import MonoEngine
from headrace.model.testing import tiny_model, tiny_spec

LENGTHS = (1, 63, 64, 65, 127, 128, 129)


@pytest.mark.parametrize("drafts", [0, 1, 4])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_tokens_equal_the_reference_engine(model, house, make_prompt, reference, drafts, temperature):
    here = house(model, draft_tokens=drafts)
    params = SamplingParams(max_tokens=12, temperature=temperature, seed=5)
    for length in LENGTHS:
        here.submit(str(length), make_prompt(length), params)
    here.finish(*map(str, LENGTHS))
    for length in LENGTHS:
        assert here.sink.tokens(str(length)) == reference(model, make_prompt(length), params), length
        assert len(here.sink.of(Accepted, str(length))) == 1


@pytest.mark.parametrize("kept", [3, 500])
def test_draft_steps_that_select_for_themselves_change_no_token(house, make_prompt, reference, kept):
    """Without index sharing draft steps write MTP rows that the next extend must overwrite."""
    own = tiny_model(tiny_spec(shares_draft_index=False, used_vocab_size=kept))
    here = house(own)
    params = SamplingParams(max_tokens=70, temperature=1.0, seed=8)
    for length in (1, 62, 127):
        here.submit(str(length), make_prompt(length), params)
    here.finish("1", "62", "127")
    for length in (1, 62, 127):
        assert here.sink.tokens(str(length)) == reference(own, make_prompt(length), params)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_accepted_drafts_never_exceed_max_tokens(agreeing_model, house, make_prompt, reference, temperature):
    here = house(agreeing_model)
    wanted = {}
    for max_tokens in (2, 3, 4, 5, 6, 7, 30):
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=max_tokens)
        wanted[str(max_tokens)] = reference(agreeing_model, make_prompt(70), params)
        here.submit(str(max_tokens), make_prompt(70), params)
    here.finish(*wanted)
    for request_id, tokens in wanted.items():
        assert here.sink.tokens(request_id) == tokens
        assert len(tokens) == int(request_id) - 1
        assert here.sink.finish_reason(request_id) == "length"
    assert here.rank.status()["accepted_total"] > 0


def test_a_stop_token_among_accepted_drafts_ends_the_answer_there(agreeing_model, house, make_prompt, reference):
    here = house(agreeing_model)
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=3, stop_token_ids=(2,), min_tokens=6)
    wanted = reference(agreeing_model, make_prompt(66), params)
    here.submit("a", make_prompt(66), params)
    here.finish("a")
    assert here.sink.tokens("a") == wanted
    assert wanted[-1] == 2
    assert len(wanted) < 39
    assert here.sink.finish_reason("a") == "stop"


def test_the_answer_ends_with_the_context(model, house, make_prompt):
    here = house(model, context_tokens=140)
    here.submit("a", make_prompt(130), SamplingParams(max_tokens=100, temperature=0.0))
    here.finish("a")
    assert len(here.sink.tokens("a")) == 9
    assert here.sink.finish_reason("a") == "length"


def test_joining_and_leaving_in_different_steps_changes_nothing(model, house, make_prompt, reference):
    here = house(model, max_running=3)
    wanted = {}
    for turn in range(8):
        params = SamplingParams(max_tokens=3 + 5 * (turn % 4), temperature=float(turn % 2), seed=turn)
        prompt = make_prompt(20 + 30 * turn)
        wanted[str(turn)] = reference(model, prompt, params)
        here.submit(str(turn), prompt, params)
        time.sleep(0.01)
    here.finish(*wanted)
    assert {request_id: here.sink.tokens(request_id) for request_id in wanted} == wanted


@pytest.mark.parametrize("length", [1, 63, 100, 128])
def test_published_blocks_are_what_a_prefill_of_the_whole_conversation_computes(
    agreeing_model, house, make_prompt, length
):
    here = house(agreeing_model)
    prompt = make_prompt(length)
    request = here.prefill.request("a", prompt, SamplingParams(max_tokens=150, temperature=1.0, seed=1))
    here.rank.submit(here.stream, request)
    here.finish("a")
    text = [*prompt, request.first_token, *here.sink.tokens("a")]
    names = chain(TEST_NAMESPACE, text[:-1])
    assert len(names) == (length + 149) // 64
    here.sink.wait(lambda: here.store.match(names) == len(names))
    here.sink.wait(lambda: set(names) <= here.store.announced)
    mono = MonoEngine(agreeing_model)
    mono.generate(text, SamplingParams(max_tokens=1, temperature=0.0), 0)
    for at, name in enumerate(names):
        assert here.store.payload(name, here.layout.payload_bytes) == mono.slab(at), at


def test_the_next_turn_hits_the_device_tier(model, house, make_prompt, reference):
    here = house(model)
    params = SamplingParams(max_tokens=80, temperature=0.0)
    here.submit("a", make_prompt(70), params)
    here.finish("a")
    first = here.sink.of(Accepted, "a")[0]
    assert first.restored_tokens == {"host": 70}
    longer = [*make_prompt(70), *reference(model, make_prompt(70), params)]
    here.submit("b", longer, SamplingParams(max_tokens=5, temperature=0.0))
    here.finish("b")
    again = here.sink.of(Accepted, "b")[0].restored_tokens
    assert sum(again.values()) == len(longer)
    assert again["device"] == 64  # `longer` leaves out the first token, so later blocks differ
    assert here.sink.tokens("b") == reference(model, longer, SamplingParams(max_tokens=5, temperature=0.0))


def test_a_missing_block_is_refused_before_a_slot_is_taken(model, house, make_prompt):
    here = house(model)
    request = here.prefill.request("a", make_prompt(200), SamplingParams(max_tokens=5, temperature=0.0))
    here.store.drop(request.block_names[1:2])
    here.rank.submit(here.stream, request)
    here.sink.wait(lambda: bool(here.sink.of(Refused, "a")))
    assert here.sink.of(Refused, "a")[0].error.kind == "BlockMiss"
    here.sink.wait(here.idle)
    assert here.rank.status()["device_cached_blocks"] == 0


def test_requests_that_never_fit_or_come_in_excess_are_refused(model, house, make_prompt):
    here = house(model, slots=4, max_running=1, max_queued=1)
    here.submit("huge", make_prompt(200), SamplingParams(max_tokens=100, temperature=0.0))
    here.sink.wait(lambda: bool(here.sink.of(Refused, "huge")))
    assert here.sink.of(Refused, "huge")[0].error.kind == "NeverFits"
    params = SamplingParams(max_tokens=120, temperature=0.0)
    requests = [here.prefill.request(str(i), make_prompt(10, i), params) for i in range(4)]
    for request in requests:
        here.rank.submit(here.stream, request)
    here.sink.wait(lambda: len([m for m in here.sink.messages if isinstance(m, Refused)]) >= 2)
    kinds = {m.error.kind for m in here.sink.messages if isinstance(m, Refused) and m.request_id != "huge"}
    assert kinds == {"CapacityError"}
    here.finish("0")


def test_aborts_at_random_moments_give_everything_back(model, house, make_prompt):
    here = house(model, max_running=4, max_queued=40, slots=40)
    rng = random.Random(7)
    params = SamplingParams(max_tokens=30, temperature=0.0)
    ids = [str(i) for i in range(24)]
    for request_id in ids:
        here.submit(request_id, make_prompt(rng.choice((1, 64, 100, 129)), rng.randrange(3)), params)
        if rng.random() < 0.7:
            time.sleep(rng.random() * 0.02)
            here.rank.abort(here.stream, rng.choice(ids[: int(request_id) + 1]))
    for request_id in ids:
        here.rank.abort(here.stream, request_id)
    here.sink.wait(lambda: all(here.sink.of(Aborted, i) or here.sink.finish_reason(i) for i in ids))
    here.sink.wait(here.idle)


@pytest.mark.parametrize("fault", [{"logit_bias": {10**6: 1.0}}, {"grammar": 'start: "a"'}])
def test_a_failing_sampler_ends_its_own_sequence_only(model, house, make_prompt, reference, fault):
    here = house(model)
    good = SamplingParams(max_tokens=20, temperature=0.0)
    here.submit("good", make_prompt(30), good)
    bad = here.prefill.request("bad", make_prompt(40), good)
    broken = SamplingParams(max_tokens=20, temperature=0.0, **fault)
    fields = {name: getattr(bad, name) for name in bad.__dataclass_fields__} | {"sampling": broken}
    here.rank.submit(here.stream, type(bad)(**fields))
    here.sink.wait(lambda: bool(here.sink.of(SequenceFailed, "bad")))
    here.finish("good")
    assert here.sink.tokens("good") == reference(model, make_prompt(30), good)


def test_without_the_daemon_decoding_goes_on_and_publishing_is_skipped(model, house, make_prompt, reference):
    here = house(model)
    params = SamplingParams(max_tokens=100, temperature=0.0)
    here.submit("a", make_prompt(40), params)
    here.sink.wait(lambda: bool(here.sink.tokens("a")))
    here.store.down = True
    here.finish("a")
    assert here.sink.tokens("a") == reference(model, make_prompt(40), params)
    here.sink.wait(lambda: here.rank.status()["publish_skipped_total"] >= 2)
    here.store.down = False
    here.sink.wait(lambda: here.rank.status()["store_connected"] == 1)
    here.sink.wait(lambda: len(here.store.announced) == 2)


def test_a_lease_that_ends_during_the_copy_is_refused(model, house, make_prompt):
    here = house(model)
    here.store.valid = False
    here.submit("a", make_prompt(100), SamplingParams(max_tokens=4, temperature=0.0))
    here.sink.wait(lambda: bool(here.sink.of(Refused, "a")))
    assert here.sink.of(Refused, "a")[0].error.kind == "LeaseExpired"
    here.sink.wait(here.idle)


def test_a_corrupt_block_is_refused_and_dropped(model, house, make_prompt):
    here = house(model)
    request = here.prefill.request("a", make_prompt(130), SamplingParams(max_tokens=4, temperature=0.0))
    here.store.slot_view(here.store.blocks[request.block_names[1]][0])[77] ^= 1
    here.rank.submit(here.stream, request)
    here.sink.wait(lambda: bool(here.sink.of(Refused, "a")))
    assert here.sink.of(Refused, "a")[0].error.kind == "DigestMismatch"
    assert request.block_names[1] not in here.store.blocks
    here.sink.wait(here.idle)
    assert here.rank.status()["store_connected"] == 1


def test_a_resumed_stream_draws_the_same_tokens(model, house, make_prompt, reference):
    here = house(model)
    params = SamplingParams(max_tokens=30, temperature=0.9, seed=11, presence_penalty=0.5)
    prompt = make_prompt(60)
    whole = MonoEngine(model).generate(prompt, params, 4).tokens
    longer = [*prompt, *whole[:9]]
    request = here.prefill.request("a", longer, params, output_index=10, first_token=whole[9])
    handover = type(request.handover)(
        private_name=request.handover.private_name, draft_tokens=(), mtp_hidden=b"", index_seed=b""
    )
    fields = {name: getattr(request, name) for name in request.__dataclass_fields__} | {"handover": handover}
    here.rank.submit(here.stream, type(request)(**fields))
    here.finish("a")
    assert here.sink.tokens("a") == whole[10:]
