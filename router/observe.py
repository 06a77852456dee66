"""What the engine and the API layer report; the metrics implement it, tests may ignore it."""

from typing import Protocol

from headrace.errors import HeadraceError
from headrace.ids import RequestId
from headrace.messages import PrefillDone
from headrace.router.base import Demand, Ticket


class EngineObserver(Protocol):
    def placed(self, ticket: Ticket, demand: Demand) -> None:
        """A place was taken."""
        ...

    def accepted(self, demand: Demand) -> None:
        """The decode rank holds all blocks."""
        ...

    def prefilled(self, ticket: Ticket, demand: Demand, done: PrefillDone) -> None:
        """A prompt was computed."""
        ...

    def stepped(self, drafted: int, accepted: int, since_last_s: float) -> None:
        """A decode rank delivered tokens of one sequence."""
        ...

    def retried(self, request_id: RequestId, error: HeadraceError) -> None:
        """An attempt failed so and is repeated."""
        ...

    def abort_unconfirmed(self) -> None: ...


class Observers:
    """Reports to several, in order."""

    def __init__(self, *all_of_them: EngineObserver) -> None:
        self._all = all_of_them

    def placed(self, ticket: Ticket, demand: Demand) -> None:
        for one in self._all:
            one.placed(ticket, demand)

    def accepted(self, demand: Demand) -> None:
        for one in self._all:
            one.accepted(demand)

    def prefilled(self, ticket: Ticket, demand: Demand, done: PrefillDone) -> None:
        for one in self._all:
            one.prefilled(ticket, demand, done)

    def stepped(self, drafted: int, accepted: int, since_last_s: float) -> None:
        for one in self._all:
            one.stepped(drafted, accepted, since_last_s)

    def retried(self, request_id: RequestId, error: HeadraceError) -> None:
        for one in self._all:
            one.retried(request_id, error)

    def abort_unconfirmed(self) -> None:
        for one in self._all:
            one.abort_unconfirmed()
