"""How many tokens to draft: as many as pay, by the acceptance and the step times measured on this rank. Pure.

A step of B sequences with n drafts yields B (1 + a1 + a1 a2 + ... + a1..an) tokens, where ai is the share of i-th
drafts accepted among those whose predecessors were. It takes c0 + c1 rows + c2 (n - 1) seconds: the group verifies
rows = B (1 + n) rows, and the first draft comes with the extend. The ai and the c are averages that forget; the length
with the highest yield per second wins. When a step is bound by its rows (large batches), c1 outweighs c0 and the length
goes down by itself.
"""

from collections.abc import Sequence

PROBE_STEPS = 50
"""Every so many steps one step drafts one token more or fewer: without that, c1 and c2 could not be told apart."""
FORGET = 0.99
"""Weight of a step against the next one."""
PRIOR = 2.0
"""Drafts that count as accepted for certain before any is measured: a new rank starts with the full length."""
GAIN = 1.02
"""Another length has to promise this much more before it replaces the present one."""


class DraftLength:
    """Lengths from 0 to `most`. One thread."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.current = most
        self._tried = [PRIOR] * most
        self._kept = [PRIOR] * most
        self._times = _Times()
        self._steps = 0

    def accepted(self, drafted: int, accepted: int) -> None:
        """One sequence verified `drafted` drafts and kept the first `accepted`."""
        for at in range(min(drafted, self.most)):
            if at > accepted:
                break
            self._tried[at] = self._tried[at] * FORGET + 1.0
            self._kept[at] = self._kept[at] * FORGET + (at < accepted)

    def took(self, rows: int, draft_steps: int, seconds: float) -> None:
        """A step of the group verified `rows` rows, ran `draft_steps` draft phases, and took so long."""
        self._times.add(rows, draft_steps, seconds)

    def acceptance(self) -> list[float]:
        """Share of i-th drafts accepted, given that those before were."""
        return [kept / tried for kept, tried in zip(self._kept, self._tried)]

    def tokens_per_step(self, length: int) -> float:
        """Expected tokens of one sequence in one step."""
        total, chance = 1.0, 1.0
        for share in self.acceptance()[:length]:
            chance *= share
            total += chance
        return total

    def choose(self, sequences: int) -> int:
        """Drafts to make for the next step of `sequences` sequences of the group."""
        self._steps += 1
        speed = [self._speed(sequences, length) for length in range(self.most + 1)]
        best = max(range(self.most + 1), key=lambda length: speed[length])
        if speed[best] > GAIN * speed[self.current]:
            self.current = best
        if self._steps % PROBE_STEPS == 0 and self.most:
            up = self._steps % (2 * PROBE_STEPS) == 0
            return min(self.most, self.current + 1) if up else max(0, self.current - 1)
        return self.current

    def _speed(self, sequences: int, length: int) -> float:
        seconds = self._times.predict(sequences * (1 + length), max(0, length - 1))
        return self.tokens_per_step(length) / seconds if seconds > 0 else float(length == self.most)


class _Times:
    """Least squares of seconds over (1, rows, draft steps), older steps weighing less. Negative coefficients are left
    out and the rest fitted again: neither rows nor draft steps make a step shorter."""

    def __init__(self) -> None:
        self._a = [[0.0] * 3 for _ in range(3)]
        self._b = [0.0] * 3
        self._fitted: list[float] | None = None

    def add(self, rows: int, draft_steps: int, seconds: float) -> None:
        x = (1.0, float(rows), float(draft_steps))
        for i in range(3):
            self._b[i] = self._b[i] * FORGET + x[i] * seconds
            for j in range(3):
                self._a[i][j] = self._a[i][j] * FORGET + x[i] * x[j]
        self._fitted = None

    def predict(self, rows: int, draft_steps: int) -> float:
        if self._fitted is None:
            self._fitted = self._fit()
        c0, c1, c2 = self._fitted
        return c0 + c1 * rows + c2 * draft_steps

    def _fit(self) -> list[float]:
        used = [0, 1, 2]
        while used:
            found = _solve([[self._a[i][j] for j in used] for i in used], [self._b[i] for i in used])
            if min(found) >= 0.0:
                return [found[used.index(i)] if i in used else 0.0 for i in range(3)]
            used.remove(used[found.index(min(found))])
        return [0.0] * 3


def _solve(a: Sequence[Sequence[float]], b: Sequence[float]) -> list[float]:
    """Gauss-Jordan with a ridge of one part in a million, which decides what the data leave open."""
    n = len(b)
    rows = [[*a[i], b[i]] for i in range(n)]
    for i in range(n):
        rows[i][i] += 1e-6 * (a[i][i] + 1e-9)
    for i in range(n):
        pivot = max(range(i, n), key=lambda r: abs(rows[r][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        scale = rows[i][i]
        rows[i] = [value / scale for value in rows[i]]
        for r in range(n):
            if r != i:
                factor = rows[r][i]
                rows[r] = [x - factor * y for x, y in zip(rows[r], rows[i])]
    return [row[n] for row in rows]
