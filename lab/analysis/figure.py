"""`inspect` as one figure, PNG or SVG by the file's ending. Needs matplotlib (extra `lab`)."""

from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import InputError


def draw(facts: dict[str, Any], path: str | Path) -> None:
    """Four panels: prompt reuse distance, LRU curve read off it, working set, what the ideal hit rates are."""
    try:
        from matplotlib.figure import Figure  # only figures need it
    except ImportError as error:
        raise InputError("figures need matplotlib: pip install 'headrace[lab]'") from error
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    axes = figure.subplots(2, 2)
    figure.suptitle(f"{facts['name']}: {facts['requests']:,} requests, blocks of {facts['block_tokens']} tokens")
    _distance(axes[0, 0], facts)
    _curve(axes[0, 1], facts)
    _working_set(axes[1, 0], facts)
    _ideal(axes[1, 1], facts)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot write figure {path}: {error}") from error


def _distance(axis: Any, facts: dict[str, Any]) -> None:
    reuse = facts["reuse_distance"]
    edges = np.asarray(reuse["edges"], dtype=float) * facts["block_tokens"]
    total = sum(reuse["counts"]) + reuse["first_uses"]
    share = np.asarray(reuse["counts"]) / total
    axis.bar(edges[:-1].clip(min=edges[1] / 2), share, width=np.diff(edges) * 0.9, align="edge")
    axis.set(xscale="log", xlabel="reuse distance (tokens)", ylabel="share of block uses",
             title=f"reuse distance (first uses: {reuse['first_uses'] / total:.1%})")  # fmt: skip


def _curve(axis: Any, facts: dict[str, Any]) -> None:
    reuse = facts["reuse_distance"]
    total = sum(reuse["counts"]) + reuse["first_uses"]
    capacity = np.asarray(reuse["edges"][1:], dtype=float) * facts["block_tokens"]
    axis.plot(capacity, np.cumsum(reuse["counts"]) / total, marker="o")
    axis.axhline(facts["ideal_hit"]["block_weighted"], linestyle="--", color="grey", label="ideal (block-weighted)")
    axis.set(xscale="log", ylim=(0, 1), xlabel="LRU capacity (tokens)", ylabel="hit rate", title="LRU, by distance")
    axis.legend()


def _working_set(axis: Any, facts: dict[str, Any]) -> None:
    rows, scale = facts["working_set"], facts["block_tokens"] / 1e6
    hours = np.asarray(rows["end_s"]) / 3600
    axis.plot(hours, np.asarray(rows["touched_blocks"]) * scale, label="touched in the window")
    axis.plot(hours, np.asarray(rows["seen_blocks"]) * scale, label="seen so far")
    axis.set(xlabel="hours", ylabel="million tokens", title="working set")
    axis.legend()


def _ideal(axis: Any, facts: dict[str, Any]) -> None:
    ideal = facts["ideal_hit"]
    bars = axis.bar(["block-weighted", "token-weighted", "mean per request"], list(ideal.values()))
    axis.bar_label(bars, fmt="%.4f")
    axis.set(ylim=(0, 1.05), title="ideal prefix hit rate, three definitions")
