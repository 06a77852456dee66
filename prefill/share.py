"""Who gets the rows of a step. Pure arithmetic over block counts.

Half of a step goes to the oldest prompts, half to those with the least left to compute: a long prompt always moves on
at half speed at least, a short one never waits for a long one to finish, and nobody waits for ever, since every prompt
becomes the oldest at some time. What one half cannot use the other half gets.
"""

from collections.abc import Sequence

from headrace.kernels.formats import BLOCK_TOKENS


def share_rows(remaining: Sequence[int], budget_rows: int, step: int) -> list[int]:
    """`remaining[i]` rows are left of prompt i, prompts in order of age. Returns rows for each: a multiple of 64, or
    all that is left. The sum of the rows, each rounded up to whole blocks, is at most `budget_rows`. A prompt with
    nothing left to write (it needs its query-only row) takes no share."""
    blocks = [-(-rows // BLOCK_TOKENS) for rows in remaining]
    budget = budget_rows // BLOCK_TOKENS
    given = [0] * len(blocks)
    # An odd block changes sides every step, so that a one-block budget serves both.
    by_age = range(len(blocks))
    by_size = sorted(by_age, key=lambda i: (blocks[i], i))
    half = (budget + step % 2) // 2
    left = budget - half + _hand_out(by_age, half, blocks, given)
    left = _hand_out(by_size, left, blocks, given)
    _hand_out(by_age, left, blocks, given)
    return [min(rows, share * BLOCK_TOKENS) for rows, share in zip(remaining, given)]


def _hand_out(order: Sequence[int], blocks: int, wanted: Sequence[int], given: list[int]) -> int:
    """Give `blocks` in this order; returns what nobody wanted."""
    for i in order:
        take = min(blocks, wanted[i] - given[i])
        given[i] += take
        blocks -= take
    return blocks
