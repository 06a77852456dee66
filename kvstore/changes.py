"""What a tier gained and lost since somebody last asked. Pure."""

from headrace.ids import BlockName
from headrace.kvstore.names import is_private


class ChangeSet:
    """Net changes: a block that came and went in between appears in neither list. Private names never appear."""

    def __init__(self) -> None:
        self._added: set[BlockName] = set()
        self._removed: set[BlockName] = set()

    def __bool__(self) -> bool:
        return bool(self._added or self._removed)

    def add(self, name: BlockName) -> None:
        self._note(name, self._added, self._removed)

    def remove(self, name: BlockName) -> None:
        self._note(name, self._removed, self._added)

    def take(self) -> tuple[list[BlockName], list[BlockName]]:
        """(added, removed); the set is empty afterwards."""
        changes = list(self._added), list(self._removed)
        self._added.clear()
        self._removed.clear()
        return changes

    @staticmethod
    def _note(name: BlockName, into: set[BlockName], opposite: set[BlockName]) -> None:
        if is_private(name):
            return
        if name in opposite:
            opposite.discard(name)
        else:
            into.add(name)
