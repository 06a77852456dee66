"""The frequency sketch against true counts."""

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from headrace.kvstore.names import private_name
from headrace.kvstore.policies.sketch import CountSketch


def name(number):
    return random.Random(number).randbytes(32)


@given(st.lists(st.integers(0, 30), max_size=200))
def test_an_estimate_is_never_below_the_true_count(uses):
    sketch, truth = CountSketch(64), Counter()
    for number in uses:
        truth[number] += 1
        sketch.add([name(number)])
    for number, count in truth.items():
        assert sketch.estimate([name(number)])[0] >= count


def test_a_block_that_was_never_seen_is_rarely_admitted():
    sketch = CountSketch(1000)
    sketch.add([name(i) for i in range(1000)])
    strangers = sketch.estimate([name(i) for i in range(10_000, 20_000)])
    assert (strangers >= 1).mean() < 0.02
    assert (sketch.estimate([name(i) for i in range(1000)]) >= 2).mean() < 0.02


def test_old_popularity_fades():
    sketch = CountSketch(64)
    for _ in range(8):
        sketch.add([name(0)])
    assert sketch.estimate([name(0)])[0] == 8
    for i in range(2000):
        sketch.add([name(1 + i)])
    assert sketch.estimate([name(0)])[0] < 8


def test_counters_do_not_overflow_and_a_batch_counts_once_a_name():
    sketch = CountSketch(10_000)
    for _ in range(300):
        sketch.add([name(0), name(0)])
    assert sketch.estimate([name(0)])[0] == 255
    assert sketch.add([]).tolist() == []


def test_private_names_are_told_apart():
    sketch, first = CountSketch(64), private_name()
    sketch.add([first])
    assert sketch.estimate([private_name()])[0] == 0
