"""The HTML page of a sweep: charts, the table, and what was run. Self-contained."""

import html
import json
from collections.abc import Sequence
from typing import Any

from headrace.lab.report import svg

Row = dict[str, Any]
_STYLE = """
body{font:14px system-ui,sans-serif;margin:2rem auto;max-width:1340px;padding:0 1rem;color:#1e293b}
svg{font:11px system-ui,sans-serif;max-width:100%;height:auto;margin:0 1rem 1rem 0}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}th,td{padding:.25rem .6rem;text-align:right;
border-bottom:1px solid #e2e8f0}th{background:#f1f5f9;position:sticky;top:0}td:first-child,th:first-child{
text-align:left}code{background:#f1f5f9;padding:.1rem .3rem}.scroll{overflow-x:auto}
"""
WAITS = ("queue_s", "restore_s", "compute_s", "handover_s", "decode_s")
"""Where the time of a request goes, in order; the waterfall stacks their means."""


def page(title: str, facts: Sequence[str], rows: Sequence[Row]) -> str:
    """One page for all `rows`. `facts` are sentences about trace, command and date."""
    charts = [chart for chart in (hit_chart(rows), pareto_chart(rows), waterfall(rows)) if chart]
    said = "".join(f"<p>{html.escape(fact)}</p>" for fact in facts)
    data = json.dumps(list(rows)).replace("</", "<\\/")
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title><style>{_STYLE}</style>"
        f"<h1>{html.escape(title)}</h1>{said}{''.join(charts)}<div class=scroll>{table(rows)}</div>"
        f'<script type="application/json" id="rows">{data}</script></html>\n'
    )


def hit_chart(rows: Sequence[Row]) -> str:
    """Block-weighted hit rate over capacity, a line per policy; the clairvoyant bound last."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        size = float(row.get("capacity_tokens") or 0)
        if size and "block_weighted" in row:
            lines.setdefault(str(row.get("policy")), []).append((size, row["block_weighted"]))
    ordered = sorted(lines.items(), key=lambda item: item[0] == "clairvoyant")
    return svg.lines("hit rate over capacity", "capacity (tokens)", "hit rate, block-weighted", ordered, log_x=True)


def pareto_chart(rows: Sequence[Row]) -> str:
    """What a service costs against how long clients wait: the lower left corner is good."""
    points = [
        (name, [(row["gpu_s"], row["ttft_p90_s"])]) for name, row in zip(case_names(rows), rows) if "gpu_s" in row
    ]
    return svg.lines("cost and waiting", "prefill GPU-seconds", "TTFT p90 (s)", points, joined=False)


def waterfall(rows: Sequence[Row]) -> str:
    timed = [(name, row) for name, row in zip(case_names(rows), rows) if WAITS[0] in row]
    parts = [(wait.removesuffix("_s"), [float(row[wait]) for _, row in timed]) for wait in WAITS]
    return svg.stacked("where the time of a request goes (means)", "seconds", [name for name, _ in timed], parts)


def case_names(rows: Sequence[Row]) -> list[str]:
    """What differs between the cases, as short labels."""
    settings = [key for key in rows[0] if len({str(row.get(key)) for row in rows}) > 1] if rows else []
    chosen = [key for key in settings if isinstance(rows[0][key], str)] or settings[:2]
    numbers = [key for key in settings if key in ("groups", "time_scale", "decode_ranks") and key not in chosen]
    return [" ".join(str(row.get(key)) for key in (*chosen, *numbers)) or "case" for row in rows]


def table(rows: Sequence[Row]) -> str:
    """Every figure; a column that is the same everywhere is left out (it is said once above)."""
    if not rows:
        return ""
    keys = list(rows[0])
    if len(rows) > 1:
        keys = [key for key in keys if len({str(row.get(key)) for row in rows}) > 1] or keys
    head = "".join(f"<th>{html.escape(key)}</th>" for key in keys)
    body = "".join("<tr>" + "".join(f"<td>{_cell(row.get(key))}</td>" for key in keys) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else html.escape(str(value))
