import random

import numpy as np
import pytest

from headrace.errors import CapacityError, InputError, NeverFits, PromptTooLong
from headrace.ids import RequestId
from headrace.kvstore.names import chain
from headrace.messages import SamplingParams
from headrace.prefill.fake import ROOT, House
from headrace.prefill.plan import unpack_tokens


def prompt(length, seed=0):
    return random.Random(seed).choices(range(1000), k=length)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129, 1000])
def test_a_prompt_is_computed_published_and_given_back(length):
    house = House()
    house.submit("a", prompt(length))
    house.drain()
    answer = house.answers["a"]
    assert answer.first_token == 7
    assert answer.cached_tokens == {"device": 0, "host": 0}
    assert len(answer.handover.draft_tokens) == 4
    assert len(house.store.leases) == length // 64 + 1
    assert house.value("computed_tokens_total") == length
    chunks = [c for plan in house.runner.plans for c in plan.chunks]
    assert [c.carry for c in chunks] == [False] + [True] * (len(chunks) - 1)
    assert sum(len(c.tokens) // 4 for c in chunks) == length
    house.scheduler.close(RequestId("a"))
    house.check_all_given_back()
    assert len(house.store.ready) == length // 64, "the private block is gone, the named ones stay"


@pytest.mark.parametrize("length", [64, 128, 129, 200])
def test_a_device_hit_resumes_one_row_early(length):
    house = House()
    house.submit("a", prompt(length))
    house.drain()
    house.scheduler.close(RequestId("a"))
    house.runner.plans.clear()
    house.submit("b", prompt(length))
    house.drain()
    hit = 64 * (length // 64)
    assert house.answers["b"].cached_tokens == {"device": min(hit, length - 1), "host": 0}
    (chunk,) = [c for plan in house.runner.plans for c in plan.chunks]
    assert chunk.start == hit - 1
    assert chunk.query_only
    assert not chunk.carry
    assert unpack_tokens(chunk.tokens).tolist() == prompt(length)[hit - 1 :]
    assert house.value("query_only_rows_total") == 1
    assert house.value("computed_tokens_total") == length + length - hit


def test_a_host_hit_is_restored_before_it_is_computed_on():
    house = House()
    house.submit("a", prompt(200))
    house.drain()
    house.scheduler.close(RequestId("a"))
    house.scheduler.flush()
    house.submit("b", prompt(200))
    first = house.step()
    assert [r.host_slot for r in first.restores] == [house.store.ready[r.name][0] for r in first.restores]
    assert len(first.restores) == 3
    assert first.chunks == ()
    house.drain()
    assert house.answers["b"].cached_tokens == {"device": 0, "host": 192}
    assert house.store.announced == set(house.index.names())


def computed_once(house, length):
    """The prompt's full blocks lie on a disk and nowhere else."""
    house.submit("a", prompt(length))
    house.drain()
    house.scheduler.close(RequestId("a"))
    house.scheduler.flush()
    names = chain(ROOT, np.array(prompt(length), dtype="<u4").tobytes())
    house.store.below = {name: house.store.ready[name][1] for name in names}
    house.store.drop(names)
    return names


def test_a_prompt_waits_for_blocks_that_come_up_from_disk():
    house = House()
    names = computed_once(house, 200)
    house.submit("b", prompt(200))
    assert house.step() is None, "two blocks are still coming"
    house.drain()
    answer = house.answers["b"]
    assert answer.cached_tokens == {"device": 0, "host": 0, "disk": 192}
    assert answer.restore_s > answer.queue_s
    assert house.value("computed_tokens_total") == 200 + 8
    house.scheduler.close(RequestId("b"))
    house.scheduler.flush()
    house.store.below = {}
    house.submit("c", prompt(200))
    house.drain()
    assert house.answers["c"].cached_tokens == {"device": 0, "host": 192}, names


def test_a_prompt_does_not_wait_for_ever_for_what_is_below():
    house = House()
    computed_once(house, 200)
    house.store.promotes = False
    house.submit("b", prompt(200))
    began = house.now_s
    house.drain(1000)
    assert house.answers["b"].cached_tokens == {"device": 0, "host": 0}
    assert 5.0 <= house.now_s - began < 5.5
    house.scheduler.close(RequestId("b"))
    house.check_all_given_back()


def test_others_pass_a_prompt_that_waits_for_a_disk():
    house = House()
    computed_once(house, 200)
    house.store.promotes = False
    house.submit("b", prompt(200))
    house.submit("c", prompt(100, seed=5))
    for _ in range(20):
        house.step()
    assert "c" in house.answers
    assert "b" not in house.answers
    house.scheduler.close(RequestId("b"))
    house.scheduler.close(RequestId("c"))
    house.check_all_given_back()


def test_a_corrupt_host_block_is_dropped_and_recomputed():
    house = House()
    house.submit("a", prompt(200))
    house.drain()
    house.scheduler.close(RequestId("a"))
    house.scheduler.flush()
    names = chain(ROOT, np.array(prompt(200), dtype="<u4").tobytes())
    house.runner.bad = {names[1]}
    house.submit("b", prompt(200))
    house.drain()
    assert house.answers["b"].cached_tokens == {"device": 0, "host": 64}
    house.scheduler.close(RequestId("b"))
    house.check_all_given_back()


def test_a_shared_prefix_is_computed_once():
    house = House()
    shared = prompt(256)
    house.submit("a", shared + prompt(30, 1))
    house.submit("b", shared + prompt(90, 2))
    house.drain()
    assert house.value("computed_tokens_total") == 256 + 30 + 90
    assert house.answers["b"].cached_tokens == {"device": 256, "host": 0}
    for name in "ab":
        house.scheduler.close(RequestId(name))
    house.check_all_given_back()


def test_when_the_one_who_computes_the_shared_prefix_leaves_the_other_goes_on():
    house = House()
    shared = prompt(512)
    house.submit("a", shared + prompt(30, 1))
    house.submit("b", shared + prompt(90, 2))
    house.step()
    house.scheduler.close(RequestId("a"))
    house.drain()
    assert house.answers["b"].cached_tokens == {"device": 128, "host": 0}
    house.scheduler.close(RequestId("b"))
    house.check_all_given_back()


def test_a_short_prompt_overtakes_a_long_one():
    house = House(device=64)
    house.submit("long", prompt(3000))
    house.step()
    house.submit("short", prompt(60, 1))
    for _ in range(4):
        house.step()
    assert "short" in house.answers
    assert "long" not in house.answers
    house.drain()
    assert "long" in house.answers


def test_priority_goes_before_age():
    house = House(running=1)
    house.submit("a", prompt(100))
    house.submit("b", prompt(100, 1), priority=1)
    first = house.step()
    assert [c.request_id for c in first.chunks] == ["b"]


@pytest.mark.parametrize("steps", range(8))
def test_cancelling_after_any_step_gives_everything_back(steps):
    house = House()
    house.submit("seed", prompt(130))
    house.drain()
    house.scheduler.close(RequestId("seed"))
    house.scheduler.flush()
    house.submit("a", prompt(500))
    for _ in range(steps):
        house.step()
    house.scheduler.close(RequestId("a"))
    house.check_all_given_back()
    house.drain()
    assert house.value("device_free_blocks") == 32


def test_a_full_device_tier_makes_prompts_wait_not_fail():
    house = House(device=8, running=8)
    for i in range(4):
        house.submit(str(i), prompt(300, i))
    for _ in range(20):
        house.step()
    assert list(house.answers) == ["0"]
    for i in range(4):
        house.scheduler.close(RequestId(str(i)))
        for _ in range(20):
            house.step()
    assert sorted(house.answers) == ["0", "1", "2", "3"]
    house.check_all_given_back()


def test_a_waiting_large_prompt_is_overtaken_a_bounded_number_of_times():
    house = House(device=16, queued=100)
    house.submit("holder", prompt(600))
    house.drain()
    house.submit("large", prompt(900, 1))
    for i in range(12):
        house.submit(f"small{i}", prompt(10, i + 2))
    for _ in range(60):
        house.step()
        for i in range(12):
            if f"small{i}" in house.answers:
                house.scheduler.close(RequestId(f"small{i}"))
    assert len(house.answers) == 1 + 8
    house.scheduler.close(RequestId("holder"))
    for _ in range(20):
        house.step()
    assert "large" in house.answers


def test_a_full_host_tier_is_back_pressure_and_cannot_deadlock():
    house = House(device=64, host=10, running=8)
    for i in range(3):
        house.submit(str(i), prompt(500, i))
    for i in range(3):
        for _ in range(60):
            house.step()
        assert list(house.answers) == [str(j) for j in range(i + 1)]
        house.scheduler.close(RequestId(str(i)))
    house.check_all_given_back()


def test_without_handover_a_full_host_tier_is_no_obstacle():
    house = House(host=4)
    house.submit("a", prompt(190))
    house.drain()
    house.submit("b", prompt(500, 1), want_handover=False)
    house.drain()
    assert house.answers["b"].handover is None
    house.scheduler.close(RequestId("b"))
    house.scheduler.close(RequestId("a"))
    house.check_all_given_back()


def test_a_first_token_that_ends_the_answer_needs_no_tail():
    house = House()
    house.submit("a", prompt(100), sampling=SamplingParams(max_tokens=1))
    house.drain()
    assert house.answers["a"].finish_reason == "length"
    assert house.answers["a"].handover is None
    assert not any(plan.tails for plan in house.runner.plans)


def test_private_requests_leave_nothing_behind():
    house = House()
    house.submit("a", prompt(200), publish=False)
    house.drain()
    assert len(house.store.leases) == 4
    house.scheduler.close(RequestId("a"))
    house.check_all_given_back()
    assert not house.store.ready
    assert not house.store.announced
    assert house.index.cached_count == 0


def test_a_lost_daemon_delays_the_handover_and_nothing_else():
    house = House()
    house.submit("a", prompt(300))
    house.step()
    house.store.lose()
    for _ in range(10):
        house.step()
    assert not house.answers
    assert house.value("computed_tokens_total") == 300
    house.store.available = True
    house.now_s += 1.0
    house.drain()
    assert len(house.store.leases) == 5
    house.scheduler.close(RequestId("a"))
    house.check_all_given_back()


def test_what_can_never_run_is_refused_at_once():
    house = House(device=8, host=6, running=1, queued=1)
    with pytest.raises(NeverFits, match="device tier has 8"):
        house.submit("a", prompt(512))
    with pytest.raises(NeverFits, match="host tier has 6"):
        house.submit("a", prompt(400))
    with pytest.raises(PromptTooLong, match="10000"):
        house.submit("a", prompt(10_001))
    with pytest.raises(InputError, match="u32"):
        house.submit("a", [])
    with pytest.raises(InputError, match="1000"):
        house.submit("a", [1000])
    with pytest.raises(InputError, match="output_index 3"):
        house.submit("a", [1, 2, 3], output_index=3)
    house.submit("a", [1])
    with pytest.raises(InputError, match="in use"):
        house.submit("a", [1])
    house.submit("b", [1])
    with pytest.raises(CapacityError, match="2 prompts"):
        house.submit("c", [1])


def test_stores_are_spread_over_the_ranks_by_block_index():
    house = House()
    house.submit("a", prompt(300))
    house.drain()
    names = chain(ROOT, np.array(prompt(300), dtype="<u4").tobytes())
    ranks = {s.name: s.rank for plan in house.runner.plans for s in plan.stores}
    assert [ranks[name] for name in names] == [0, 1, 0, 1]
