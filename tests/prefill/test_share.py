from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.prefill.share import share_rows


def test_one_prompt_gets_all():
    assert share_rows([1000], 512, 1) == [512]
    assert share_rows([100], 512, 1) == [100]


def test_a_short_prompt_behind_a_long_one_is_served_at_once():
    assert share_rows([1_000_000, 100], 512, 2) == [384, 100]
    assert share_rows([1_000_000, 200_000, 100], 512, 2) == [256, 128, 100]


def test_a_budget_of_one_block_alternates():
    given_rows = [share_rows([6400, 640], 64, step) for step in (1, 2)]
    assert given_rows == [[64, 0], [0, 64]]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 5000), max_size=12), st.integers(1, 32), st.integers(0, 9))
def test_shares_are_whole_blocks_within_the_budget_and_nothing_is_wasted(remaining, budget_blocks, step):
    shares = share_rows(remaining, budget_blocks * 64, step)
    blocks = [-(-share // 64) for share in shares]
    assert all(share == rows or (share % 64 == 0 and share < rows) for share, rows in zip(shares, remaining))
    assert sum(blocks) == min(budget_blocks, sum(-(-rows // 64) for rows in remaining))
