"""One thing to measure, the floor under it, and the goal it is held to."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from headrace.kernels.bench.measure import Call, Ceilings, Timing


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """The least an implementation must do: floating-point operations by the unit that does them, and bytes that must
    pass through device memory (each input read once, each output written once)."""

    bf16_flop: float = 0.0
    fp8_flop: float = 0.0
    bytes: float = 0.0

    def floor_us(self, ceilings: Ceilings) -> tuple[float, str]:
        """(microseconds below which no version runs, which ceiling says so)."""
        arithmetic = self.bf16_flop / ceilings.bf16 + self.fp8_flop / ceilings.fp8
        memory = self.bytes / ceilings.copy
        if memory >= arithmetic:
            return 1e6 * memory, "copy"
        return 1e6 * arithmetic, "fp8" if self.fp8_flop > self.bf16_flop else "bf16"


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """`build(kernel, device, seed)` makes one input set and returns the call to time; it raises KernelUnsupported where
    a backend has no such entry. `op` names the registry's op whose kernel is built and passed."""

    op: str
    name: str
    build: Callable[[Any, torch.device, int], Call]
    work: Work
    goal_us: float = 0.0
    goal_ratio: float = 0.0
    sets: int = 3
    graph: bool = True
    shape: dict[str, int] = dataclasses.field(default_factory=dict)
    """Sizes of the model, as in KernelContext"""


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """One measured figure, as it goes to JSON."""

    op: str
    name: str
    backend: str
    state: str
    """"burst" or "hot" """
    median_us: float
    p10_us: float
    p90_us: float
    launches: int
    method: str
    tflops: float
    tbytes: float
    floor_us: float
    bound: str
    ratio: float
    """floor over median: 1.0 is the ceiling"""
    goal: str
    met: bool | None


def record(case: Case, backend: str, state: str, timing: Timing, ceilings: Ceilings) -> Record:
    """Put a timing beside the floor of its case."""
    floor, bound = case.work.floor_us(ceilings)
    ratio = floor / timing.median_us
    goal, met = "", None
    if case.goal_us:
        goal, met = f"<= {case.goal_us:g} us", timing.median_us <= case.goal_us
    elif case.goal_ratio:
        goal, met = f">= {case.goal_ratio:.2f} of {bound}", ratio >= case.goal_ratio
    return Record(
        case.op, case.name, backend, state, timing.median_us, timing.p10_us, timing.p90_us, timing.launches,
        timing.method, 1e-6 * (case.work.bf16_flop + case.work.fp8_flop) / timing.median_us,
        1e-6 * case.work.bytes / timing.median_us, floor, bound, ratio, goal, met,
    )  # fmt: skip
