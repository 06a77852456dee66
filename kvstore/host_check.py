"""A host tier's books from outside: whether they are sound (every slot in one state, every reference owed to one
lease), and what they say in numbers. Pure."""

import dataclasses
from typing import TYPE_CHECKING

from headrace.kvstore.host_state import oldest_lease_s

if TYPE_CHECKING:
    from headrace.kvstore.host_tier import HostTier


def violations(tier: "HostTier") -> list[str]:
    """All violations found, as sentences; empty when sound."""
    parents = [w.meta.parent for w in tier._writing.values() if w.meta.parent is not None]
    wrong = tier._residents.violations(parents)
    quarantined = [slot for entry in tier._quarantine for slot in entry.slots]
    ready = [r.slot for r in tier._residents]
    everywhere = [*tier._free, *tier._writing, *ready, *tier._doomed, *quarantined]
    if sorted(everywhere) != list(range(tier.slots)):
        wrong.append(
            f"free {len(tier._free)} + writing {len(tier._writing)} + ready {len(ready)} + doomed "
            f"{len(tier._doomed)} + quarantined {len(quarantined)} are not each of the {tier.slots} slots once"
        )
    wrong += tier._quotas.violations(
        [r.meta.tenant for r in tier._residents] + [w.meta.tenant for w in tier._writing.values()]
    )
    if tier._writing_names != {w.meta.name for w in tier._writing.values()}:
        wrong.append("the names being written differ from the slots being written")
    leases: dict[int, int] = {}
    for owner, state in tier._owners.items():
        if state.writes != {slot for slot, w in tier._writing.items() if w.owner == owner}:
            wrong.append(f"owner {owner} and the slots being written disagree")
        for resident in state.leases:
            leases[id(resident)] = leases.get(id(resident), 0) + 1
    for resident in [*tier._residents, *tier._doomed.values()]:
        if resident.refs != leases.get(id(resident), 0):
            wrong.append(f"slot {resident.slot}: {resident.refs} references, {leases.get(id(resident), 0)} leases")
    return wrong


def stats(tier: "HostTier") -> dict[str, float]:
    """Gauges of slots by state, and counters."""
    gauges = {
        "slots": tier.slots,
        "free": len(tier._free),
        "writing": len(tier._writing),
        "ready": len(tier._residents),
        "leased": tier._residents.held + len(tier._doomed),
        "evictable": tier._residents.evictable,
        "doomed": len(tier._doomed),
        "quarantined": sum(len(q.slots) for q in tier._quarantine),
        "clients": len(tier._owners),
        "oldest_lease_s": oldest_lease_s(tier._owners.values(), tier._clock()),
    }
    counters = {f"{name}_total": value for name, value in dataclasses.asdict(tier.counters).items()}
    return {**gauges, **counters, **tier._quotas.stats()}
