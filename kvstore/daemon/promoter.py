"""Brings blocks from lower tiers and from other nodes into the host tier. Runs on the daemon's event loop.

A block comes up as any writer's does: a host slot in state writing, the transfer straight into it, its digest checked,
commit. It then stays held until the one who waits has leased it, or for `HOLD_S`.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from headrace.errors import LeaseExpired
from headrace.ids import BlockName, Incarnation, SlotIndex, Tier
from headrace.kvstore.base import BlockMeta, Coming
from headrace.kvstore.daemon.pump import Lane
from headrace.kvstore.host_tier import HostTier

HOLD_S = 2.0
"""How long a block that came up is kept for whoever asked for it."""
REFUSED_S = 1.0
"""How long a block that could not be brought up is not tried again: who asks meanwhile computes it."""


class Place(NamedTuple):
    """A host slot that waits for a block's bytes."""

    name: BlockName
    slot: int
    view: memoryview
    """The whole slot, `layout.slot_bytes`."""


class Sink(Protocol):
    """Where a source puts blocks. `begin` may refuse; each Place ends with exactly one `done` or `failed`."""

    def begin(self, meta: BlockMeta) -> Place | None: ...

    def done(self, place: Place, digest: bytes, tier: Tier) -> None:
        """All bytes are there and their digest was checked."""
        ...

    def failed(self, place: Place, running: Callable[[], bool] | None = None) -> None:
        """`running`: whether something may still write into the slot; it is quarantined as long."""
        ...

    def gave_up(self, name: BlockName) -> None:
        """A block that was accepted will not come, and has no Place."""
        ...


class Source(Protocol):
    """A tier below, or another node."""

    here: bool
    """Whether it is of this node."""

    def leading(self, names: Sequence[BlockName]) -> int:
        """How many leading names it has."""
        ...

    def start(self, names: Sequence[BlockName], sink: Sink, lane: Lane) -> int:
        """Begin to bring these; how many of the leading ones were accepted. Each of those ends in the sink."""
        ...


class Promoter:
    """Implements Sink. `owner` is the daemon's own client of the host tier, attached by the caller."""

    def __init__(
        self,
        host: HostTier,
        owner: Incarnation,
        slot_view: Callable[[int], memoryview],
        sources: Sequence[Source],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host = host
        self._owner = owner
        self._slot_view = slot_view
        self._sources = sources
        self._clock = clock
        self._active: set[BlockName] = set()
        self._refused: dict[BlockName, float] = {}
        self._held: dict[BlockName, tuple[float, Tier]] = {}
        self.promoted = dict.fromkeys((Tier.DISK, Tier.PEER), 0)
        self.failures = 0

    def promote(self, names: Sequence[BlockName], lane: Lane = Lane.RESTORE, *, here_only: bool = False) -> Coming:
        """Begin to bring up what lower tiers have after the leading run of `names` that is readable already.
        `here_only`: for another node, which must not make this one ask others in turn."""
        sources = [source for source in self._sources if source.here or not here_only]
        found = self._host.find(names)
        at = ready = found.index(None) if None in found else len(found)
        while at < len(names):
            if names[at] in self._active or found[at] is not None:
                at += 1
                continue
            started = 0 if names[at] in self._refused else self._start(sources, names[at:], lane)
            if not started:
                break
            at += started
        return Coming(ready, at - ready)

    def leased(self, names: Sequence[BlockName]) -> dict[BlockName, Tier]:
        """Somebody holds these now. Which of them came from below, for the first who asks."""
        if not self._held:
            return {}
        came = {name: self._held.pop(name)[1] for name in names if name in self._held}
        self._host.release(self._owner, list(came))
        return came

    def tick(self) -> None:
        now = self._clock()
        over = [name for name, (until_s, _) in self._held.items() if until_s <= now]
        for name in over:
            del self._held[name]
        self._host.release(self._owner, over)
        self._refused = {name: until_s for name, until_s in self._refused.items() if until_s > now}

    @property
    def active(self) -> int:
        return len(self._active)

    def values(self) -> dict[str, float]:
        came = {f"promoted_total{{from={tier.value}}}": float(count) for tier, count in self.promoted.items()}
        return {"promoting": float(len(self._active)), "promotion_failures_total": float(self.failures), **came}

    # --- Sink -------------------------------------------------------------------------------------------------------

    def begin(self, meta: BlockMeta) -> Place | None:
        (slot,) = self._host.begin_put(self._owner, [(meta.name, meta.parent, meta.depth)], meta.tenant)
        if slot < 0:
            self.gave_up(meta.name)
            return None
        return Place(meta.name, slot, self._slot_view(slot))

    def done(self, place: Place, digest: bytes, tier: Tier) -> None:
        self._active.discard(place.name)
        try:
            self._host.commit_put(self._owner, [(place.name, SlotIndex(place.slot), digest)], keep_lease=True)
        except LeaseExpired:
            self._refuse(place.name)
            return
        self._held[place.name] = (self._clock() + HOLD_S, tier)
        self.promoted[tier] += 1

    def failed(self, place: Place, running: Callable[[], bool] | None = None) -> None:
        self._host.abort_put(self._owner, [(place.name, SlotIndex(place.slot))], running)
        self.gave_up(place.name)

    def gave_up(self, name: BlockName) -> None:
        self._active.discard(name)
        self._refuse(name)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _refuse(self, name: BlockName) -> None:
        self.failures += 1
        self._refused[name] = self._clock() + REFUSED_S

    def _start(self, sources: Sequence[Source], names: Sequence[BlockName], lane: Lane) -> int:
        """Let the first source that has the first of these bring what it has without a gap."""
        for source in sources:
            run = source.leading(names)
            wanted = 0
            while wanted < run and not self._known(names[wanted]):
                wanted += 1
            if wanted:
                self._active.update(names[:wanted])
                accepted = source.start(names[:wanted], self, lane)
                self._active.difference_update(names[accepted:wanted])
                if accepted:
                    return accepted
        return 0

    def _known(self, name: BlockName) -> bool:
        return name in self._active or name in self._refused or self._host.find([name])[0] is not None
