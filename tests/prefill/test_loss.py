"""A rank that dies, a leader that leaves."""

import pytest
import torch

from headrace.errors import RankLost
from headrace.prefill.testing import GroupHouse, make_request, random_prompt


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def test_a_killed_follower_fails_the_requests_and_the_group(tmp_path):
    house = GroupHouse(tmp_path, 2, overrides=["prefill.chunk_tokens=64"])
    future = house.group.submit(make_request(random_prompt(900)))
    house.followers[0].kill()
    with pytest.raises(RankLost):
        future.result(30)
    assert not house.rank.alive
    with pytest.raises(RankLost):
        house.group.submit(make_request(random_prompt(9))).result(1)
    assert house.store.idle
    house.stop()


def test_an_idle_group_notices_a_killed_follower(tmp_path):
    house = GroupHouse(tmp_path, 2)
    house.followers[0].kill()
    house.group._thread.join(5.0)
    assert isinstance(house.group.failure, RankLost)
    house.stop()


def test_a_failing_follower_is_named_with_its_traceback(tmp_path):
    house = GroupHouse(tmp_path, 2)
    # A slot outside the pool: every rank refuses it, in its own way.
    request = make_request(random_prompt(9))
    house.rank.pool.zero = lambda slots: None
    house.group._scheduler._index._free.clear()
    house.group._scheduler._index._free.append(10**6)
    with pytest.raises(RankLost):
        house.group.submit(request).result(30)
    house.stop()
