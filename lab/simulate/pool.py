"""One pool of blocks, one eviction policy, one trace: the hit rate and nothing else. No time passes while a request
runs, so a request holds its blocks only while its own new blocks are put in.

The pool is `kvstore.residents.Residents` driving a policy of `kvstore.policies`, exactly as `DeviceIndex` and the host
tier do; what is left out is slots and references of blocks that cannot be evicted anyway (their child is here). A test
holds that both give the same hits.

One request:
1. match the leading run of its names and tell the policy about each hit;
2. hold the last block of the run (its ancestors have a child here, so nobody can evict them);
3. evict until the rest of the chain fits; of a chain longer than the pool only the leading part is kept;
4. insert the rest, parent before child, and let go.

Before each request, a policy with a time to live drops what has expired.
"""

import dataclasses
from collections.abc import Sequence

from headrace.ids import BlockName, SlotIndex
from headrace.kvstore.base import BlockMeta, EvictionPolicy, ExpiringPolicy
from headrace.kvstore.policies import make_policy
from headrace.kvstore.residents import Resident, Residents
from headrace.lab.analysis.ideal import HitTally
from headrace.lab.simulate.clairvoyant import ClairvoyantPolicy, ReuseOracle
from headrace.lab.simulate.flat import FlatPool
from headrace.lab.traces.form import Trace

_NO_SLOT = SlotIndex(0)
CLAIRVOYANT = "clairvoyant"
ORACLES = {CLAIRVOYANT: ClairvoyantPolicy, "reuse-oracle": ReuseOracle}
"""Policies that are told the future, by name; `clairvoyant` is the bound."""
UNLIMITED = 0
"""Capacity that means: never evict."""


@dataclasses.dataclass(frozen=True, slots=True)
class PoolResult:
    policy: str
    capacity_blocks: int
    tally: HitTally
    inserted: int
    evicted: int


class Pool:
    """A pool of `capacity_blocks` blocks of `block_bytes` each (what cost-aware policies weigh)."""

    def __init__(self, capacity_blocks: int, policy: EvictionPolicy, block_bytes: int = 1) -> None:
        self.capacity_blocks = capacity_blocks
        self.inserted = 0
        self.evicted = 0
        self._block_bytes = block_bytes
        self._policy = policy
        self._residents = Residents(policy)

    def __len__(self) -> int:
        return len(self._residents)

    def request(self, names: Sequence[BlockName], now_s: float) -> int:
        """Serve one prompt; returns how many leading blocks were here."""
        residents = self._residents
        run = residents.leading(names)
        for resident in run:
            residents.hit(resident, now_s)
        hit = len(run)
        wanted = names[hit : self.capacity_blocks]
        if not wanted:
            return hit
        above = run[-1] if run else None
        if above is not None:
            residents.hold(above, now_s)
        self._make_room(len(wanted), now_s)
        for depth, name in enumerate(wanted, hit):
            parent = None if above is None else above.meta.name
            block = Resident(BlockMeta(name, parent, depth, self._block_bytes), _NO_SLOT, 1)
            residents.insert(block, now_s)
            if above is not None:
                # From here on its child keeps it.
                residents.unhold(above, now_s)
            above = block
        assert above is not None
        residents.unhold(above, now_s)
        self.inserted += len(wanted)
        return hit

    def expire(self, now_s: float) -> None:
        """Drop what a policy with a time to live no longer wants, as the host tier does every second or so."""
        if isinstance(self._policy, ExpiringPolicy):
            while (name := self._policy.expired(now_s)) is not None:
                self._residents.remove(name, now_s)
                self.evicted += 1

    def violations(self) -> list[str]:
        over = [f"{len(self)} blocks in a pool of {self.capacity_blocks}"] if len(self) > self.capacity_blocks else []
        return over + self._residents.violations()

    def _make_room(self, count: int, now_s: float) -> None:
        residents = self._residents
        for _ in range(len(residents) + count - self.capacity_blocks):
            victim = residents.victim(now_s)
            if victim is None:
                raise RuntimeError(f"nothing to evict: {len(residents)} of {self.capacity_blocks} blocks, all held")
            residents.remove(victim.meta.name, now_s)
            self.evicted += 1


def simulate_pool(
    trace: Trace, policy: str, capacity_blocks: int, leaves_first: bool = True, warmup: float = 0.0
) -> PoolResult:
    """Replay `trace` in recorded order. `policy` is a name of `kvstore.policies` or of `ORACLES`. `leaves_first`
    False: as published single-pool tables count (`flat.py`). The first `warmup` share of the requests fills the
    pool and is not counted."""
    capacity = capacity_blocks if capacity_blocks != UNLIMITED else trace.num_blocks
    arrivals = trace.arrivals()
    names = block_names(trace)
    if policy in ORACLES:
        made: EvictionPolicy = ORACLES[policy]([a.request for a in arrivals], names)
    else:
        made = make_policy(policy, capacity)
    pool: Pool | FlatPool = Pool(capacity, made) if leaves_first else FlatPool(capacity, made)
    tally, first_counted = HitTally(trace.block_tokens), int(len(arrivals) * warmup)
    for index, arrival in enumerate(arrivals):
        chain: list[BlockName] = []
        for first, count in arrival.request.runs:
            chain += names[first : first + count]
        if isinstance(made, ClairvoyantPolicy):
            made.at_request(index)
        if isinstance(pool, Pool):
            pool.expire(arrival.at_s)
        hit = pool.request(chain, arrival.at_s)
        if index >= first_counted:
            tally.add(arrival.request, len(chain), hit)
    return PoolResult(policy, capacity_blocks, tally, pool.inserted, pool.evicted)


def block_names(trace: Trace) -> list[BlockName]:
    """A stand-in name for every block id: policies never look into a name."""
    return [BlockName(index.to_bytes(8, "little")) for index in range(trace.num_blocks)]
