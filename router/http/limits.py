"""What a tenant may use: requests and prompt tokens a second, requests at a time, weight and priority in the queue.

Rates are token buckets that hold ten seconds' worth; a refusal says when asking again helps. One router's view: with n
routers a tenant that uses all of them gets up to n times as much.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator

from headrace.errors import CapacityError, ConfigError

BURST_S = 10.0
"""A bucket holds what so many seconds bring."""
EVERYBODY = "*"


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    requests_per_s: float = math.inf
    tokens_per_s: float = math.inf
    """Prompt tokens."""
    concurrency: float = math.inf
    """Requests in the house."""
    weight: float = 1.0
    """Share of the room while others wait, relative to theirs."""
    priority: int = 0
    """Added to what a request asks for."""


def parse_limits(entries: Iterable[str]) -> dict[str, Limits]:
    """From `tenant:requests_per_s=5,concurrency=8,weight=2`; `*` stands for every tenant that is not named. Raises
    ConfigError."""
    found: dict[str, Limits] = {}
    names = {field.name for field in dataclasses.fields(Limits)}
    for entry in entries:
        tenant, _, rest = entry.rpartition(":")
        values: dict[str, float] = {}
        for part in rest.split(","):
            name, _, text = part.partition("=")
            try:
                values[name.strip()] = float(text)
            except ValueError:
                values[name.strip()] = math.nan
        wrong = [n for n, v in values.items() if n not in names or math.isnan(v) or (v <= 0 and n != "priority")]
        if not tenant or wrong:
            raise ConfigError(
                f"router.tenant_limits: {entry!r}: expected tenant:name=number,... with the names "
                f"{', '.join(sorted(names))}, numbers above 0"
            )
        priority = int(values.pop("priority", 0))
        found[tenant] = Limits(**values, priority=priority)
    return found


@dataclasses.dataclass(slots=True)
class _Bucket:
    rate: float
    level: float
    at: float

    def fill(self, now: float) -> None:
        self.level = min(self.rate * BURST_S, self.level + (now - self.at) * self.rate)
        self.at = now

    def wait_s(self, amount: float) -> float:
        """Seconds until it holds `amount`, or all it can hold."""
        return max(0.0, (min(amount, self.rate * BURST_S) - self.level) / self.rate)


@dataclasses.dataclass(slots=True)
class _Use:
    requests: _Bucket
    tokens: _Bucket
    running: int = 0


class TenantLimits:
    """Lives on the event loop."""

    def __init__(self, limits: dict[str, Limits], clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._use: dict[str, _Use] = {}

    def of(self, tenant: str) -> Limits:
        return self._limits.get(tenant) or self._limits.get(EVERYBODY) or Limits()

    def weight(self, tenant: str) -> float:
        return self.of(tenant).weight

    @contextlib.contextmanager
    def request(self, tenant: str) -> Iterator[None]:
        """One request of the tenant in the house. Raises CapacityError."""
        limits, use = self.of(tenant), self._used(tenant)
        if use.running >= limits.concurrency:
            raise CapacityError(f"{use.running} requests of this key are running, at most {limits.concurrency:g} may")
        self._charge(use.requests, 1.0, f"more than {limits.requests_per_s:g} requests a second")
        use.running += 1
        try:
            yield
        finally:
            use.running -= 1

    def charge_tokens(self, tenant: str, tokens: int) -> None:
        """Raises CapacityError. A prompt larger than the bucket is let through when it is full, and paid off after."""
        self._charge(self._used(tenant).tokens, tokens, f"more than {self.of(tenant).tokens_per_s:g} tokens a second")

    def _charge(self, bucket: _Bucket, amount: float, what: str) -> None:
        if math.isinf(bucket.rate):
            return
        bucket.fill(self._clock())
        wait = bucket.wait_s(amount)
        if wait > 1e-9:
            raise CapacityError(f"this key sends {what}", wait)
        bucket.level -= amount

    def _used(self, tenant: str) -> _Use:
        use = self._use.get(tenant)
        if use is None:
            now, limits = self._clock(), self.of(tenant)
            requests, tokens = (
                _Bucket(rate, rate * BURST_S, now) for rate in (limits.requests_per_s, limits.tokens_per_s)
            )
            use = self._use[tenant] = _Use(requests, tokens)
        return use
