"""Where blocks are, in memory: sets of names per node and place, fed with events. Pure, single-threaded.

A node's host and disk tier also count as one place, STORED: what a prompt can get from the node without computing.

One dict from name to a bit set of places: a lookup walks the prompt once and narrows the set of places that have had
every block so far.
"""

from collections.abc import Iterable, Sequence

from headrace.ids import BlockName
from headrace.kvstore.base import Placement
from headrace.kvstore.daemon.events import DISK_PLACE, HOST_PLACE
from headrace.kvstore.wire import Events, unpack_names

Place = tuple[str, str]
"""(node, place on it)"""
STORED = "host or disk"
_STORES = (HOST_PLACE, DISK_PLACE)


class PlaceIndex:
    """All places of all nodes."""

    def __init__(self) -> None:
        self._bits: dict[BlockName, int] = {}
        self._place_bit: dict[Place, int] = {}
        self._held: dict[Place, set[BlockName]] = {}

    def __len__(self) -> int:
        return len(self._bits)

    def apply(self, node: str, events: Events) -> None:
        """Events in order, or a snapshot that replaces everything known of this node."""
        if events.snapshot:
            self.forget(node)
        for change in events.changes:
            if change.gone:
                self._forget_place((node, change.place))
            else:
                self.change((node, change.place), unpack_names(change.added), unpack_names(change.removed))

    def change(self, place: Place, added: Sequence[BlockName], removed: Sequence[BlockName]) -> None:
        if place not in self._held:
            self._held[place] = set()
            self._bit_of(place)
        held, bits = self._held[place], self._bits
        # With STORED's bit, if that is a place of its own here: only a node with a disk tier has it.
        bit = self._place_bit[place] | self._stored_bit(place)
        for name in added:
            held.add(name)
            bits[name] = bits.get(name, 0) | bit
        self._remove(place, removed)
        held.difference_update(removed)

    def forget(self, node: str) -> None:
        for place in [p for p in self._held if p[0] == node]:
            self._forget_place(place)

    def lookup(self, names: Sequence[BlockName]) -> Placement:
        """Leading runs per place; places without the first block do not appear."""
        run: dict[int, int] = {}
        left, blocks, bits = -1, 0, self._bits
        for name in names:
            here = bits.get(name, 0) & left
            if here != left:
                if blocks:
                    run[left & ~here] = blocks
                left = here
            if not left:
                break
            blocks += 1
        if left > 0:
            run[left] = blocks
        host: dict[str, int] = {}
        stored: dict[str, int] = {}
        device: dict[str, int] = {}
        for (node, place), bit in self._place_bit.items():
            for mask, length in run.items():
                if mask & bit:
                    if place == HOST_PLACE:
                        host[node] = length
                    elif place == STORED:
                        stored[node] = length
                    elif place != DISK_PLACE:
                        device[place] = max(length, device.get(place, 0))
        deeper = {node: length for node, length in stored.items() if length > host.get(node, 0)}
        return Placement(host, device, deeper)

    def held(self, place: Place) -> set[BlockName]:
        """Names known in one place."""
        return self._held.get(place, set())

    def stats(self) -> dict[str, float]:
        sizes = {f"blocks{{node={node},place={place}}}": float(len(held)) for (node, place), held in self._held.items()}
        return {"names": float(len(self._bits)), **sizes}

    def _forget_place(self, place: Place) -> None:
        held = self._held.pop(place, None)
        if held is None:
            return
        self._remove(place, held)
        del self._place_bit[place]
        if place[1] == DISK_PLACE:
            # Without a disk, what is stored is what the host tier has.
            bit = self._place_bit.pop((place[0], STORED))
            for name in self._held.get((place[0], HOST_PLACE), ()):
                self._clear(name, bit)

    def _remove(self, place: Place, names: Iterable[BlockName]) -> None:
        """Clear the place's bit, and STORED's where the node's other tier does not have the block either."""
        node, kind = place
        bit, stored = self._place_bit[place], self._stored_bit(place)
        other = self._place_bit.get((node, HOST_PLACE if kind == DISK_PLACE else DISK_PLACE), 0)
        for name in names:
            self._clear(name, bit if self._bits.get(name, 0) & other else bit | stored)

    def _stored_bit(self, place: Place) -> int:
        return self._place_bit.get((place[0], STORED), 0) if place[1] in _STORES else 0

    def _bit_of(self, place: Place) -> None:
        """Give a new place its bit; a node's first disk tier makes STORED a place."""
        self._place_bit[place] = _free_bit(set(self._place_bit.values()))
        if place[1] == DISK_PLACE:
            bit = self._place_bit[(place[0], STORED)] = _free_bit(set(self._place_bit.values()))
            for name in self._held.get((place[0], HOST_PLACE), ()):
                self._bits[name] |= bit

    def _clear(self, name: BlockName, bits: int) -> None:
        left = self._bits.get(name, 0) & ~bits
        if left:
            self._bits[name] = left
        else:
            self._bits.pop(name, None)


def _free_bit(taken: set[int]) -> int:
    bit = 1
    while bit in taken:
        bit <<= 1
    return bit
