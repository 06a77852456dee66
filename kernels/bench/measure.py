"""Time on a GPU: medians by events over several input sets, and the ceilings of the card in the same run.

A call of 200 us or more is timed by events around every launch, with the queue filled behind a spinning kernel so that
the host's time never shows; a shorter one as a CUDA graph of at least 20 launches, divided. *Burst* figures start on a
card that has rested; *hot* ones after more than a second of the same kernel, when the power limit holds clocks down.
"""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]
REST_S = 0.25
HOT_S = 1.2
LEAST_LAUNCHES = 20
GRAPH_BELOW_US = 200.0
BUDGET_US = 60_000.0
SPIN_CYCLES = 20_000_000
"""About 10 ms: longer than it takes the host to queue a benchmark's launches"""


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds a launch."""

    median_us: float
    p10_us: float
    p90_us: float
    launches: int
    method: str
    """"events" or "graph" """


@dataclasses.dataclass(frozen=True, slots=True)
class Ceilings:
    """What the card reaches on large plain problems: bytes (read plus written) and FLOP a second."""

    copy: float
    bf16: float
    fp8: float


def summary(samples: Sequence[float], launches: int, method: str) -> Timing:
    """Median and the 10th and 90th percentile of microseconds a launch."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    return Timing(
        statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)], launches, method
    )  # fmt: skip


def time_calls(calls: Sequence[Call], hot: bool = False, graph: bool = True, budget_us: float = BUDGET_US) -> Timing:
    """Median time of one call; `calls` do the same work on different inputs. `graph`: the calls neither read a number
    back from the device nor depend on host state, so short ones may be captured."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    guess = statistics.median(_by_events(calls, 5))
    if hot:
        _heat(calls, guess)
    else:
        time.sleep(REST_S)
    if graph and guess < GRAPH_BELOW_US:
        return _by_graph(calls, guess, budget_us, hot)
    launches = max(LEAST_LAUNCHES, min(200, int(budget_us / max(guess, 1.0))))
    return summary(_by_events(calls, launches), launches, "events")


def _by_events(calls: Sequence[Call], launches: int) -> list[float]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(launches + 1)]
    torch.cuda._sleep(SPIN_CYCLES)
    for i in range(launches):
        marks[i].record()
        calls[i % len(calls)]()
    marks[-1].record()
    torch.cuda.synchronize()
    return [1e3 * before.elapsed_time(after) for before, after in itertools.pairwise(marks)]


def _by_graph(calls: Sequence[Call], guess: float, budget_us: float, hot: bool) -> Timing:
    launches = -(-LEAST_LAUNCHES // len(calls)) * len(calls)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for i in range(launches):
            calls[i % len(calls)]()
    captured.replay()
    torch.cuda.synchronize()
    if not hot:
        time.sleep(REST_S)
    replays = max(10, min(50, int(budget_us / max(guess * launches, 1.0))))
    samples = [t / launches for t in _by_events([captured.replay], replays)]
    return summary(samples, replays * launches, "graph")


def _heat(calls: Sequence[Call], guess_us: float) -> None:
    end = time.monotonic() + HOT_S
    together = max(1, int(50_000 / max(guess_us, 1.0)))
    while time.monotonic() < end:
        for i in range(together):
            calls[i % len(calls)]()
        torch.cuda.synchronize()


def _time_copy(words: int, device: torch.device, hot: bool) -> tuple[Timing, float]:
    source = torch.randn(words, device=device)
    target = torch.empty_like(source)
    return time_calls([lambda: target.copy_(source)], hot), 2.0 * source.numel() * source.element_size()


def measure_ceilings(device: torch.device, hot: bool = False) -> Ceilings:
    """A copy of 4.3 GB; products of 8192^3 in bf16, and in e4m3 with a scale a row and fast accumulation."""
    n = 8192
    copy, moved = _time_copy(n * n * 8, device, hot)
    a, b = (torch.randn(n, n, device=device).bfloat16() for _ in range(2))
    bf16 = time_calls([lambda: a @ b, lambda: b @ a], hot)
    codes = [(torch.randn(n, n, device=device) * 100).clamp(-448, 448).to(torch.float8_e4m3fn) for _ in range(2)]
    rows, columns = torch.rand(n, 1, device=device) + 0.5, torch.rand(1, n, device=device) + 0.5

    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(left, right.t(), rows, columns, out_dtype=torch.bfloat16, use_fast_accum=True)

    fp8 = time_calls([lambda: product(codes[0], codes[1]), lambda: product(codes[1], codes[0])], hot)
    flop = 2.0 * n**3
    return Ceilings(1e6 * moved / copy.median_us, 1e6 * flop / bf16.median_us, 1e6 * flop / fp8.median_us)
