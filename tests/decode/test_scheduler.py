"""Admission, reservation and accounting without a model."""

import random

import numpy as np
import pytest

from headrace.decode.base import DecodeOptions, StreamId
from headrace.decode.scheduler import Scheduler
from headrace.decode.sequence import Emission, ParkedBlocks, Phase, Sequence
from headrace.errors import CapacityError, InputError, NeverFits, PromptTooLong
from headrace.ids import Incarnation, Namespace, RequestId
from headrace.kvstore.device_index import DeviceIndex
from headrace.kvstore.names import chain, private_name
from headrace.kvstore.policies import make_policy
from headrace.messages import DecodeRequest, Handover, SamplingParams

ROOT = Namespace(b"\x01" * 32)


def request(name: str, length: int, max_tokens: int = 10, **changes) -> DecodeRequest:
    tokens = [(at * 7 + length) % 97 for at in range(length)]
    fields = {
        "request_id": RequestId(name),
        "tokens": np.asarray(tokens, dtype="<u4").tobytes(),
        "block_names": tuple(chain(ROOT, tokens)),
        "first_token": 5,
        "output_index": 1,
        "sampling": SamplingParams(max_tokens=max_tokens),
        "handover": Handover(private_name=private_name(), draft_tokens=(1, 2, 3, 4), mtp_hidden=b"", index_seed=b""),
        "namespace": ROOT,
    }
    return DecodeRequest(**(fields | changes))


def sequence(name: str, length: int, max_tokens: int = 10, context: int = 4096, **changes) -> Sequence:
    return Sequence(request(name, length, max_tokens, **changes), StreamId(1), context)


def scheduler(slots: int = 16, max_running: int = 4, max_queued: int = 2, strict: bool = True) -> Scheduler:
    options = DecodeOptions(
        max_running=max_running, max_queued=max_queued, draft_tokens=4, context_tokens=4096, strict=strict
    )
    return Scheduler(options, DeviceIndex(slots, make_policy("lru", slots)))


@pytest.mark.parametrize(
    ("length", "max_tokens", "blocks"), [(1, 2, 1), (61, 2, 1), (62, 2, 2), (64, 2, 2), (60, 70, 3)]
)
def test_reservation_covers_every_row_of_the_sequences_life(length, max_tokens, blocks):
    one = sequence("a", length, max_tokens)
    assert one.limit == max_tokens - 1
    assert one.reserved_blocks == blocks == -(-(length + one.limit + 2) // 64)


def test_drafts_are_cut_so_that_accepting_all_ends_exactly_at_max_tokens():
    one = sequence("a", 10, max_tokens=4)
    assert one.cut_drafts(4) == [1, 2]
    one.commit(Emission([1, 2, 9], [], 2, 2))
    assert one.finish_reason == "length"
    assert (one.committed, one.pending, one.remaining) == (13, 9, 0)


def test_the_context_cuts_like_max_tokens_and_leaves_at_least_one_token():
    assert sequence("a", 100, 50, context=103).limit == 2
    with pytest.raises(PromptTooLong, match="100 prompt tokens"):
        sequence("a", 100, 50, context=101)


def test_contradicting_requests_are_refused():
    with pytest.raises(InputError, match="2 full blocks, got 0"):
        sequence("a", 130, block_names=())
    with pytest.raises(InputError, match="max_tokens 1 leaves nothing"):
        sequence("a", 10, 1)
    with pytest.raises(InputError, match="output_index 0"):
        sequence("a", 10, output_index=0)
    with pytest.raises(InputError, match="u32"):
        sequence("a", 0)


def test_answer_blocks_are_named_like_a_later_prompt():
    one = sequence("a", 100, 200)
    for token in range(60):
        one.commit(Emission([token], [], 0, 0))
    text = one.prompt + one.answer
    assert one.committed == 160
    named = one.new_full_blocks()
    assert [position for position, _, _ in named] == [1]
    assert [name for _, name, _ in named] == chain(ROOT, text)[1:2]
    assert named[0][2] == one.request.block_names[0]
    assert one.new_full_blocks() == []


def test_private_answers_and_unknown_roots_are_not_named():
    for one in (sequence("a", 70, 200, publish=False), sequence("b", 10, 200, namespace=Namespace(b""))):
        one.commit(Emission(list(range(130)), [], 0, 0))
        assert one.new_full_blocks() == []


def test_a_resumed_answer_counts_the_tokens_in_its_prompt():
    one = sequence("a", 10, 20, output_index=4)
    assert one.limit == 16
    assert one.answer_before() == [*one.prompt[-3:], 5]
    assert one.output_index == 4


def test_first_come_first_served_without_overtaking():
    here = scheduler(slots=4)
    first, second, third = sequence("a", 100, 60), sequence("b", 100, 100), sequence("c", 5, 5)
    for one in (first, second, third):
        here.submit(one)
    assert here.admit() == [first]
    assert here.admit() == []  # "c" would fit, but waits behind "b"
    here.remove(first)
    assert here.admit() == [second]
    here.remove(second)
    assert here.admit() == [third]


def test_never_fits_double_ids_and_a_full_queue():
    here = scheduler(slots=4, max_running=1, max_queued=1)
    with pytest.raises(NeverFits, match="need 5 blocks, this rank has 4"):
        here.submit(sequence("a", 200, 100))
    names = ["b", "c", "d"]
    for name in names:
        here.submit(sequence(name, 5, 5))
    with pytest.raises(CapacityError, match="already"):
        here.submit(sequence("b", 5, 5))
    here.admit()
    assert [one.request_id for one, _ in here.shed()] == ["d"]
    assert here.num_waiting == 1


@pytest.mark.parametrize("strict", [True, False])
def test_every_admitted_sequence_ends_and_all_blocks_come_back(strict):
    """Random arrivals, growth, naming, parking, aborts. Strict: whoever was admitted gets every block. Else: each is
    parked once at most, and the rank never stands still while it holds a sequence."""
    rng = random.Random(3)
    here = scheduler(slots=24, max_running=6, max_queued=50, strict=strict)
    for _ in range(40):
        here.lengths.add(20)
    names, parked, still = 0, [], 0
    for step in range(4000):
        if step < 3000 and rng.random() < 0.2:
            here.submit(sequence(str(step), rng.choice((1, 64, 130, 200)), rng.randrange(2, 300)))
        here.admit()
        here.shed()
        joining = [s for s in here.all() if s.phase is Phase.LEASING]
        for one in joining:
            join(here, one)
        ready, victims = here.make_ready()
        parked += [one.request_id for one in victims]
        still = 0 if ready or joining or not here.num_held else still + 1
        assert still < 2, "nobody advances"
        for one in ready:
            names += advance(here, one, rng)
        for one in victims:
            here.park(one, ParkedBlocks([private_name()] * len(one.block_names()), Incarnation("x")))
        if strict:
            assert here.index.free_count + here.index.cached_count >= here.unallocated_blocks
    assert here.all() == []
    assert here.index.held_count == 0
    assert here.index.check_integrity() == []
    assert names > 50
    assert len(set(parked)) == len(parked)
    assert strict == (not parked)


def join(here: Scheduler, one: Sequence) -> None:
    here.grow(one, one.committed + 1)
    for at, (name, parent) in enumerate(one.block_names()):
        if name is not None and one.blocks[at] in here.index._owned:
            one.blocks[at] = here.index.name_slot(one.blocks[at], name, parent, at)
    one.phase, one.accepted = Phase.RUNNING, True


def advance(here: Scheduler, one: Sequence, rng: random.Random) -> int:
    one.commit(Emission([rng.randrange(90)] * rng.randrange(1, 2 + min(4, one.remaining - 1)), [], 0, 0))
    named = one.new_full_blocks()
    for position, name, parent in named:
        one.blocks[position] = here.index.name_slot(one.blocks[position], name, parent, position)
    if one.finish_reason or rng.random() < 0.01:
        here.remove(one)
    return len(named)
