"""When a block of one tier is also written to the tier below. Pure; the daemon and the simulator drive these classes.

`uses` is how often the block was used so far (`sketch.CountSketch`): once when it was put, then once for each hit.
"""

from typing import Protocol

from headrace.errors import ConfigError


class WritePolicy(Protocol):
    """Asked at three moments in the life of a block that is not below yet. Blocks used less than `admit_uses` times are
    not asked about: the admission filter."""

    def on_use(self, uses: int) -> bool:
        """It was put, or hit."""
        ...

    def on_evict(self, uses: int) -> bool:
        """It is about to leave the tier."""
        ...


class Through:
    """As soon as the admission filter lets it."""

    def on_use(self, uses: int) -> bool:
        return True

    def on_evict(self, uses: int) -> bool:
        return False


class ThroughSelective:
    """After `hits` hits."""

    def __init__(self, hits: int) -> None:
        self.hits = hits

    def on_use(self, uses: int) -> bool:
        return uses > self.hits

    def on_evict(self, uses: int) -> bool:
        return False


class Back:
    """When it leaves."""

    def on_use(self, uses: int) -> bool:
        return False

    def on_evict(self, uses: int) -> bool:
        return True


def make_write_policy(name: str) -> WritePolicy:
    """`through`, `through_selective:<hits>` or `back`. Raises ConfigError."""
    kind, _, argument = name.partition(":")
    if kind == "through_selective":
        if not argument.isdigit() or int(argument) < 1:
            raise ConfigError(f"write policy {name!r}: expected through_selective:<hits> with 1 or more hits")
        return ThroughSelective(int(argument))
    if argument or kind not in ("through", "back"):
        raise ConfigError(f"write policy {name!r} is not one of through, through_selective:<hits>, back")
    return Through() if kind == "through" else Back()
