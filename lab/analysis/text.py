"""`inspect` as text for a terminal."""

from typing import Any

_BAR = 40
_DEFINITIONS = {
    "block_weighted": "block-weighted",
    "token_weighted": "token-weighted",
    "request_mean": "mean per request",
}


def render(facts: dict[str, Any]) -> str:
    agents = f" (+ {facts['sub_agents']} sub-agents)" if facts["sub_agents"] else ""
    size = f"{facts['unique_blocks']:,} different, {facts['block_references']:,} references"
    lines = [
        f"{facts['name']}: {facts['requests']:,} requests in {facts['sessions']:,} sessions{agents}",
        f"recorded over {duration(facts['span_s'])}; blocks of {facts['block_tokens']} tokens: {size}",
        "",
        f"{'':22}{'mean':>10}{'p10':>10}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>12}",
    ]
    names = {
        "requests_per_session": "requests a session",
        "input_tokens": "prompt tokens",
        "output_tokens": "answer tokens",
        "think_s": "think time, s",
    }
    for key, label in names.items():
        if facts[key]:
            row = facts[key]
            lines.append(f"{label:22}" + "".join(f"{row[k]:10,.0f}" for k in ("mean", "p10", "p50", "p90", "p99"))
                         + f"{row['max']:12,.0f}")  # fmt: skip
    lines.append("")
    if not facts["has_prefixes"]:
        lines.append("this source has lengths only: no block is ever used twice, hit rates mean nothing")
        return "\n".join(lines)
    ideal = facts["ideal_hit"]
    lines += [
        "ideal prefix hit rate (unlimited cache)",
        "  " + "   ".join(f"{_DEFINITIONS[key]} {rate:.4f}" for key, rate in ideal.items()),
        f"  requests with a hit {facts['requests_with_a_hit']:.4f}",
        "",
        *_reuse(facts["reuse_distance"], facts["block_tokens"]),
        "",
        *_working_set(facts["working_set"], facts["block_tokens"]),
    ]
    return "\n".join(lines)


def duration(seconds: float) -> str:
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 36_000 else f"{seconds / 3600:.1f} h"


def tokens(count: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= limit:
            return f"{count / limit:.3g} {unit}"
    return f"{count:.0f}"


def _reuse(reuse: dict[str, Any], block_tokens: int) -> list[str]:
    how = "exact" if reuse["sample_rate"] == 1.0 else f"sampled, 1 block in {1 / reuse['sample_rate']:.0f}"
    total = sum(reuse["counts"]) + reuse["first_uses"]
    lines, below = [f"reuse distance, in tokens of other blocks between two uses ({how})"], 0.0
    for high, count in zip(reuse["edges"][1:], reuse["counts"]):
        below += count
        if count / total >= 0.0005:
            bar = "#" * round(_BAR * count / total)
            lines.append(
                f"  < {tokens(high * block_tokens):>8} {count / total:7.2%}  up to here {below / total:7.2%}  {bar}"
            )
    lines.append(f"  {'first use':>10} {reuse['first_uses'] / total:7.2%}")
    return lines


def _working_set(rows: dict[str, Any], block_tokens: int) -> list[str]:
    touched, seen, ends = rows["touched_blocks"], rows["seen_blocks"], rows["end_s"]
    top = max(touched) or 1.0
    step = max(len(ends) // 12, 1)
    lines = [f"working set, tokens touched in windows of {duration(ends[0])} (all seen so far)"]
    for index in range(step - 1, len(ends), step):
        bar = "#" * round(_BAR * touched[index] / top)
        lines.append(f"  {duration(ends[index]):>8} {tokens(touched[index] * block_tokens):>9}"
                     f" ({tokens(seen[index] * block_tokens):>7}) {bar}")  # fmt: skip
    return lines
