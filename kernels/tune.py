"""Finding launch shapes of the Triton kernels on the device at hand: every candidate is compiled, held against the
result of the default, timed, and the fastest goes into a table (`kernels/tables/triton-<op>.<arch>.json`)."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.kernels import tuned
from headrace.kernels.cases import Case, cases_of, disagreements
from headrace.kernels.launch import Tile, architecture
from headrace.kernels.registry import Registry, default_registry

Timer = Callable[[Callable[[], object]], float]
"""Median microseconds of a call"""
TUNABLE = ("linear", "experts", "sparse_mla", "index_topk")


def candidates(op: str, target: str) -> list[Tile]:
    """Launch shapes worth trying. AMD's waves are twice as wide as warps, and its stages come out of little LDS."""
    amd = target.startswith("gfx")
    warps, stages = ((2, 4, 8), (1, 2)) if amd else ((4, 8), (2, 3, 4))
    m, n = {
        "linear": ((32, 64, 128), (32, 64, 128)),
        "experts": ((32, 64, 128), (128,)),
        "sparse_mla": ((16, 32, 64), (16, 32, 64)),
        "index_topk": ((1, 2, 4), (64, 128, 256)),
    }[op]
    return [Tile(*shape) for shape in itertools.product(m, n, warps, stages)]


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """One candidate on one problem; `us` is None when it was not usable, and `text` says why."""

    op: str
    case: str
    tile: Tile
    us: float | None
    text: str = ""


@dataclasses.dataclass(slots=True)
class Tuning:
    """What one run found."""

    tables: list[tuned.Table]
    trials: list[Trial]

    def best(self, op: str, case: str) -> Trial | None:
        timed = [t for t in self.trials if (t.op, t.case) == (op, case) and t.us is not None]
        return min(timed, key=lambda t: t.us or 0.0) if timed else None


class _Caught:
    """A kernel that remembers its last call, so that it can be repeated on the same inputs."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.again: Callable[[], Any] = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.again = lambda: self._kernel(*args, **options)
        return self.again()


def tune(
    device: torch.device,
    ops: Sequence[str] = (),
    tiny: bool = False,
    tiles: Sequence[Tile] = (),
    timer: Timer | None = None,
    source: str = "",
    registry: Registry | None = None,
) -> Tuning:
    """Tune ops on a device. `tiles`: instead of each op's candidates. Nothing is written: see `save`."""
    found = Tuning([], [])
    registry, timer, target = registry or default_registry(), timer or device_timer, architecture(device)
    for op in ops or TUNABLE:
        entries: list[tuned.Entry] = []
        for case in cases_of(op, tiny):
            kernel = _Caught(registry.backend(op, "triton").create(case.context(device, False)))
            entries += _tune_case(case, kernel, device, tiles or candidates(op, target), timer, found)
        if entries:
            found.tables.append(tuned.Table(f"triton-{op}", target, tuned.MEASURED, source, tuple(entries)))
    return found


def _tune_case(
    case: Case, kernel: _Caught, device: torch.device, tiles: Sequence[Tile], timer: Timer, found: Tuning
) -> Iterator[tuned.Entry]:
    with tuned.asked() as asked:
        wanted = case.results(kernel, device)
    mine = [(dtype, sizes) for op, dtype, sizes in asked if op == case.op]
    if not mine:
        return
    for tile in tiles:
        found.trials.append(_try(case, kernel, device, tile, wanted, timer))
    best = found.best(case.op, case.name)
    if best is not None:
        config: dict[str, int | str] = dict(dataclasses.asdict(best.tile))
        for dtype, sizes in mine:
            yield tuned.Entry(dtype, sizes, config, best.us)


def _try(
    case: Case, kernel: _Caught, device: torch.device, tile: Tile, wanted: tuple[Tensor, ...], timer: Timer
) -> Trial:
    with tuned.forced(case.op, tile):
        try:
            got = case.results(kernel, device)
            wrong = list(disagreements(got, wanted, case.tolerance))
            if wrong:
                return Trial(case.op, case.name, tile, None, "differs from the default: " + "; ".join(wrong))
            return Trial(case.op, case.name, tile, timer(kernel.again))
        except Exception as error:  # out of resources, or a shape the compiler refuses: not a candidate
            return Trial(case.op, case.name, tile, None, f"{type(error).__name__}: {error}"[:200])


def device_timer(call: Callable[[], object]) -> float:
    """Median of a burst on a GPU, by `bench.measure`."""
    from headrace.kernels.bench.measure import time_calls

    return time_calls([call], budget_us=20_000.0).median_us


def clock_timer(call: Callable[[], object]) -> float:
    """Seconds by the wall clock, for machines without a GPU: says that the procedure runs, and nothing of speed."""
    begin = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - begin)


def save(found: Tuning, folder: Path = tuned.FOLDER) -> list[Path]:
    """Write the tables."""
    return [tuned.save(table, folder) for table in found.tables]
