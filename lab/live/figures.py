"""Measured requests as one row, with the names that simulated rows use, and the difference between the two."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.lab.live.replay import Measured

Row = dict[str, Any]
COMPARED = ("hit", "hit_device", "hit_host", "ttft_p50_s", "ttft_p90_s", "total_p50_s", "total_p90_s", "unserved")


def figures(results: Sequence[Measured]) -> Row:
    """Requests that failed are counted, their times are not."""
    good = [r for r in results if not r.error]
    prompt = sum(r.prompt_tokens for r in good) or 1
    span = max((r.started_s + r.total_s for r in good), default=0.0) - min((r.started_s for r in good), default=0.0)
    tiers = {f"hit_{tier}": sum(r.by_tier.get(tier, 0) for r in good) / prompt for tier in ("device", "host", "disk")}
    return {
        "requests": len(results),
        "refused": sum(r.refused for r in results),
        "failed": sum(bool(r.error) and not r.refused for r in results),
        "unserved": sum(bool(r.error) for r in results),
        "hit": sum(r.cached_tokens for r in good) / prompt,
        **tiers,
        **_percentiles("ttft", [r.ttft_s for r in good]),
        **_percentiles("total", [r.total_s for r in good]),
        "requests_per_s": len(good) / span if span > 0 else 0.0,
        "prompt_tokens_per_s": sum(r.prompt_tokens for r in good) / span if span > 0 else 0.0,
        "answer_tokens_per_s": sum(r.answer_tokens for r in good) / span if span > 0 else 0.0,
        "span_s": span,
    }


def compare(measured: Row, simulated: Row) -> list[Row]:
    """One row a figure. Hit rates differ in points, times in percent of the measured one."""
    rows = []
    for key in COMPARED:
        if key not in measured or key not in simulated:
            continue
        live, predicted = float(measured[key]), float(simulated[key])
        if key.startswith("hit"):
            error = f"{100 * (predicted - live):+.2f} points"
        elif live:
            error = f"{100 * (predicted / live - 1):+.1f}%"
        else:
            error = f"{predicted - live:+g}"
        rows.append({"figure": key, "measured": live, "simulated": predicted, "error": error})
    return rows


def _percentiles(name: str, values: Sequence[float]) -> Row:
    points = np.percentile(values, (50, 90, 99)) if values else (0.0, 0.0, 0.0)
    mean = float(np.mean(values)) if values else 0.0
    return {f"{name}_mean_s": mean, **{f"{name}_p{q}_s": float(p) for q, p in zip((50, 90, 99), points)}}
