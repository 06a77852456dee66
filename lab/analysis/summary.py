"""Everything `headrace lab inspect` says about a trace, as one plain structure."""

import dataclasses
from typing import Any

import numpy as np

from headrace.lab.analysis.ideal import ideal_hits
from headrace.lab.analysis.reuse import reuse_histogram
from headrace.lab.traces.form import Trace

_PERCENTILES = (10, 50, 90, 99)
_WINDOWS = 60


def inspect(trace: Trace) -> dict[str, Any]:
    """Plain dict for JSON. Lengths in tokens, times in seconds, working sets in blocks of the trace."""
    arrivals, tally, reuse = trace.arrivals(), ideal_hits(trace), reuse_histogram(trace)
    think = [r.think_s for r in trace.requests() if r.think_s is not None]
    return {
        "name": trace.name,
        "block_tokens": trace.block_tokens,
        "has_prefixes": trace.has_prefixes,
        "sessions": sum(session.parent is None for session in trace.sessions),
        "sub_agents": sum(session.parent is not None for session in trace.sessions),
        "requests": len(arrivals),
        "span_s": arrivals[-1].at_s - arrivals[0].at_s,
        "unique_blocks": trace.num_blocks,
        "block_references": tally.blocks,
        "requests_per_session": percentiles([len(s.requests) for s in trace.sessions]),
        "input_tokens": percentiles([r.input_tokens for r in trace.requests()]),
        "output_tokens": percentiles([r.output_tokens for r in trace.requests()]),
        "think_s": percentiles(think) if think else None,
        "ideal_hit": tally.rates(),
        "requests_with_a_hit": tally.requests_hit / tally.requests,
        "reuse_distance": dataclasses.asdict(reuse),
        "working_set": working_set(trace),
    }


def percentiles(values: list[Any]) -> dict[str, float]:
    """mean, total, min, p10, p50, p90, p99, max."""
    array = np.asarray(values, dtype=np.float64)
    named = {f"p{q}": float(np.percentile(array, q)) for q in _PERCENTILES}
    return {"mean": float(array.mean()), "min": float(array.min()), **named, "max": float(array.max()),
            "total": float(array.sum())}  # fmt: skip


def working_set(trace: Trace, windows: int = _WINDOWS) -> dict[str, list[float]]:
    """Blocks touched in each of `windows` equal stretches of recorded time, and all blocks seen up to its end. The
    stretches cover the first 99% of the requests (a few sessions go on for days); the last one holds the rest too."""
    arrivals = trace.arrivals()
    start = arrivals[0].at_s
    width = max((arrivals[(len(arrivals) - 1) * 99 // 100].at_s - start) / windows, 1e-9)
    touched = np.zeros(windows, dtype=np.int64)
    new = np.zeros(windows, dtype=np.int64)
    last = np.full(trace.num_blocks, -1, dtype=np.int32)
    for arrival in arrivals:
        window = min(int((arrival.at_s - start) / width), windows - 1)
        for first, count in arrival.request.runs:
            part = last[first : first + count]
            touched[window] += int(np.count_nonzero(part != window))
            new[window] += int(np.count_nonzero(part < 0))
            part[:] = window
    return {
        "end_s": [round((i + 1) * width, 3) for i in range(windows)],
        "touched_blocks": [float(x) for x in touched],
        "seen_blocks": [float(x) for x in np.cumsum(new)],
    }
