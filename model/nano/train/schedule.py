"""The stages of training and the learning rate, both as functions of the share of the time budget that is spent."""

from dataclasses import dataclass

from headrace.model.nano.train.layers import Mode

WARM_UP, DECAY_FROM, FLOOR = 0.01, 0.40, 0.02


@dataclass(frozen=True)
class Stage:
    """`until` is the share of the budget at which the stage ends; lengths are tokens."""

    name: str
    until: float
    sequences: int
    length: int
    mode: Mode
    compiled: bool = False  # worth it only for stages much longer than the compile time
    indexers_only: bool = False
    chain_share: float = 0.5


SPARSE = Mode(sparse=True, fp8_weights=True, fp8_activations=True, distil_rows=32, draft_steps=4, soft_drafts=True)
STAGES = (
    # Dense attention; the MTP layer learns two chained steps from the text.
    Stage("dense", 0.565, 64, 2048, Mode(draft_steps=2), compiled=True),
    Stage("dense-8k", 0.60, 16, 8192, Mode(draft_steps=2)),
    Stage("dense-32k", 0.63, 4, 32768, Mode(draft_steps=1)),
    # Indexers learn where dense attention looks, everything else is frozen.
    Stage("distil-2k", 0.665, 32, 2048, Mode(distil_rows=128, draft_steps=4), indexers_only=True, chain_share=1.0),
    Stage("distil-32k", 0.685, 4, 32768, Mode(distil_rows=256, draft_steps=1), indexers_only=True, chain_share=1.0),
    # Everything learns with the selection on and through FP8, drafts learn the main model's distribution.
    Stage("sparse", 0.97, 64, 2048, SPARSE, compiled=True),
    Stage("sparse-8k", 1.0, 8, 8192, SPARSE),
)


def stage_at(progress: float) -> Stage:
    """The stage at a share of the budget in [0, 1]."""
    return next((stage for stage in STAGES if progress < stage.until), STAGES[-1])


def rate_at(progress: float, peak: float) -> float:
    """Linear warm-up, constant, then linear decay to a small floor."""
    if progress < WARM_UP:
        return peak * max(progress / WARM_UP, 0.02)
    left = min(1.0, (1.0 - progress) / (1.0 - DECAY_FROM))
    return peak * max(left, FLOOR)
