"""Rule 2, without a GPU: the streams and events of the copier are replaced by ones that know what must have ended
before what. A copy comes after the writer of its source and before the next user of its target, on device or host."""

from contextlib import nullcontext

import pytest
import torch

from headrace.kvstore.copiers import cuda
from headrace.kvstore.layout import SlabLayout
from headrace.kvstore.pool import DevicePool

LAYOUT = SlabLayout(4, (0, 2), True, "tile656")


class World:
    """Operations by name, and for each the set of those that have ended before it starts. `seen`: what the host knows
    to have ended."""

    def __init__(self):
        self.before, self.seen, self.count = {}, set(), 0
        self.current = Stream(self)

    def copy(self, kind):
        self.count += 1
        return f"{kind}{self.count}"


class Stream:
    def __init__(self, world):
        self.world, self.ended = world, set()
        self.cuda_stream = self

    def run(self, operation):
        self.world.before[operation] = self.ended | self.world.seen
        self.ended = self.ended | {operation} | self.world.seen

    def wait_stream(self, other):
        self.ended = self.ended | other.ended

    def wait_event(self, event):
        self.ended = self.ended | event.ended

    def record_event(self, event=None):
        event = event or Event(self.world)
        event.ended = set(self.ended)
        return event

    def synchronize(self):
        self.world.seen |= self.ended


class Event:
    def __init__(self, world):
        self.world, self.ended = world, set()

    def synchronize(self):
        self.world.seen |= self.ended

    def elapsed_time(self, other):
        return 1.0


class Runtime:
    def __init__(self, world):
        self.world, self.fail_at, self.copies = world, None, []

    def copy_2d(self, target, source, width, rows, kind, stream):
        if self.fail_at == len(self.copies):
            raise RuntimeError("refused")
        self.copies.append(self.world.copy("copy"))
        stream.run(self.copies[-1])


@pytest.fixture
def world(monkeypatch):
    made = World()
    made.runtime = Runtime(made)
    monkeypatch.setattr(cuda, "gpu_runtime", lambda: made.runtime)
    monkeypatch.setattr(cuda, "_event", lambda: Event(made))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(made))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made.current)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: _Current(made, stream))
    return made


class _Current:
    def __init__(self, world, stream):
        self.world, self.stream = world, stream

    def __enter__(self):
        self.saved, self.world.current = self.world.current, self.stream

    def __exit__(self, *_):
        self.world.current = self.saved


def blocks():
    pool = DevicePool(LAYOUT, 3, "cpu")
    return pool, [0, 2], [memoryview(bytearray(LAYOUT.slot_bytes)) for _ in range(2)]


@pytest.mark.parametrize("kind", ["load", "store"])
def test_a_copy_comes_after_the_writer_and_before_the_next_user(world, kind):
    world.current.run("write")
    getattr(cuda.CudaCopier(), kind)(*blocks())
    assert len(world.runtime.copies) == 4
    assert all("write" in world.before[copy] for copy in world.runtime.copies)
    assert set(world.runtime.copies) <= world.seen, "the host may give the slabs back"
    world.current.run("use")
    assert set(world.runtime.copies) <= world.before["use"]


@pytest.mark.parametrize("kind", ["load", "store"])
def test_a_batch_that_fails_half_way_has_ended_all_the_same(world, kind):
    world.runtime.fail_at = 3
    with pytest.raises(RuntimeError, match="refused"):
        getattr(cuda.CudaCopier(), kind)(*blocks())
    assert set(world.runtime.copies) <= world.seen
    assert len(world.runtime.copies) == 3


def test_a_failed_load_in_groups_has_ended_too(world):
    world.runtime.fail_at = 5
    with pytest.raises(RuntimeError, match="refused"):
        cuda.CudaCopier().begin_load(*blocks(), 3)
    assert set(world.runtime.copies) <= world.seen


@pytest.mark.parametrize("groups", [1, 2, 5])
def test_a_layer_waits_for_its_own_group_and_the_next_user_for_all(world, groups):
    world.current.run("write")
    pool, slots, views = blocks()
    loading = cuda.CudaCopier().begin_load(pool, slots, views, groups)
    copies = world.runtime.copies
    assert all("write" in world.before[copy] for copy in copies)
    assert not set(copies) & world.seen
    loading.latent[0]
    loading.index[0]
    world.current.run("first layer")
    first = set(copies) & world.before["first layer"]
    assert first, "the first layer read a plane that nobody had waited for"
    assert groups == 1 or first < set(copies), "the first layer waited for the last"
    loading.latent[LAYOUT.num_layers]
    world.current.run("last layer")
    assert set(copies) <= world.before["last layer"]
    loading.finish()
    assert set(copies) <= world.seen


def test_what_nobody_asked_for_is_waited_for_at_the_end(world):
    loading = cuda.CudaCopier().begin_load(*blocks(), 2)
    loading.finish()
    assert set(world.runtime.copies) <= world.seen
    world.current.run("use")
    assert set(world.runtime.copies) <= world.before["use"]


def test_a_side_stream_comes_after_its_fence_and_not_after_later_work(world):
    side = cuda.CudaSideStream(torch.device("cpu"))
    world.current.run("write")
    fence = side.fence()
    world.current.run("step")
    with side.after(fence):
        cuda.CudaCopier().store(*blocks())
    for copy in world.runtime.copies:
        assert "write" in world.before[copy]
        assert "step" not in world.before[copy]
    assert set(world.runtime.copies) <= world.seen
