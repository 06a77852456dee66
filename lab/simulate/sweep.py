"""Many cases of one trace, in parallel processes. A case turns settings into one flat row: settings and figures."""

import concurrent.futures
import dataclasses
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from headrace.lab.simulate.pool import CLAIRVOYANT, simulate_pool
from headrace.lab.simulate.settings import PoolSettings, to_blocks
from headrace.lab.traces.form import Trace

Row = dict[str, Any]
Case = Callable[[Trace, Any], Row]
_trace: Trace | None = None


def pool_case(trace: Trace, settings: PoolSettings) -> Row:
    """One pool simulation as a row."""
    started = time.perf_counter()
    blocks = to_blocks(settings.capacity, trace.block_tokens, settings.slab_bytes)
    result = simulate_pool(trace, settings.policy, blocks, settings.evict == "leaves", settings.warmup)
    took = time.perf_counter() - started
    events = sum(request.num_blocks for request in trace.requests())
    return {
        **dataclasses.asdict(settings),
        "capacity_blocks": blocks,
        "capacity_tokens": blocks * trace.block_tokens,
        **result.tally.rates(),
        "requests": result.tally.requests,
        "hit_tokens": result.tally.hit_tokens,
        "prompt_tokens": result.tally.tokens,
        "evicted_blocks": result.evicted,
        "seconds": round(took, 3),
        "block_events_per_s": round(events / took),
    }


def with_bound(cases: Sequence[PoolSettings]) -> list[PoolSettings]:
    """`cases` plus the clairvoyant bound at every size that occurs."""
    bounds = dict.fromkeys(dataclasses.replace(case, policy=CLAIRVOYANT) for case in cases)
    return [*cases, *(bound for bound in bounds if bound not in cases)]


def run_sweep(
    trace: Trace, cases: Sequence[Any], case: Case, jobs: int, progress: Callable[[int, int], None] | None = None
) -> list[Row]:
    """Rows in the order of `cases`. `jobs` 1 runs in this process. The trace reaches the workers by fork where the
    platform has it, else it is copied once a worker."""
    rows: list[Row | None] = [None] * len(cases)
    if jobs <= 1 or len(cases) == 1:
        for index, settings in enumerate(cases):
            rows[index] = case(trace, settings)
            _report(progress, index + 1, len(cases))
        return [row for row in rows if row is not None]
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    with concurrent.futures.ProcessPoolExecutor(
        min(jobs, len(cases)), multiprocessing.get_context(method), _adopt, (trace,)
    ) as workers:
        futures = {workers.submit(_run, case, settings): index for index, settings in enumerate(cases)}
        try:
            for done, future in enumerate(concurrent.futures.as_completed(futures), 1):
                rows[futures[future]] = future.result()
                _report(progress, done, len(cases))
        except BaseException:
            workers.shutdown(wait=False, cancel_futures=True)
            raise
    return [row for row in rows if row is not None]


def progress_bar(stream: TextIO | None = None, width: int = 40) -> Callable[[int, int], None] | None:
    """A bar on a terminal; None when `stream` (by default what stderr is now) is a file or a pipe."""
    stream = stream or sys.stderr
    if not stream.isatty():
        return None
    started = time.monotonic()

    def show(done: int, total: int) -> None:
        filled = width * done // total
        left = (time.monotonic() - started) / done * (total - done)
        end = "\n" if done == total else ""
        stream.write(f"\r[{'#' * filled}{'.' * (width - filled)}] {done}/{total}, about {left:.0f} s left {end}")
        stream.flush()

    return show


def _report(progress: Callable[[int, int], None] | None, done: int, total: int) -> None:
    if progress is not None:
        progress(done, total)


def _adopt(trace: Trace) -> None:
    global _trace
    _trace = trace


def _run(case: Case, settings: Any) -> Row:
    assert _trace is not None
    return case(_trace, settings)
