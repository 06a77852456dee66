"""Real groups: gloo processes, real plan streams, the tiny model. Bytes and tokens equal to the reference engine's."""

import pytest
import torch

from headrace.errors import Cancelled
from headrace.model.testing import tiny_model
from headrace.prefill.testing import GroupHouse, make_request, mono_reference, random_prompt

LENGTHS = [1, 2, 3, 63, 64, 65, 127, 128, 129, 300]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module", params=[2, 3], ids=["cp2", "cp3"])
def house(request, tmp_path_factory):
    house = GroupHouse(tmp_path_factory.mktemp("group"), request.param, overrides=["prefill.chunk_tokens=128"])
    yield house
    house.stop()
    assert [process.exitcode for process in house.followers] == [0] * len(house.followers)


@pytest.mark.parametrize("length", LENGTHS)
def test_bytes_and_handover_equal_the_reference_engine(house, model, length):
    tokens = random_prompt(length, length)
    answer = house.run(tokens)
    expected = mono_reference(model, tokens)
    assert answer.first_token == expected.first_token
    assert answer.handover.draft_tokens == expected.draft_tokens
    assert answer.handover.mtp_hidden == expected.mtp_hidden
    assert answer.handover.index_seed == expected.index_seed
    assert house.slabs(tokens, answer) == expected.slabs
    house.group.close(answer.request_id).result(10)
    warm = house.run(tokens)
    assert warm.cached_tokens == {"device": min(64 * (length // 64), length - 1), "host": 0}
    assert warm.first_token == expected.first_token
    assert warm.handover.draft_tokens == expected.draft_tokens
    assert house.slabs(tokens, warm) == expected.slabs
    house.group.close(warm.request_id).result(10)
    assert house.store.idle


def test_concurrent_prompts_with_a_common_prefix_compute_it_once(house, model):
    before = house.group.status()["computed_tokens_total"]
    shared = random_prompt(192, 77)
    prompts = [shared + random_prompt(10 + i, i) for i in range(3)]
    futures = [house.group.submit(make_request(tokens)) for tokens in prompts]
    answers = [future.result(60) for future in futures]
    for tokens, answer in zip(prompts, answers):
        assert house.slabs(tokens, answer) == mono_reference(model, tokens).slabs
        house.group.close(answer.request_id).result(10)
    assert house.group.status()["computed_tokens_total"] - before == 192 + 10 + 11 + 12
    assert house.store.idle


def test_a_cancelled_prompt_is_gone_within_a_step(house):
    request = make_request(random_prompt(800, 5))
    future = house.group.submit(request)
    house.group.close(request.request_id).result(10)
    with pytest.raises(Cancelled):
        future.result(1)
    assert house.store.idle
    status = house.group.status()
    assert status["device_free_blocks"] == status["device_blocks"]
