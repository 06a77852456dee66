"""The named blocks of one tier: who is held, who has children, who may be evicted. Pure. Shared by the device index and
the host tier, so "child before parent" (DESIGN section 5, rule 6) is written once.

A block is offered to the policy exactly when nothing holds it and no block of this tier names it as parent.
"""

from collections.abc import Iterator, KeysView, Sequence
from typing import cast

from headrace.ids import BlockName, SlotIndex
from headrace.kvstore.base import BatchPolicy, BlockMeta, EvictionPolicy


class Resident(BlockMeta):
    """One named block and its slot: one object a block, and little beside it, because there are many."""

    __slots__ = ("children", "digest", "held_since_s", "refs", "slot")

    def __init__(self, meta: BlockMeta, slot: SlotIndex, refs: int, digest: bytes = b"") -> None:
        super().__init__(meta.name, meta.parent, meta.depth, meta.size_bytes, meta.tenant)
        self.slot = slot
        self.refs = refs
        """Counts whoever may read it or must keep it."""
        self.digest = digest
        """Filled where a tier keeps digests."""
        self.held_since_s = 0.0
        """When `refs` last rose from 0."""
        self.children = 0
        """Blocks of this tier, or being written, that name it as parent."""

    @property
    def meta(self) -> BlockMeta:
        return self

    # A resident is itself and no other, whatever it looks like.
    __eq__ = object.__eq__
    __hash__ = object.__hash__


class Residents:
    """Mapping name -> Resident that drives one eviction policy."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._batch = policy if isinstance(policy, BatchPolicy) else None
        self._by_name: dict[BlockName, Resident] = {}
        self._orphans: dict[BlockName, int] = {}
        """Children per parent that is not here (yet, or any more); residents count their own."""
        self._offered: set[BlockName] = set()
        self.held = 0
        """Residents with at least one reference."""

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Resident]:
        return iter(self._by_name.values())

    def names(self) -> KeysView[BlockName]:
        """A live view."""
        return self._by_name.keys()

    def get(self, name: BlockName) -> Resident | None:
        return self._by_name.get(name)

    @property
    def evictable(self) -> int:
        return len(self._offered)

    def has_children(self, name: BlockName) -> bool:
        """Whether a block of this tier, or one being written, names it as parent."""
        resident = self._by_name.get(name)
        return resident.children > 0 if resident is not None else name in self._orphans

    def may_go(self, name: BlockName) -> bool:
        """It is here, nothing holds it and no block here names it as parent."""
        return name in self._offered

    def leading(self, names: Sequence[BlockName]) -> list[Resident]:
        """The residents of the leading run of `names`."""
        found = self.find(names)
        return cast(list[Resident], found[: found.index(None)] if None in found else found)

    def find(self, names: Sequence[BlockName]) -> list[Resident | None]:
        return list(map(self._by_name.get, names))

    def hit(self, resident: Resident, now_s: float) -> None:
        self._policy.on_hit(resident.name, now_s)

    def hit_all(self, residents: Sequence[Resident], now_s: float) -> None:
        names = [resident.name for resident in residents]
        if self._batch is not None:
            self._batch.on_hits(names, now_s)
        else:
            for name in names:
                self._policy.on_hit(name, now_s)

    def insert(self, resident: Resident, now_s: float) -> None:
        name = resident.name
        if name in self._by_name:
            raise KeyError(f"block {name.hex()} is already here")
        self._by_name[name] = resident
        resident.children = self._orphans.pop(name, 0)
        self.held += resident.refs > 0
        resident.held_since_s = now_s
        self._policy.on_insert(resident.meta, now_s)
        self.adopt(resident.parent, now_s)
        self._review(name, now_s)

    def remove(self, name: BlockName, now_s: float) -> Resident:
        resident = self._by_name.pop(name)
        self.held -= resident.refs > 0
        if resident.children:
            self._orphans[name] = resident.children
        self._offered.discard(name)
        self._policy.on_remove(name)
        self.disown(resident.parent, now_s)
        return resident

    def hold(self, resident: Resident, now_s: float) -> None:
        if not resident.refs:
            self.held += 1
            resident.held_since_s = now_s
        resident.refs += 1
        self._review(resident.name, now_s)

    def unhold(self, resident: Resident, now_s: float) -> None:
        if resident.refs < 1:
            raise ValueError(f"block {resident.name.hex()} is released more often than it was taken")
        resident.refs -= 1
        self.held -= resident.refs == 0
        self._review(resident.name, now_s)

    def hold_all(self, residents: Sequence[Resident], now_s: float) -> None:
        """`hold` on each. In a chain at most the last block was on offer, so the rest costs next to nothing."""
        for resident in residents:
            if not resident.refs:
                self.held += 1
                resident.held_since_s = now_s
            resident.refs += 1
        offered = self._offered
        for resident in residents:
            if resident.name in offered:
                self._review(resident.name, now_s)

    def unhold_all(self, residents: Sequence[Resident], now_s: float) -> None:
        """`unhold` on each."""
        for resident in residents:
            if resident.refs < 1:
                raise ValueError(f"block {resident.name.hex()} is released more often than it was taken")
            resident.refs -= 1
            if not resident.refs:
                self.held -= 1
                if not resident.children:
                    self._review(resident.name, now_s)

    def adopt(self, parent: BlockName | None, now_s: float) -> None:
        """A child of `parent` is here, or is being written."""
        if parent is not None:
            self._count_child(parent, 1)
            self._review(parent, now_s)

    def disown(self, parent: BlockName | None, now_s: float) -> None:
        if parent is not None:
            self._count_child(parent, -1)
            self._review(parent, now_s)

    def _count_child(self, parent: BlockName, change: int) -> None:
        resident = self._by_name.get(parent)
        if resident is not None:
            resident.children += change
            return
        left = self._orphans.get(parent, 0) + change
        if left:
            self._orphans[parent] = left
        else:
            del self._orphans[parent]

    def victim(self, now_s: float) -> Resident | None:
        """Whom the policy would drop next. Does not remove it."""
        name = self._policy.victim(now_s)
        return None if name is None else self._by_name[name]

    def idle(self) -> list[BlockName]:
        """Names that nothing holds, children before parents."""
        idle = [r for r in self._by_name.values() if r.refs == 0]
        idle.sort(key=lambda r: -r.depth)
        return [r.name for r in idle]

    def _review(self, name: BlockName, now_s: float) -> None:
        resident = self._by_name.get(name)
        wanted = resident is not None and not resident.refs and not resident.children
        if wanted and name not in self._offered:
            self._offered.add(name)
            self._policy.add_evictable(name, now_s)
        elif not wanted and name in self._offered:
            self._offered.discard(name)
            self._policy.remove_evictable(name)

    def violations(self, pending_children: Sequence[BlockName] = ()) -> list[str]:
        """Everything that is wrong here, as sentences. `pending_children`: parents of blocks being written."""
        wrong: list[str] = []
        children: dict[BlockName, int] = {}
        parents = [r.parent for r in self._by_name.values() if r.parent is not None]
        for parent in [*parents, *pending_children]:
            children[parent] = children.get(parent, 0) + 1
        counted = self._orphans | {name: r.children for name, r in self._by_name.items() if r.children}
        if children != counted:
            wrong.append(f"child counts {counted} differ from the true ones {children}")
        held = sum(r.refs > 0 for r in self._by_name.values())
        if held != self.held:
            wrong.append(f"{held} residents are held, {self.held} were counted")
        for name, resident in self._by_name.items():
            if resident.name != name:
                wrong.append(f"block {name.hex()} is filed under another name")
            if resident.refs < 0:
                wrong.append(f"block {name.hex()} has {resident.refs} references")
            may_go = resident.refs == 0 and name not in children
            if may_go != (name in self._offered):
                wrong.append(f"block {name.hex()}: refs {resident.refs}, children {children.get(name, 0)}, "
                             f"but offered={name in self._offered}")  # fmt: skip
        wrong += [f"{name.hex()} is offered but not here" for name in self._offered if name not in self._by_name]
        return wrong
