"""Random mixes of prompts, cancellations, small tiers, corrupt blocks and lost daemons: everything comes back."""

import random

import pytest

from headrace.errors import CapacityError
from headrace.ids import RequestId
from headrace.kvstore.names import chain, token_bytes
from headrace.messages import SamplingParams
from headrace.prefill.fake import ROOT, House


@pytest.mark.parametrize("seed", range(12))
def test_after_200_mixed_prompts_with_random_aborts_everything_is_free(seed):
    dice = random.Random(seed)
    device, host = dice.randint(14, 40), dice.randint(14, 60)
    house = House(device=device, host=host, chunk=64 * dice.randint(1, 6), running=dice.randint(1, 8), ranks=3)
    shared = dice.choices(range(1000), k=400)
    live, finished = [], 0
    for number in range(200):
        tokens = shared[: dice.choice([0, 64, 130, 400])] + dice.choices(range(1000), k=dice.randint(1, 300))
        name = str(number)
        if dice.random() < 0.02:
            house.runner.bad.update(chain(ROOT, token_bytes(tokens))[:1])
        try:
            house.submit(
                name,
                tokens,
                priority=dice.randint(0, 1),
                sampling=SamplingParams(max_tokens=dice.choice([1, 2, 50])),
                publish=dice.random() < 0.8,
                want_handover=dice.random() < 0.8,
            )
            live.append(name)
        except CapacityError:
            pass
        for _ in range(dice.randint(0, 3)):
            house.step()
            assert house.index.check_integrity() == []
        for other in list(live):
            if (other in house.answers and dice.random() < 0.4) or dice.random() < 0.05:
                finished += other in house.answers
                house.scheduler.close(RequestId(other))
                live.remove(other)
        if dice.random() < 0.01:
            house.store.lose()
        if not house.store.available and dice.random() < 0.3:
            house.store.available = True
            house.now_s += 1.0
    house.store.available = True
    house.now_s += 1.0
    for _ in range(2000):
        if not live:
            break
        house.step()
        for other in [name for name in live if name in house.answers]:
            house.scheduler.close(RequestId(other))
            live.remove(other)
    assert not live, "a prompt was never answered"
    assert finished
    house.drain()
    house.check_all_given_back()
    assert house.value("device_free_blocks") == device
    house.scheduler.flush()
    assert house.index.free_count == device
    assert house.store.announced == set()
