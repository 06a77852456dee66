"""What the engine and the API layer report; the metrics implement it, tests may ignore it."""

from typing import Protocol

from headrace.messages import PrefillDone
from headrace.router.base import Demand, Ticket


class EngineObserver(Protocol):
    def prefilled(self, ticket: Ticket, demand: Demand, done: PrefillDone) -> None:
        """A prompt was computed."""
        ...

    def stepped(self, drafted: int, accepted: int, since_last_s: float) -> None:
        """A decode rank delivered tokens of one sequence."""
        ...

    def retried(self, kind: str) -> None:
        """An attempt failed with this error kind and is repeated."""
        ...

    def abort_unconfirmed(self) -> None: ...
