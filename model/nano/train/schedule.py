"""The two schedules of training: the kind of the next step and the learning rate, by the share of the budget spent.

`FIRST` makes a model from nothing; `SECOND` goes on from its weights and makes it fit for long contexts.
"""

from dataclasses import dataclass
from functools import cached_property

from headrace.model.nano.train.layers import Mode


@dataclass(frozen=True)
class Stage:
    """One kind of step; lengths are tokens. `weight`: steps of this kind in a round of its phase."""

    name: str
    sequences: int
    length: int
    mode: Mode
    compiled: bool = False  # worth it only for what takes much longer than the compile time
    indexers_only: bool = False
    chain_share: float = 0.5
    weight: int = 1


@dataclass(frozen=True)
class Phase:
    """Until the share `until` of the budget, its stages take turns."""

    until: float
    stages: tuple[Stage, ...]

    @cached_property
    def round(self) -> tuple[Stage, ...]:
        """One round of steps, each stage spread evenly over it."""
        turns = [((k + 0.5) / s.weight, i, s) for i, s in enumerate(self.stages) for k in range(s.weight)]
        return tuple(stage for _, _, stage in sorted(turns, key=lambda turn: turn[:2]))


@dataclass(frozen=True)
class Schedule:
    """`peak` rate after a linear warm-up, held until `decay_from`, then falling linearly to `floor` times the peak."""

    phases: tuple[Phase, ...]
    peak: float
    decay_from: float
    floor: float
    warm_up: float = 0.01

    @property
    def stages(self) -> list[Stage]:
        return [stage for phase in self.phases for stage in phase.stages]

    def stage_at(self, progress: float, step: int) -> Stage:
        """The stage of a step at a share of the budget in [0, 1]."""
        phase = next((phase for phase in self.phases if progress < phase.until), self.phases[-1])
        return phase.round[step % len(phase.round)]

    def rate_at(self, progress: float) -> float:
        if progress < self.warm_up:
            return self.peak * max(progress / self.warm_up, 0.02)
        left = min(1.0, (1.0 - progress) / (1.0 - self.decay_from))
        return self.peak * max(left, self.floor)


def _alone(until: float, stage: Stage) -> Phase:
    return Phase(until, (stage,))


SPARSE = Mode(sparse=True, fp8_weights=True, fp8_activations=True, distil_rows=32, draft_steps=4, soft_drafts=True)
FIRST = Schedule(
    (
        # Dense attention; the MTP layer learns two chained steps from the text.
        _alone(0.565, Stage("dense", 64, 2048, Mode(draft_steps=2), compiled=True)),
        _alone(0.60, Stage("dense-8k", 16, 8192, Mode(draft_steps=2))),
        _alone(0.63, Stage("dense-32k", 4, 32768, Mode(draft_steps=1))),
        # Indexers learn where dense attention looks, everything else is frozen.
        _alone(0.665, Stage("distil-2k", 32, 2048, Mode(distil_rows=128, draft_steps=4), False, True, 1.0)),
        _alone(0.685, Stage("distil-32k", 4, 32768, Mode(distil_rows=256, draft_steps=1), False, True, 1.0)),
        # Everything learns with the selection on and through FP8, drafts learn the main model's distribution.
        _alone(0.97, Stage("sparse", 64, 2048, SPARSE, compiled=True)),
        _alone(1.0, Stage("sparse-8k", 8, 8192, SPARSE)),
    ),
    peak=8e-3,
    decay_from=0.40,
    floor=0.02,
)

# Every step is through FP8 from here on. Lengths and attention forms are mixed in each phase, because what one stage
# taught about long contexts the next one, at 2,048 tokens, unlearned. Dense steps at 32K are eight times cheaper than
# sparse ones; the concentration loss is what makes the two alike.
DENSE = Mode(fp8_weights=True, fp8_activations=True, draft_steps=4, soft_drafts=True)
LONG = Mode(fp8_weights=True, fp8_activations=True, distil_rows=128, draft_steps=2, soft_drafts=True, concentrate=True)
TIGHT = Mode(
    sparse=True, fp8_weights=True, fp8_activations=True, distil_rows=32, draft_steps=4, soft_drafts=True,
    concentrate=True,
)  # fmt: skip
SECOND = Schedule(
    (
        Phase(
            0.45,
            (
                Stage("dense", 64, 2048, DENSE, compiled=True, weight=8),
                Stage("dense-32k", 2, 32768, LONG, weight=3),
                Stage("sparse", 64, 2048, TIGHT, compiled=True, weight=2),
            ),
        ),
        Phase(
            1.0,
            (
                Stage("sparse", 64, 2048, TIGHT, compiled=True, weight=8),
                Stage("dense-32k", 2, 32768, LONG, weight=3),
                Stage("sparse-8k", 4, 8192, TIGHT, weight=1),
                Stage("sparse-32k", 1, 32768, TIGHT, weight=1),
            ),
        ),
    ),
    peak=4e-3,
    decay_from=0.30,
    floor=0.0,
)
SCHEDULES = {"first": FIRST, "second": SECOND}
