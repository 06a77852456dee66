"""Host and disk tier with everything that moves between them, against a dictionary: random puts, leases, evictions,
faults, crashes of clients and of the daemon. After every step the books are sound, no visible or leased byte is wrong,
and nothing is there that was never written."""

import asyncio
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from headrace.ids import new_incarnation
from headrace.kvstore.faults import Fault
from headrace.kvstore.names import chain, is_private, namespace, private_name
from headrace.kvstore.testing import FINGERPRINT
from headrace.kvstore.testing_lower import PAYLOAD_BYTES, LowerFixture, LowerSettings, payload_of

CHAINS = [chain(namespace(FINGERPRINT, f"tenant {i}"), range(64 * 5)) for i in range(3)]
ALL = [name for names in CHAINS for name in names]
chains = st.sampled_from(CHAINS)
names_of_any = st.sampled_from(ALL)
then = st.sampled_from([None, None, 0, 1, 5])
"""After a rule: None: until nothing moves; else so many turns of the loop."""


class StoreMachine(RuleBasedStateMachine):
    @initialize(
        policy=st.sampled_from(["lru", "lfu", "s3fifo", "arc", "gdsf"]),
        write=st.sampled_from(["through", "through_selective:1", "back"]),
        admit=st.integers(1, 2),
        host=st.integers(3, 8),
        disk=st.integers(2, 12),
    )
    def start(self, policy, write, admit, host, disk):
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)  # Rules outside of it start tasks too.
        self.home = Path(tempfile.mkdtemp())
        wanted = LowerSettings(
            policy=policy, write_policy=write, admit_uses=admit, host_slots=host, disk_slots=disk, retry_s=0.0
        )
        self.node = self.run(self.make(wanted))
        self.written = {}
        """name -> bytes of every block that was ever committed."""
        self.leases = []
        """(name, slot) of every lease this client holds."""
        self.faulty = False
        """Whether a fault may still strike, or has made a block on disk wrong."""

    async def make(self, wanted):
        return LowerFixture(self.home, wanted)

    def run(self, work):
        return self.loop.run_until_complete(work)

    # --- clients ------------------------------------------------------------------------------------------------------

    @rule(names=chains, start=st.sampled_from([0, 0, 0, 1, 3]), stop=st.integers(1, 5), then=then)
    def put(self, names, start, stop, then):
        self.write(names, start, max(start + 1, stop))
        self.go_on(then)

    def write(self, names, start, stop):
        self.written |= {name: payload_of(name) for name in self.node.put(names, start, stop)}

    @rule(names=chains, then=then)
    def use(self, names, then):
        """A request that hits what is in the host tier."""
        held = [name for name in names if self.take(name)]
        self.node.lower.used(held)
        for name in held:
            self.give_back(name)
        self.go_on(then)

    @rule(names=chains, blocks=st.integers(1, 5), pressure=st.booleans(), then=then)
    def prompt(self, names, blocks, pressure, then):
        self.serve(names, blocks, pressure, then)

    @rule(names=chains, then=then)
    def whole_prompt(self, names, then):
        self.serve(names, len(names), True, then)

    def serve(self, names, blocks, pressure, then):
        """What a prefill rank does: bring up, hit, compute the rest, publish."""
        if pressure:
            self.go_on(None)
            self.node.evict_host()
        wanted = names[:blocks]
        self.node.lower.promote(wanted, urgent=True)
        self.go_on(None)
        hit = 0
        while hit < blocks and self.take(wanted[hit]):
            hit += 1
        self.node.lower.used(wanted[:hit])
        self.write(names, hit, blocks)
        self.go_on(then)
        for name in wanted[:hit]:
            self.give_back(name)

    @rule()
    def put_private(self):
        name = private_name()
        self.written |= {name: payload_of(name) for name in self.node.put([name])}

    @rule(names=chains, start=st.integers(0, 4), commit=st.booleans())
    def give_up_a_put(self, names, start, commit):
        """Torn bytes in the slots; then an abort, or the writer vanishes."""
        host = self.node.host
        blocks = [(names[i], names[i - 1] if i else None, i) for i in range(start, len(names))]
        writes = [(block[0], slot) for block, slot in zip(blocks, host.begin_put(self.node.owner, blocks)) if slot >= 0]
        for _, slot in writes:
            self.node.view(slot)[: PAYLOAD_BYTES // 2] = b"\xee" * (PAYLOAD_BYTES // 2)
        if commit:
            host.abort_put(self.node.owner, writes)
        else:
            self.client_dies()

    @rule(name=names_of_any)
    def lease(self, name):
        self.take(name)

    def take(self, name):
        found = self.node.lease(name)
        if found is not None:
            self.leases.append((name, found.slot))
        return found is not None

    def give_back(self, name):
        """Ends the oldest lease of this name: another one may be of a block that was dropped and written again."""
        self.node.release(name)
        self.leases.remove(next(lease for lease in self.leases if lease[0] == name))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data):
        self.give_back(data.draw(st.sampled_from([name for name, _ in self.leases])))

    def client_dies(self):
        self.node.host.detach(self.node.owner, lambda: False)
        self.leases = []
        self.node.owner = new_incarnation()
        self.node.host.attach(self.node.owner)

    @rule(name=names_of_any)
    def drop(self, name):
        self.node.host.drop([name])
        self.node.lower.drop([name])

    def flush(self):
        self.node.host.flush()
        self.node.lower.flush()

    # --- movement -----------------------------------------------------------------------------------------------------

    @rule(names=chains, pressure=st.booleans(), urgent=st.booleans(), then=then)
    def promote(self, names, pressure, urgent, then):
        if pressure:
            self.node.evict_host()
        self.node.lower.promote(names, urgent=urgent)
        self.go_on(then)

    def go_on(self, then):
        """Let everything come to rest, or only a few turns of the loop go by."""

        async def turn():
            for _ in range(then):
                await asyncio.sleep(0)

        self.run(self.node.settle() if then is None else turn())

    @rule()
    def settle(self):
        self.go_on(None)

    @rule()
    def upkeep(self):
        async def tick():
            self.node.tick()

        self.run(tick())

    @rule()
    def pressure(self):
        self.node.evict_host()

    # --- trouble ------------------------------------------------------------------------------------------------------

    @rule(what=st.sampled_from(["client_dies", "daemon_dies", "daemon_dies", "flush"]), really=st.integers(0, 3))
    def trouble(self, what, really):
        if really == 3:
            getattr(self, what)()

    @rule(
        leg=st.sampled_from(["disk.read", "disk.read", "disk.write", "disk.erase", "disk.probe"]),
        fault=st.sampled_from([Fault.ERROR, Fault.SHORT, Fault.TORN, Fault.CORRUPT]),
        times=st.integers(1, 4),
    )
    def fault(self, leg, fault, times):
        self.node.plan.add(leg, fault, times=times)
        self.faulty = True

    def daemon_dies(self):
        self.run(self.node.settle())
        durable = set(self.node.tier.names()) if self.node.disk.on else set()
        self.run(self.node.crash())
        self.leases = []
        found = set(self.node.tier.names())
        if not self.faulty:
            assert durable == found, f"{len(durable)} blocks were durable, {len(found)} came back"
        assert self.node.host.names() == []

    # --- what always holds --------------------------------------------------------------------------------------------

    @invariant()
    def the_books_are_sound(self):
        if hasattr(self, "node"):
            assert self.node.violations() == []

    @invariant()
    def visible_blocks_are_what_was_written(self):
        if hasattr(self, "node"):
            for resident in self.node.host.blocks():
                name = resident.meta.name
                assert bytes(self.node.view(resident.slot)[:PAYLOAD_BYTES]) == self.written[name]

    @invariant()
    def leased_slots_keep_their_bytes(self):
        for name, slot in getattr(self, "leases", ()):
            assert bytes(self.node.view(slot)[:PAYLOAD_BYTES]) == self.written[name]

    @invariant()
    def without_faults_no_digest_is_wrong(self):
        """A slot that is written to disk or read from it cannot change meanwhile."""
        if hasattr(self, "node") and not self.faulty:
            assert self.node.disk.totals.checksum_failures == 0

    @invariant()
    def nothing_is_on_disk_that_was_never_written(self):
        if hasattr(self, "node"):
            on_disk = self.node.tier.names()
            assert set(on_disk) <= set(self.written)
            assert not any(map(is_private, on_disk))

    def teardown(self):
        if not hasattr(self, "node"):
            return
        for name, _ in self.leases:
            self.node.release(name)
        self.node.plan.clear()

        async def end():
            await self.node.settle(lambda: self.node.disk.on)
            assert self.node.host.stats()["writing"] == 0
            await self.node.close()

        self.run(end())
        self.loop.close()
        asyncio.set_event_loop(None)
        shutil.rmtree(self.home)


QUIET = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)


def test_random_steps_agree_with_a_dictionary():
    run_state_machine_as_test(StoreMachine, settings=settings(QUIET, max_examples=15, stateful_step_count=40))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_tens_of_thousands_of_random_steps_agree_with_a_dictionary():
    run_state_machine_as_test(StoreMachine, settings=settings(QUIET, max_examples=600, stateful_step_count=60))
