"""How `headrace store` shows numbers. Pure."""

from collections.abc import Sequence

RATES = {
    "hits": "host_hits_total",
    "misses": "host_misses_total",
    "puts": "host_puts_total",
    "evicted": "host_evictions_total",
    "expired": "host_expirations_total",
    "full": "host_put_full_total",
    "corrupt": "host_corrupt_total",
}
SHARES = ("ready", "leased", "writing", "pinned", "quarantined", "free")


def table(rows: Sequence[Sequence[str]], indent: int = 0) -> str:
    """Columns as wide as they must be, the first to the left, the others to the right."""
    widths = [max(len(str(cell)) for cell in column) for column in zip(*rows)]
    lines = []
    for first, *others in rows:
        cells = [str(first).ljust(widths[0]), *(str(c).rjust(w) for c, w in zip(others, widths[1:]))]
        lines.append(" " * indent + "  ".join(cells).rstrip())
    return "\n".join(lines)


def changes(before: dict[str, float], now: dict[str, float], seconds: float) -> dict[str, float]:
    """What `top` shows of one node: blocks a second by cause, hit share of the interval, blocks by state."""
    rates = {f"{name}_per_s": (now.get(value, 0.0) - before.get(value, 0.0)) / seconds for name, value in RATES.items()}
    asked = rates["hits_per_s"] + rates["misses_per_s"]
    return {
        **{name: round(rate, 2) for name, rate in rates.items()},
        "hit_share": round(rates["hits_per_s"] / asked, 4) if asked else 0.0,
        **{state: now.get(f"host_{state}", 0.0) for state in SHARES},
        "slots": now.get("host_slots", 0.0),
        "oldest_lease_s": round(now.get("host_oldest_lease_s", 0.0), 2),
    }


def top_screen(before: dict[str, dict[str, float]], now: dict[str, dict[str, float]], seconds: float) -> str:
    """One block of lines a node."""
    lines = []
    for node, values in now.items():
        shown = changes(before[node], values, seconds)
        rates = "  ".join(f"{name} {shown[f'{name}_per_s']:,.0f}/s" for name in RATES)
        states = "  ".join(f"{state} {shown[state]:,.0f}" for state in SHARES)
        lines.append(f"{node}  {rates}  hit share {shown['hit_share']:.1%}")
        lines.append(f"  of {shown['slots']:,.0f} slots: {states}; oldest lease {shown['oldest_lease_s']:.1f} s")
    return "\n".join(lines)
