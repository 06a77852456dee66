"""The draft length follows measured acceptance and load."""

import random

import pytest

from headrace.decode.draft_length import DraftLength


def run(length: DraftLength, *, sequences: int, acceptance: list[float], cost, steps: int = 600, seed: int = 0) -> None:
    """Drive it as a rank does, with step times `cost(rows, drafts)` and 5% noise."""
    rng = random.Random(seed)
    drafts = length.most
    for _ in range(steps):
        for _ in range(sequences):
            kept = 0
            while kept < drafts and rng.random() < acceptance[kept]:
                kept += 1
            length.accepted(drafts, kept)
        phases = (sequences * (1 + drafts), max(0, drafts - 1))
        length.took(*phases, cost(*phases) * rng.uniform(0.95, 1.05))
        drafts = length.choose(sequences)


def best(sequences: int, acceptance: list[float], cost) -> int:
    def speed(n: int) -> float:
        total, chance = 1.0, 1.0
        for share in acceptance[:n]:
            chance *= share
            total += chance
        return total / cost(sequences * (1 + n), max(0, n - 1))

    return max(range(len(acceptance) + 1), key=speed)


def memory_bound(rows: int, drafts: int) -> float:
    return 20e-3 + 0.01e-3 * rows + 0.5e-3 * drafts


def compute_bound(rows: int, drafts: int) -> float:
    return 1e-3 + 0.2e-3 * rows + 0.5e-3 * drafts


@pytest.mark.parametrize(
    ("acceptance", "cost", "sequences"),
    [
        ([0.85, 0.8, 0.75, 0.7], memory_bound, 4),
        ([0.85, 0.8, 0.75, 0.7], compute_bound, 64),
        ([0.3, 0.2, 0.1, 0.1], memory_bound, 4),
        ([0.3, 0.2, 0.1, 0.1], compute_bound, 64),
        ([0.0, 0.0, 0.0, 0.0], compute_bound, 8),
    ],
)
def test_the_length_that_pays_most_is_found(acceptance, cost, sequences):
    length = DraftLength(4)
    run(length, sequences=sequences, acceptance=acceptance, cost=cost)
    wanted = best(sequences, acceptance, cost)
    assert abs(length.current - wanted) <= 1, (length.current, wanted)
    assert (length.current == 0) == (wanted == 0)


def test_it_comes_back_when_the_load_goes():
    length = DraftLength(4)
    good = [0.9, 0.85, 0.8, 0.75]

    def cost(rows: int, drafts: int) -> float:
        return max(20e-3, 0.4e-3 * rows) + 0.3e-3 * drafts

    run(length, sequences=2, acceptance=good, cost=cost, seed=3)
    alone = length.current
    run(length, sequences=200, acceptance=good, cost=cost, seed=3)
    crowded = length.current
    run(length, sequences=2, acceptance=good, cost=cost, seed=3)
    assert alone >= 3
    assert crowded < alone
    assert length.current >= 3


def test_acceptance_is_conditional_and_a_new_rank_starts_at_full_length():
    length = DraftLength(3)
    assert length.choose(1) == 3
    for _ in range(2000):
        length.accepted(3, 1)
    first, second, _third = length.acceptance()
    assert (round(first, 2), round(second, 2)) == (1.0, 0.0)
    assert length._tried[2] == 2.0, "the third was never reached"
    assert DraftLength(0).choose(5) == 0
