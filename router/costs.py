"""What a placement is predicted to take, learnt from what placements took. Pure arithmetic, seconds and blocks.

prefill time = fixed + new tokens x compute + restored blocks x restore + blocks of those that come from disk or another
node x promote; all rates are fitted online from PrefillDone.
The start values only matter until the first few prompts; they are a CPU running the nano model.
"""

import dataclasses
import math

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


class LineFit:
    """y = fixed + slope * x by recursive least squares with forgetting, never negative."""

    def __init__(self, fixed: float, slope: float, typical_x: float) -> None:
        # The start line as two weighted observations, at 0 and at the typical x.
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        for x in (0.0, typical_x):
            self._add(x, fixed + slope * x, PRIOR_WEIGHT)
        self.fixed, self.slope = fixed, slope

    def _add(self, x: float, y: float, weight: float) -> None:
        self._n += weight
        self._x += weight * x
        self._y += weight * y
        self._xx += weight * x * x
        self._xy += weight * x * y

    def learn(self, x: float, y: float) -> None:
        if not (math.isfinite(x) and math.isfinite(y)) or x < 0 or y < 0:
            return
        for name in ("_n", "_x", "_y", "_xx", "_xy"):
            setattr(self, name, getattr(self, name) * FORGET)
        self._add(x, y, 1.0)
        spread = self._n * self._xx - self._x * self._x
        slope = (self._n * self._xy - self._x * self._y) / spread if spread > 1e-9 * self._n * self._xx else 0.0
        slope = max(0.0, slope)
        fixed = max(0.0, (self._y - slope * self._x) / self._n)
        if fixed == 0.0 and self._xx > 0.0:
            slope = self._xy / self._xx
        self.fixed, self.slope = fixed, slope

    def predict(self, x: float) -> float:
        return self.fixed + self.slope * x


@dataclasses.dataclass(frozen=True, slots=True)
class PromptWork:
    """What one prefill group would have to do for one prompt."""

    new_tokens: int
    restore_blocks: int
    promote_blocks: int = 0
    """Of those, how many have to come up from below the host tier first."""


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
        return self.compute.predict(work.new_tokens) + moved_s

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
        self.compute.learn(work.new_tokens, compute_s)
        if work.promote_blocks and restore_s >= 0:
            promoting_s = max(0.0, restore_s - self.restore_s * work.restore_blocks)
            self.promote_s += (1 - FORGET) * 5 * (promoting_s / work.promote_blocks - self.promote_s)
        elif work.restore_blocks and restore_s >= 0:
            self.restore_s += (1 - FORGET) * 5 * (restore_s / work.restore_blocks - self.restore_s)

    def learn_step(self, step_s: float) -> None:
        """Seconds between two deliveries of one sequence."""
        self.step_s += (1 - FORGET) * (step_s - self.step_s)
