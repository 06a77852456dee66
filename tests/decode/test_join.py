"""The store worker without a thread."""

from headrace.decode.base import Source
from headrace.decode.fake import MemoryStore
from headrace.decode.join import JoinJob, PublishJob, StoreWorker
from headrace.errors import LeaseExpired
from headrace.kvstore.names import private_name


class NoMover:
    def fence(self):
        return None

    def follow(self, fence):
        pass

    def restore(self, device_slots, sources):
        raise AssertionError("a slot of a daemon that has ended was read")

    def publish(self, blocks, tenant=b""):
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


class Recorder(NoMover):
    """Numbers the fences it gives; remembers which copies followed which."""

    def __init__(self):
        self.given, self.followed, self.copies = 0, None, []

    def fence(self):
        self.given += 1
        return self.given

    def follow(self, fence):
        self.followed = fence

    def restore(self, device_slots, sources):
        self.copies.append((self.followed, list(device_slots)))

    def publish(self, blocks, tenant=b""):
        self.copies.append((self.followed, [block[0] for block in blocks]))
        return len(blocks), 0


def test_copies_follow_the_fence_of_their_own_job_and_go_in_batches():
    store, names = MemoryStore(64), [private_name() for _ in range(70)]
    slots = store.begin_put([(name, None, 0) for name in names])
    store.commit_put([(n, s, bytes(16)) for n, s in zip(names, slots)], keep_lease=False)
    mover, done = Recorder(), []
    worker = StoreWorker(store, mover, done.append)
    job = JoinJob(None, [Source(name, 0) for name in names])
    worker.join(job)
    worker.run_next()
    job.slots = list(range(70))
    worker.join(job)  # fence 2
    worker.publish(PublishJob([(99, names[0], None, 0)]))  # fence 3, asked for before the copies of fence 2 run
    while worker.run_next():
        pass
    assert job.copied
    assert [fence for fence, _ in mover.copies] == [2, 2, 2, 3]
    assert [len(slots) for _, slots in mover.copies] == [32, 32, 6, 1]
    assert [slot for _, slots in mover.copies[:3] for slot in slots] == list(range(70))
