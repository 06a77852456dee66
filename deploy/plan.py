"""Which boxes a configuration asks for. Pure: starts nothing, reads no file.

A unit is what starts, dies and restarts as one: a node daemon, a prefill group, a decode group, the router.
"""

import dataclasses
import secrets
from collections.abc import Mapping

from headrace.config import Config
from headrace.deploy.base import BoxContext, BoxSpec
from headrace.kvstore.layout import SlabLayout


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """The box class of each kind of unit, `module:Class`."""

    node: str = "headrace.kvstore.daemon.box:NodeDaemonBox"
    prefill: str = "headrace.prefill.box:PrefillRankBox"
    decode: str = "headrace.decode.box:DecodeRankBox"
    router: str = "headrace.router.box:RouterBox"

    @classmethod
    def all(cls, entry: str) -> "Entries":
        """One class for everything."""
        return cls(node=entry, prefill=entry, decode=entry, router=entry)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlan:
    name: str
    entry: str
    world: int
    after: tuple[str, ...]
    """Units that must be ready before this one starts for the first time."""
    cpus: float
    gpus: float = 0.0

    @property
    def is_group(self) -> bool:
        """Ranks that step together and are named group.rank; other units are one box with the unit's name."""
        return self.name.startswith(("prefill-", "decode-"))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What every context of one run has in common."""

    config: Config
    run_dir: str
    token: str
    layout: SlabLayout | None
    fingerprint: bytes


NODE = "node-0"
ROUTER = "router"
_DAEMON_CPUS = 0.25


def plan_units(config: Config, entries: Entries, gpus: int = 0) -> list[UnitPlan]:
    """The units of a configuration on one host with `gpus` devices, in starting order."""
    prefill = [f"prefill-{i}" for i in range(config.prefill.groups)]
    decode = [f"decode-{i}" for i in range(config.decode.groups)]
    ranks = config.prefill.groups * config.prefill.cp + config.decode.groups * config.decode.dp
    share = min(1.0, gpus / ranks) if gpus else 0.0
    units = [UnitPlan(name=NODE, entry=entries.node, world=1, after=(), cpus=_DAEMON_CPUS)]
    for names, entry, world in (
        (prefill, entries.prefill, config.prefill.cp),
        (decode, entries.decode, config.decode.dp),
    ):
        units += [UnitPlan(name=name, entry=entry, world=world, after=(NODE,), cpus=1.0, gpus=share) for name in names]
    after = (NODE, *prefill, *decode)
    return [*units, UnitPlan(name=ROUTER, entry=entries.router, world=1, after=after, cpus=_DAEMON_CPUS)]


def total_cpus(units: list[UnitPlan]) -> float:
    return sum(unit.cpus * unit.world for unit in units)


def box_specs(unit: UnitPlan, shared: Shared, endpoints: Mapping[str, str]) -> list[BoxSpec]:
    """The boxes of one (re)start of a unit. Every call draws a new generation and rendezvous."""
    generation = secrets.token_hex(4)
    rendezvous = f"file://{shared.run_dir}/{unit.name}-{generation}.rendezvous" if unit.is_group else ""
    config = shared.config
    if unit.name == ROUTER and ROUTER in endpoints:
        port = int(endpoints[ROUTER].rpartition(":")[2])  # a restarted router keeps the port that clients know
        config = dataclasses.replace(config, router=dataclasses.replace(config.router, port=port))
    specs = []
    for rank in range(unit.world):
        context = BoxContext(
            config=config,
            name=f"{unit.name}.{rank}" if unit.is_group else unit.name,
            run_dir=shared.run_dir,
            group=unit.name if unit.is_group else "",
            rank=rank,
            world=unit.world,
            generation=generation,
            rendezvous=rendezvous,
            layout=shared.layout,
            fingerprint=shared.fingerprint,
            token=shared.token,
            endpoints=dict(endpoints),
        )
        specs.append(BoxSpec(entry=unit.entry, context=context, cpus=unit.cpus, gpus=unit.gpus))
    return specs
