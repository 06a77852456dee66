"""The store worker without a thread."""

from headrace.decode.base import Source
from headrace.decode.fake import MemoryStore
from headrace.decode.join import JoinJob, StoreWorker
from headrace.errors import LeaseExpired
from headrace.kvstore.names import private_name


class NoMover:
    def restore(self, device_slot, source):
        raise AssertionError("a slot of a daemon that has ended was read")

    def publish(self, blocks):
        return 0, len(blocks)


def test_leases_taken_before_the_daemon_was_lost_are_not_copied_from():
    store, name = MemoryStore(64), private_name()
    ((slot),) = store.begin_put([(name, None, 0)])
    store.commit_put([(name, slot, bytes(16))], keep_lease=False)
    done = []
    worker = StoreWorker(store, NoMover(), done.append)
    job = JoinJob(None, [Source(name, 0)])
    worker.join(job)
    worker.run_next()
    assert job.leased
    store.leases.clear()
    store.reconnect()
    job.slots = [3]
    worker.join(job)
    worker.run_next()
    assert isinstance(job.error, LeaseExpired)
    assert done == [job, job]
    assert +store.leases == {}
    assert -store.leases == {}
