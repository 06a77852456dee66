"""What a placement is predicted to take, learnt from what placements took. Pure arithmetic, seconds and blocks.

prefill time = fixed + new tokens x (compute + context x attend) + restored blocks x restore + blocks of those that come
from disk or another node x promote; fitted online from PrefillDone. `context` is how many tokens a new token looks back
over, on average: a hit and half of what is new. The start values only matter until the first prompts; they are a CPU
running the nano model.
"""

import dataclasses
import math

import numpy as np

START_FIXED_S = 0.02
"""Seconds of a prompt that has nothing to compute."""
START_COMPUTE_S = 1e-3
"""Seconds per new prompt token."""
START_RESTORE_S = 1e-3
"""Seconds per block of 64 tokens restored from the host tier to a device."""
START_PROMOTE_S = 4e-3
"""Seconds per block that first has to come from below the host tier: 3.5 MB from a disk of 0.9 GB/s."""
START_STEP_S = 0.02
"""Seconds of one decode step."""
FORGET = 0.98
"""Weight of the past per observation: about the last 50 prompts count."""
PRIOR_WEIGHT = 3.0
"""The start values count as so many observations."""
ERROR_SMOOTHING = 0.05
"""Share of the newest observation in the exported error."""
TYPICAL_CONTEXT = 32768.0
"""Tokens; scales the fit, so that its numbers are of one size."""


class LineFit:
    """y = fixed + x * (slope + context * context_slope), by least squares with forgetting, no coefficient negative."""

    def __init__(self, fixed: float, slope: float, typical_x: float, context_slope: float = 0.0) -> None:
        self._x = typical_x
        self._left, self._right = np.zeros((3, 3)), np.zeros(3)
        self.fixed, self.slope, self.context_slope = fixed, slope, context_slope
        # The start plane as weighted observations.
        for x, context in ((0.0, 0.0), (typical_x, 0.0), (typical_x, TYPICAL_CONTEXT)):
            self._add(x, context, self.predict(x, context), PRIOR_WEIGHT)

    def _add(self, x: float, context: float, y: float, weight: float) -> None:
        row = np.array([1.0, x / self._x, x / self._x * context / TYPICAL_CONTEXT])
        self._left += weight * np.outer(row, row)
        self._right += weight * row * y

    def learn(self, x: float, y: float, context: float = 0.0) -> None:
        if not all(math.isfinite(v) and v >= 0 for v in (x, y, context)):
            return
        self._left *= FORGET
        self._right *= FORGET
        self._add(x, context, y, 1.0)
        fixed, slope, bend = self._solve()
        self.fixed, self.slope = fixed, slope / self._x
        self.context_slope = bend / self._x / TYPICAL_CONTEXT

    def _solve(self) -> list[float]:
        """The plane, without the terms that would come out negative."""
        kept = [0, 1, 2]
        # A little weight on zero for directions that nobody has seen.
        ridge = np.eye(3) * 1e-9 * np.trace(self._left)
        while kept:
            at = np.ix_(kept, kept)
            found = np.linalg.solve(self._left[at] + ridge[at], self._right[kept])
            if (found >= 0).all():
                plane = [0.0, 0.0, 0.0]
                for i, value in zip(kept, found.tolist()):
                    plane[i] = value
                return plane
            kept.pop(int(found.argmin()))
        return [0.0, 0.0, 0.0]

    def predict(self, x: float, context: float = 0.0) -> float:
        return self.fixed + x * (self.slope + context * self.context_slope)


@dataclasses.dataclass(frozen=True, slots=True)
class PromptWork:
    """What one prefill group would have to do for one prompt."""

    new_tokens: int
    restore_blocks: int
    promote_blocks: int = 0
    """Of those, how many have to come up from below the host tier first."""
    cached_tokens: int = 0

    @property
    def context(self) -> float:
        """Tokens a new token looks back over, on average."""
        return self.cached_tokens + self.new_tokens / 2


class CostModel:
    """One for all groups of a pool: they run on equal machines."""

    def __init__(self) -> None:
        self.compute = LineFit(START_FIXED_S, START_COMPUTE_S, 2048.0)
        self.restore_s = START_RESTORE_S
        self.promote_s = START_PROMOTE_S
        self.step_s = START_STEP_S
        self.error = 0.0
        """Smoothed |predicted - measured| / measured of the prefill time (queue not counted)."""
        self.observations = 0

    def prefill_s(self, work: PromptWork) -> float:
        moved_s = self.restore_s * work.restore_blocks + self.promote_s * work.promote_blocks
        return self.compute.predict(work.new_tokens, work.context) + moved_s

    def decode_s(self, missing_blocks: int, sequences: int) -> float:
        """Until the second token: pull what the rank lacks, then one step among `sequences` others."""
        return self.restore_s * missing_blocks + self.step_s * (1 + 0.1 * sequences)

    def learn_prefill(self, predicted_s: float, work: PromptWork, restore_s: float, compute_s: float) -> None:
        """What a prompt really took."""
        measured = restore_s + compute_s
        if measured > 0:
            share = ERROR_SMOOTHING if self.observations else 1.0
            self.error += share * (abs(predicted_s - measured) / measured - self.error)
        self.observations += 1
        self.compute.learn(work.new_tokens, compute_s, work.context)
        if work.promote_blocks and restore_s >= 0:
            promoting_s = max(0.0, restore_s - self.restore_s * work.restore_blocks)
            self.promote_s += (1 - FORGET) * 5 * (promoting_s / work.promote_blocks - self.promote_s)
        elif work.restore_blocks and restore_s >= 0:
            self.restore_s += (1 - FORGET) * 5 * (restore_s / work.restore_blocks - self.restore_s)

    def learn_step(self, step_s: float) -> None:
        """Seconds between two deliveries of one sequence."""
        self.step_s += (1 - FORGET) * (step_s - self.step_s)
