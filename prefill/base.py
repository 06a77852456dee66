"""Contracts of the prefill room: what a rank needs to execute a plan, and what the leader's engine drives.

One step is: the leader's scheduler builds a `StepPlan`, every rank executes it (`StepRunner`), the leader merges the
acknowledgements into one `StepOutcome` and gives it back to the scheduler. Nothing here decides anything alone.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headrace.kvstore.base import StoreClient
from headrace.model.base import Exchange
from headrace.prefill.plan import RestorePlan, StepOutcome, StepPlan, StorePlan


class NodeStore(StoreClient, Protocol):
    """What the leader needs of its store client beside the common contract."""

    def reconnect(self) -> None:
        """Dial the daemon again after DaemonUnavailable. Leases and unfinished writes from before are gone. Raises
        DaemonUnavailable."""
        ...


class StepExchange(Exchange, Protocol):
    """An exchange whose shape can be set. All ranks call `begin` with equal arguments, in the same order."""

    def begin(self, owner: npt.NDArray[np.int64], *, shared_cache: bool) -> None:
        """The next calls are about rows dealt as `owner` (int64 [T], rank of each row). `shared_cache`: cache rows are
        gathered, every rank writes all of them; False: each rank writes its own only."""
        ...


class Restoring(Protocol):
    """Restores of one step under way. What reads planes through `latent` and `index` waits for its bytes alone."""

    latent: Any
    index: Any

    def finish(self) -> list[int]:
        """Wait for all of them, once, whatever happened meanwhile. Returns the indices of restores whose bytes are not
        there or (checked on a share of them) do not have their digest."""
        ...


class Slabs(Protocol):
    """Moves whole blocks between this rank's pool and host slots. Fenced: a store sees what was computed before it, a
    load is complete for what is computed after it."""

    def enter(self, arena: str) -> bool:
        """The next loads and stores are of this host tier. False: this rank cannot reach it now, do neither."""
        ...

    def begin_load(self, restores: Sequence[RestorePlan], *, reachable: bool) -> "Restoring":
        """Start copying; on every rank of the group, with equal restores, also on one that cannot reach the host
        tier."""
        ...

    def store(self, stores: Sequence[StorePlan]) -> list[bytes]:
        """Returns the digest of each slab written."""
        ...


class StepRunner(Protocol):
    """Executes one plan on all ranks of a group."""

    ranks: int

    def run(self, plan: StepPlan) -> StepOutcome:
        """Blocks until every rank has acknowledged. Raises RankLost when the group is no longer in step."""
        ...

    def check(self) -> None:
        """Raises RankLost when a rank is known to be gone; called when there is nothing to run."""
        ...

    def close(self) -> None:
        """End the followers."""
        ...
