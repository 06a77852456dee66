"""How long things take: a prefill cost table and link speeds, measured by somebody and given.

    prefill seconds = fixed + new tokens x token + new tokens x mean context x context

Mean context is what a new token looks back on: cached tokens plus half of the new ones.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from headrace.errors import InputError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCosts:
    fixed_s: float
    token_s: float
    context_s: float

    def seconds(self, new_tokens: int, cached_tokens: int) -> float:
        context = cached_tokens + new_tokens / 2
        return self.fixed_s + new_tokens * (self.token_s + context * self.context_s)


def fit(points: Sequence[tuple[int, int, float]]) -> PrefillCosts:
    """Least squares through (new tokens, cached tokens, seconds), no coefficient below zero: a negative one is set to
    zero and the rest fitted again. Raises InputError for fewer than three points."""
    if len(points) < 3:
        raise InputError(f"a cost table needs at least 3 points of (new, cached, seconds), got {len(points)}")
    rows = np.array([[1.0, new, new * (cached + new / 2)] for new, cached, _ in points])
    seconds = np.array([point[2] for point in points], dtype=np.float64)
    used = [0, 1, 2]
    while used:
        # Relative weights: a short prompt counts as much as a long one. Columns are scaled, they span ten decades.
        scale = np.abs(rows[:, used]).max(axis=0) / seconds.max()
        weights = 1.0 / np.maximum(seconds, 1e-6)
        found = np.linalg.lstsq(rows[:, used] / scale * weights[:, None], seconds * weights, rcond=None)[0] / scale
        if (found >= 0).all():
            break
        used.pop(int(found.argmin()))
    values = dict.fromkeys(range(3), 0.0) | dict(zip(used, map(float, found)))
    return PrefillCosts(fixed_s=values[0], token_s=values[1], context_s=values[2])


def load(path: str) -> PrefillCosts:
    """A JSON list of [new tokens, cached tokens, seconds]. Raises InputError."""
    try:
        points = [(int(new), int(cached), float(s)) for new, cached, s in json.loads(Path(path).read_text())]
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path} is not a list of [new tokens, cached tokens, seconds]: {error}") from error
    return fit(points)
