"""From a trace to sizes: each step is a few simulations, and says what it gains and what it was chosen from.

1. host tier: the smallest size that comes within a tolerance of an unlimited one;
2. policy: another than LRU only where it gains at least a point at that size;
3. prefill groups: the fewest that meet the time to first token.

Steps 1 and 2 are pool simulations and take seconds; step 3 simulates the service, by doubling and bisection.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from headrace.errors import InputError
from headrace.kernels.formats import BLOCK_TOKENS
from headrace.lab.simulate.driver import service_case
from headrace.lab.simulate.pool import UNLIMITED, simulate_pool
from headrace.lab.simulate.service_settings import ServiceSettings
from headrace.lab.traces.form import Trace

Row = dict[str, Any]
POLICIES = ("arc", "gdsf", "s3fifo", "density")
_POINT = 0.01


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    ttft_p90_s: float
    max_host_bytes: float
    max_groups: int
    tolerance: float = _POINT
    """Hit rate that may be given up against an unlimited tier."""


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One decision: what was tried, what was chosen, why, and the setting that does it."""

    title: str
    choice: str
    reason: str
    assignment: str
    rows: tuple[Row, ...]


def advise(trace: Trace, base: ServiceSettings, wishes: Wishes, say: Callable[[str], None]) -> list[Step]:
    """The steps in order. `say` hears what is being simulated. Raises InputError for a trace without prefixes."""
    if not trace.has_prefixes:
        raise InputError(f"{trace.name} has lengths only: nothing about caches can be learnt from it")
    block_bytes = base.slab_bytes * trace.block_tokens / BLOCK_TOKENS
    sizes = list(_sizes(trace.num_blocks, int(wishes.max_host_bytes / block_bytes)))
    if not sizes:
        raise InputError(f"a host tier of {wishes.max_host_bytes:.3g} bytes holds no block of {block_bytes:.3g} bytes")
    host, hit, memory = _host_step(trace, sizes, block_bytes, wishes, say)
    policy = _policy_step(trace, host, hit, say)
    chosen = dataclasses.replace(base, host_size=f"{host * block_bytes:.0f}B", host_policy=policy.choice)
    return [memory, policy, _groups_step(trace, chosen, wishes, say)]


def _sizes(all_blocks: int, most: int) -> Iterable[int]:
    """From all blocks of the trace downwards by half, none above `most` but `most` itself, ascending."""
    top = min(all_blocks, most)
    found = [top >> k for k in range(8) if top >> k > 0]
    return reversed(found)


def _host_step(
    trace: Trace, sizes: list[int], block_bytes: float, wishes: Wishes, say: Callable[[str], None]
) -> tuple[int, float, Step]:
    say("host tier: an unlimited one")
    ideal = simulate_pool(trace, "lru", UNLIMITED).tally.token_weighted
    rows, chosen, hit = [], sizes[-1], 0.0
    for blocks in sizes:
        say(f"host tier: {blocks * block_bytes / 1e9:,.0f} GB")
        hit = simulate_pool(trace, "lru", blocks).tally.token_weighted
        rows.append(
            {"host_gb": blocks * block_bytes / 1e9, "hit": hit, "share_of_ideal": hit / ideal if ideal else 1.0}
        )
        if hit >= ideal - wishes.tolerance:
            chosen = blocks
            break
    size = chosen * block_bytes
    within = hit >= ideal - wishes.tolerance
    reason = (
        f"hits {hit:.1%} of the prompt tokens, an unlimited tier {ideal:.1%}"
        + ("" if within else "; the budget ends here, more memory would still gain")
    )  # fmt: skip
    return chosen, hit, Step("host tier", f"{size / 1e9:,.0f} GB", reason, f"store.host_bytes={size:.0f}", tuple(rows))


def _policy_step(trace: Trace, blocks: int, lru_hit: float, say: Callable[[str], None]) -> Step:
    rows: list[Row] = [{"policy": "lru", "hit": lru_hit}]
    for name in POLICIES:
        say(f"policy: {name}")
        rows.append({"policy": name, "hit": simulate_pool(trace, name, blocks).tally.token_weighted})
    best = max(rows, key=lambda row: row["hit"])
    if best["hit"] < lru_hit + _POINT:
        best, reason = rows[0], f"no policy gains a point at this size (best: {best['policy']}, {best['hit']:.1%})"
    else:
        reason = f"hits {best['hit']:.1%} where lru hits {lru_hit:.1%}"
    name = str(best["policy"])
    return Step("policy", name, reason, f"store.host_policy={name}", tuple(rows))


def _groups_step(trace: Trace, base: ServiceSettings, wishes: Wishes, say: Callable[[str], None]) -> Step:
    tried: dict[int, Row] = {}

    def meets(groups: int) -> bool:
        if groups not in tried:
            say(f"prefill groups: {groups}")
            case = service_case(trace, dataclasses.replace(base, groups=groups))
            keep = ("groups", "ttft_p50_s", "ttft_p90_s", "queue_s", "refused", "prefill_busy", "hit")
            tried[groups] = {key: case[key] for key in keep}
        return tried[groups]["ttft_p90_s"] <= wishes.ttft_p90_s and not tried[groups]["refused"]

    enough = 1
    while not meets(enough) and enough < wishes.max_groups:
        enough = min(enough * 2, wishes.max_groups)
    too_few = max((g for g in tried if g < enough), default=0)
    while meets(enough) and enough - too_few > 1:
        middle = (enough + too_few) // 2
        enough, too_few = (middle, too_few) if meets(middle) else (enough, middle)
    row, rows = tried[enough], tuple(tried[g] for g in sorted(tried))
    met = "meets" if meets(enough) else "still misses"
    reason = f"TTFT p90 {row['ttft_p90_s']:.2f} s {met} {wishes.ttft_p90_s:g} s, {row['refused']} refused"
    return Step("prefill groups", str(enough), reason, f"prefill.groups={enough}", rows)
