import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.prefill.deal import deal_rows, index_work, rows_of, spread


def test_spread_at_128k_rows_over_8_ranks():
    positions = np.arange(131072, dtype=np.int64)
    assert spread(index_work(positions, deal_rows(positions, 8), 8)) <= 0.001


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_spread_of_a_4k_chunk_after_a_124k_prefix_beside_short_prompts(ranks):
    positions = np.concatenate([np.arange(126976, 131072), np.arange(64), np.arange(700), np.arange(3)])
    assert spread(index_work(positions, deal_rows(positions, ranks), ranks)) <= 0.03


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2000), max_size=70), st.integers(1, 9))
def test_every_row_has_exactly_one_owner_and_counts_differ_by_at_most_one(positions, ranks):
    owner = deal_rows(np.array(positions, dtype=np.int64), ranks)
    parts = [rows_of(owner, rank) for rank in range(ranks)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(positions)))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert all((np.diff(part) > 0).all() for part in parts)


def test_ties_are_dealt_in_row_order():
    positions = np.zeros(5, dtype=np.int64)
    assert deal_rows(positions, 2).tolist() == [0, 1, 1, 0, 0]
