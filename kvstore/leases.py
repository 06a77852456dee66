"""Read leases of one owner, counted per block: a whole prompt is added or given back in one go. Pure."""

from collections.abc import Iterator, Sequence

from headrace.ids import BlockName
from headrace.kvstore.residents import Resident


class Leases:
    """Nearly every block is leased once by an owner, so one dict holds the first lease of each; further ones of the
    same name (also of a block that was dropped and written again meanwhile) queue up behind it."""

    def __init__(self) -> None:
        self._first: dict[BlockName, Resident] = {}
        self._more: dict[BlockName, list[Resident]] = {}

    def __len__(self) -> int:
        return len(self._first) + sum(map(len, self._more.values()))

    def __iter__(self) -> Iterator[Resident]:
        yield from self._first.values()
        for queue in self._more.values():
            yield from queue

    def add(self, residents: Sequence[Resident]) -> None:
        """One more lease on each."""
        new = {resident.name: resident for resident in residents}
        if len(new) == len(residents) and self._first.keys().isdisjoint(new):
            self._first.update(new)
            return
        for resident in residents:
            name = resident.name
            if name in self._first:
                self._more.setdefault(name, []).append(resident)
            else:
                self._first[name] = resident

    def take(self, names: Sequence[BlockName]) -> list[Resident]:
        """End one lease on each, the oldest first; returns their blocks. Names without a lease are skipped."""
        taken = []
        for name in names:
            resident = self._first.pop(name, None)
            if resident is None:
                continue
            taken.append(resident)
            if name in self._more:
                queue = self._more[name]
                self._first[name] = queue.pop(0)
                if not queue:
                    del self._more[name]
        return taken
