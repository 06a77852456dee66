"""Pairs of prefill group and decode rank that do not work together: left out for a while, tried again, healed.

A pair fails when a handover between them does (blocks that the rank cannot read, a stream that breaks). After `TRIPS`
failures in a row it is open for a second, twice as long after each failed trial; one success closes it.
"""

import dataclasses

TRIPS = 3
OPEN_S = (1.0, 60.0)
"""First and longest time that a pair is left out."""


@dataclasses.dataclass(slots=True)
class _State:
    failures: int = 0
    open_until: float = 0.0
    pause_s: float = OPEN_S[0]


class Breakers:
    def __init__(self) -> None:
        self._pairs: dict[tuple[str, str], _State] = {}

    def allows(self, pair: tuple[str, str], now: float) -> bool:
        """False while the pair is left out. The first request after that is its trial; others wait for its end."""
        state = self._pairs.get(pair)
        return state is None or state.failures < TRIPS or now >= state.open_until

    def taken(self, pair: tuple[str, str], now: float) -> None:
        """A request goes to the pair: an open one is on trial and takes no other meanwhile."""
        state = self._pairs.get(pair)
        if state is not None and state.failures >= TRIPS:
            state.open_until = now + state.pause_s

    def failed(self, pair: tuple[str, str], now: float) -> None:
        state = self._pairs.setdefault(pair, _State())
        state.failures += 1
        if state.failures >= TRIPS:
            if state.failures > TRIPS:
                state.pause_s = min(2 * state.pause_s, OPEN_S[1])
            state.open_until = now + state.pause_s

    def worked(self, pair: tuple[str, str]) -> None:
        self._pairs.pop(pair, None)

    def open(self, now: float) -> list[tuple[str, str]]:
        """Pairs that are left out now."""
        return [pair for pair in self._pairs if not self.allows(pair, now)]
