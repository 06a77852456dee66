"""Whether a device may be used: off after failures in a row, on again after a probe that works. Pure."""

import time
from collections.abc import Callable

FAILURES_TO_OFF = 3


class Health:
    """Starts on. A failure is an error of the device or a transfer past its deadline."""

    def __init__(self, *, retry_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`retry_s`: pause before each probe while off."""
        self.on = True
        self.reason = ""
        """Why it is off."""
        self.times_off = 0
        self._retry_s = retry_s
        self._clock = clock
        self._in_a_row = 0
        self._probe_s = 0.0

    def failed(self, reason: str) -> bool:
        """True if this failure switched it off."""
        self._in_a_row += 1
        if self.on and self._in_a_row >= FAILURES_TO_OFF:
            self.switch_off(reason)
            return True
        return False

    def switch_off(self, reason: str) -> None:
        self.on, self.reason = False, reason
        self.times_off += 1
        self._probe_s = self._clock() + self._retry_s

    def succeeded(self) -> None:
        """A transfer worked. What ends late while it is off does not switch it on."""
        self._in_a_row = 0

    def probe_due(self) -> bool:
        """True once per pause while off."""
        if self.on or self._clock() < self._probe_s:
            return False
        self._probe_s = self._clock() + self._retry_s
        return True

    def probed(self, works: bool) -> None:
        if works:
            self.on, self.reason, self._in_a_row = True, "", 0
