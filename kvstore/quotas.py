"""How much of a tier each tenant may fill. Pure.

A tenant is an id of 8 bytes made from the root of its names (`names.tenant_id`); the empty id is nobody's and has no
limit. A tenant at its limit makes room for a new block by its own least valuable one, never by another tenant's; if all
it has is held, the write is skipped like one into a full tier. Below its limit it competes with everybody else.

`Quotas` stands between the tier and its eviction policy: beside the policy of the whole tier it keeps one of the same
kind for each limited tenant, fed with that tenant's blocks alone.
"""

from collections.abc import Callable, Sequence

from headrace.ids import BlockName
from headrace.kvstore.base import BatchPolicy, BlockMeta, EvictionPolicy
from headrace.kvstore.policies import make_policy

TENANT_BYTES = 8
NOBODY = b""


class Quotas:
    """Implements `EvictionPolicy` (and `BatchPolicy`) for the whole tier. `make` gives a fresh policy of the tier's
    kind for a number of blocks (without it nobody can be limited); `default_blocks` is the limit of tenants without one
    of their own, None: no limit."""

    def __init__(
        self,
        whole: EvictionPolicy,
        make: Callable[[int], EvictionPolicy] | None = None,
        default_blocks: int | None = None,
    ) -> None:
        self._whole, self._make, self._default = whole, make, default_blocks
        self._batch = whole if isinstance(whole, BatchPolicy) else None
        self._limits: dict[bytes, int] = {}
        self._used: dict[bytes, int] = {}
        self._own: dict[bytes, EvictionPolicy] = {}
        self._member: dict[BlockName, EvictionPolicy] = {}
        """Block of a limited tenant -> that tenant's own policy."""
        self.refused = 0
        """Blocks that were not written because their tenant was at its limit with all it had held."""

    # --- limits -----------------------------------------------------------------------------------------------------

    def limit(self, tenant: bytes) -> int | None:
        return None if tenant == NOBODY else self._limits.get(tenant, self._default)

    def used(self, tenant: bytes) -> int:
        """Blocks that are visible or being written."""
        return self._used.get(tenant, 0)

    def is_full(self, tenant: bytes) -> bool:
        limit = self.limit(tenant)
        return limit is not None and self.used(tenant) >= limit

    def is_over(self, tenant: bytes) -> bool:
        limit = self.limit(tenant)
        return limit is not None and self.used(tenant) > limit

    def limited(self) -> list[bytes]:
        """Tenants that have a limit of their own."""
        return list(self._limits)

    def set_limit(
        self, tenant: bytes, blocks: int | None, present: Sequence[tuple[BlockMeta, bool]], now_s: float
    ) -> None:
        """None: back to the default. `present`: all blocks of this tenant in the tier, oldest first, and whether each
        may be evicted now. Raises ValueError for what is no tenant."""
        if len(tenant) != TENANT_BYTES or self._make is None:
            raise ValueError(f"a tenant with a quota is an id of {TENANT_BYTES} bytes, not {tenant.hex() or 'nobody'}")
        if blocks is None:
            self._limits.pop(tenant, None)
        else:
            self._limits[tenant] = blocks
        for meta, _ in present:
            self._member.pop(meta.name, None)
        self._own.pop(tenant, None)
        if self.limit(tenant) is None:
            return
        for meta, evictable in present:
            self._join(meta, now_s)
            if evictable:
                self._member[meta.name].add_evictable(meta.name, now_s)

    def victim_of(self, tenant: bytes, now_s: float) -> BlockName | None:
        """The tenant's own evictable block to drop next."""
        own = self._own.get(tenant)
        return None if own is None else own.victim(now_s)

    def count(self, tenant: bytes, change: int) -> None:
        """A block of this tenant began (+1) or ceased (-1) to be written or visible."""
        if tenant != NOBODY:
            left = self._used.get(tenant, 0) + change
            if left:
                self._used[tenant] = left
            else:
                del self._used[tenant]

    def stats(self) -> dict[str, float]:
        values = {"quota_refused_total": float(self.refused), "tenants": float(len(self._used))}
        for tenant in {*self._limits, *self._own}:
            limit = self.limit(tenant)
            label = f"{{tenant={tenant.hex()}}}"
            values[f"tenant_blocks{label}"] = float(self.used(tenant))
            if limit is not None:
                values[f"tenant_limit_blocks{label}"] = float(limit)
        return values

    def violations(self, tenants: Sequence[bytes]) -> list[str]:
        """`tenants`: owner of each block that is visible or being written."""
        true: dict[bytes, int] = {}
        for tenant in tenants:
            if tenant != NOBODY:
                true[tenant] = true.get(tenant, 0) + 1
        return [] if true == self._used else [f"blocks by tenant are {true}, {self._used} were counted"]

    # --- EvictionPolicy ---------------------------------------------------------------------------------------------

    def on_insert(self, block: BlockMeta, now_s: float) -> None:
        self._whole.on_insert(block, now_s)
        if self.limit(block.tenant) is not None:
            self._join(block, now_s)

    def on_hit(self, name: BlockName, now_s: float) -> None:
        self._whole.on_hit(name, now_s)
        if name in self._member:
            self._member[name].on_hit(name, now_s)

    def on_hits(self, names: Sequence[BlockName], now_s: float) -> None:
        if self._batch is not None:
            self._batch.on_hits(names, now_s)
        else:
            for name in names:
                self._whole.on_hit(name, now_s)
        if self._member:
            for name in names:
                if name in self._member:
                    self._member[name].on_hit(name, now_s)

    def add_evictable(self, name: BlockName, now_s: float) -> None:
        self._whole.add_evictable(name, now_s)
        if name in self._member:
            self._member[name].add_evictable(name, now_s)

    def remove_evictable(self, name: BlockName) -> None:
        self._whole.remove_evictable(name)
        if name in self._member:
            self._member[name].remove_evictable(name)

    def on_remove(self, name: BlockName) -> None:
        self._whole.on_remove(name)
        own = self._member.pop(name, None)
        if own is not None:
            own.on_remove(name)

    def victim(self, now_s: float) -> BlockName | None:
        return self._whole.victim(now_s)

    def _join(self, block: BlockMeta, now_s: float) -> None:
        own = self._own.get(block.tenant)
        if own is None:
            assert self._make is not None
            own = self._own[block.tenant] = self._make(self.limit(block.tenant) or 1)
        self._member[block.name] = own
        own.on_insert(block, now_s)


def quotas_of(whole: EvictionPolicy, policy: str, slots: int, share: float) -> Quotas:
    """Quotas around the policy called `policy` of a tier: each tenant may fill `share` (0..1) of it, 1: no limit."""
    default = None if share >= 1.0 else int(slots * share)
    return Quotas(whole, lambda blocks: make_policy(policy, blocks), default)
