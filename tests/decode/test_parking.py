"""Sequences that outgrow their reservation: the youngest goes to the host tier and back, and no token differs."""

import random
import time

import pytest

from headrace.decode.fake import MemoryStore
from headrace.forecast import AnswerLengths
from headrace.kvstore.names import is_private
from headrace.messages import Aborted, Accepted, Refused, SamplingParams, SequenceFailed


def believe_in_short_answers(here) -> None:
    for _ in range(64):
        here.rank._scheduler.lengths.add(6)


def submit_together(here, *requests) -> set[bytes]:
    """(id, prompt, params, changes) each: all handed over before the first one runs. Their private blocks' names."""
    made = [here.prefill.request(name, prompt, params, **changes) for name, prompt, params, changes in requests]
    for request in made:
        here.rank.submit(here.stream, request)
    return {request.handover.private_name for request in made}


@pytest.mark.parametrize(("drafts", "publish"), [(4, True), (4, False), (0, True)])
def test_parked_sequences_go_on_with_the_same_tokens(agreeing_model, house, make_prompt, reference, drafts, publish):
    here = house(agreeing_model, slots=7, draft_tokens=drafts)
    believe_in_short_answers(here)
    wanted, requests = {}, []
    for turn in range(4):
        params = SamplingParams(max_tokens=100 + turn, temperature=1.0, seed=turn)
        wanted[str(turn)] = reference(agreeing_model, make_prompt(40 + 30 * turn), params)
        requests.append((str(turn), make_prompt(40 + 30 * turn), params, {"publish": publish}))
    submit_together(here, *requests)
    here.finish(*wanted)
    assert {request_id: here.sink.tokens(request_id) for request_id in wanted} == wanted
    status = here.rank.status()
    assert status["parked_total"] >= 1
    assert status["resumed_total"] == status["parked_total"] <= 3, "each at most once, the oldest never"
    assert all(len(here.sink.of(Accepted, request_id)) == 1 for request_id in wanted)
    here.sink.wait(here.idle)
    here.sink.wait(lambda: not any(is_private(name) for name in here.store.blocks))


def test_whoever_ends_while_parked_or_on_the_way_gives_everything_back(agreeing_model, house, make_prompt):
    here = house(agreeing_model, slots=6, max_queued=60)
    believe_in_short_answers(here)
    rng = random.Random(4)
    ids = [str(turn) for turn in range(20)]
    params = SamplingParams(max_tokens=100, temperature=1.0, seed=1)
    prompts = [make_prompt(rng.choice((30, 64, 90)), rng.randrange(4)) for _ in ids]
    handed = submit_together(here, *((name, prompt, params, {}) for name, prompt in zip(ids, prompts)))
    here.sink.wait(lambda: here.rank.status()["parked_total"] >= 3)
    for request_id in rng.sample(ids, len(ids)):
        here.rank.abort(here.stream, request_id)
        time.sleep(rng.random() * 0.01)
    here.sink.wait(lambda: all(here.sink.of(Aborted, i) or here.sink.finish_reason(i) for i in ids))
    here.sink.wait(here.idle)
    here.sink.wait(lambda: not any(is_private(name) for name in here.store.blocks if name not in handed))


def test_without_room_in_the_host_tier_it_is_the_youngest_that_fails(agreeing_model, house, make_prompt, reference):
    store = MemoryStore(agreeing_model.spec.slab_layout(agreeing_model.fmt.name).slot_bytes, slots=4)
    here = house(agreeing_model, slots=8, store=store)
    believe_in_short_answers(here)
    params = SamplingParams(max_tokens=240, temperature=1.0, seed=2)
    submit_together(here, *((name, make_prompt(20), params, {"publish": False}) for name in ("old", "young")))
    for name in list(store.blocks):
        here.sink.wait(lambda name=name: name not in store.blocks)  # both handovers are taken
    store._free.clear()
    here.finish("old")
    assert here.sink.tokens("old") == reference(agreeing_model, make_prompt(20), params)
    here.sink.wait(lambda: bool(here.sink.of(SequenceFailed, "young")))
    error = here.sink.of(SequenceFailed, "young")[0].error
    assert (error.kind, "cannot be parked" in error.text) == ("CapacityError", True)


def test_a_daemon_that_lost_the_parked_blocks_fails_the_request_after_acceptance(agreeing_model, house, make_prompt):
    here = house(agreeing_model, slots=8)
    believe_in_short_answers(here)
    params = SamplingParams(max_tokens=240, temperature=1.0, seed=2)
    submit_together(here, *((name, make_prompt(20, len(name)), params, {}) for name in ("old", "young")))
    here.sink.wait(lambda: here.rank.status()["parked_total"] == 1)
    here.store.blocks.clear()
    here.finish("old")
    here.sink.wait(lambda: bool(here.sink.of(SequenceFailed, "young")))
    assert here.sink.of(SequenceFailed, "young")[0].error.kind == "BlockMiss"
    assert not here.sink.of(Refused, "young")
    here.store.leases.clear()  # those of the blocks that vanished


def test_strict_admission_never_parks(agreeing_model, house, make_prompt):
    here = house(agreeing_model, slots=7, strict=True)
    believe_in_short_answers(here)
    params = SamplingParams(max_tokens=100, temperature=1.0, seed=1)
    submit_together(here, *((str(turn), make_prompt(40, turn), params, {}) for turn in range(4)))
    here.finish(*map(str, range(4)))
    assert here.rank.status()["parked_total"] == 0


def test_expected_lengths_are_a_quantile_of_the_longer_answers():
    lengths = AnswerLengths(window=200)
    assert lengths.expect(0, 77) == 77, "nothing known: the whole limit"
    for at in range(300):
        lengths.add(1 + at % 100)
    assert lengths.expect(0, 10_000) == 96
    assert lengths.expect(0, 50) == 50
    assert lengths.expect(50, 10_000) == 48
    assert lengths.expect(90, 10_000) == 10_000, "20 longer ones are too few to tell"
    for _ in range(200):
        lengths.add(7)
    assert (lengths.expect(0, 10_000), len(lengths._sorted)) == (7, 200)
