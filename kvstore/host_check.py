"""Whether a host tier's books are sound: every slot in one state, every reference owed to one lease. Pure."""

from typing import TYPE_CHECKING

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
