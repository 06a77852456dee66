"""Slabs and pools: every plane of a block lands where the layout says, whole, and nothing else moves."""

import mmap

import pytest
import torch

from headrace.kernels.formats import FORMATS
from headrace.kvstore.layout import SlabLayout
from headrace.kvstore.pool import DevicePool
from headrace.kvstore.transfer import (
    begin_load,
    digest,
    load_slab,
    load_slabs,
    side_stream_for,
    store_slab,
    store_slabs,
)

LAYOUTS = [SlabLayout(3, (0, 2), mtp, fmt) for mtp in (True, False) for fmt in sorted(FORMATS)]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def random_pool(layout, slots, device, seed=0):
    pool = DevicePool(layout, slots, device)
    made = torch.Generator().manual_seed(seed)
    for planes in (pool.latent, pool.index):
        planes.copy_(torch.randint(0, 256, planes.shape, dtype=torch.uint8, generator=made))
    return pool


def slab(layout):
    return memoryview(mmap.mmap(-1, layout.slot_bytes))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda v: f"{v.row_format}-{int(v.has_mtp)}")
def test_slab_holds_planes_in_the_documented_order(layout, device):
    pool, view = random_pool(layout, 5, device), slab(layout)
    store_slab(pool, 3, view)
    planes = [pool.latent[p, 3].cpu().numpy().tobytes() for p in range(layout.latent_planes)]
    planes += [pool.index[p, 3].cpu().numpy().tobytes() for p in range(layout.index_planes)]
    assert bytes(view[: layout.payload_bytes]) == b"".join(planes)
    assert not any(view[layout.payload_bytes :])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda v: f"{v.row_format}-{int(v.has_mtp)}")
def test_round_trip_touches_only_its_slot(layout, device):
    source, target = random_pool(layout, 4, device, 1), random_pool(layout, 6, device, 2)
    before_latent, before_index = target.latent.clone(), target.index.clone()
    views = [slab(layout), slab(layout)]
    store_slabs(source, [2, 0], views)
    load_slabs(target, [5, 1], views)
    for there, here in ((5, 2), (1, 0)):
        assert torch.equal(target.latent[:, there], source.latent[:, here])
        assert torch.equal(target.index[:, there], source.index[:, here])
        before_latent[:, there], before_index[:, there] = source.latent[:, here], source.index[:, here]
    assert torch.equal(target.latent, before_latent)
    assert torch.equal(target.index, before_index)


@pytest.mark.parametrize("device", DEVICES)
def test_copies_wait_for_the_writer_and_make_the_reader_wait(device):
    layout = LAYOUTS[0]
    pool, view = DevicePool(layout, 2, device), slab(layout)
    for value in range(1, 20):
        pool.latent[:, 0] = value
        pool.index[:, 0] = value
        store_slab(pool, 0, view)
        assert bytes(view[: layout.payload_bytes]) == bytes([value]) * layout.payload_bytes
        load_slab(pool, 1, view)
        assert int(pool.latent[:, 1].min()) == int(pool.index[:, 1].max()) == value


def test_zero_and_copy():
    pool = random_pool(LAYOUTS[0], 4, "cpu")
    kept = pool.latent[:, 2].clone()
    pool.copy(2, 3)
    pool.zero([0, 2])
    assert not pool.latent[:, [0, 2]].any()
    assert not pool.index[:, [0, 2]].any()
    assert torch.equal(pool.latent[:, 3], kept)
    assert pool.latent[:, 1].any()


def test_misfits_are_refused_before_a_byte_moves():
    layout = LAYOUTS[0]
    pool, view = DevicePool(layout, 2, "cpu"), slab(layout)
    view[:4] = b"abcd"
    for slots, views in (
        ([0, 2], [view, view]),
        ([0], [view[: layout.payload_bytes - 1]]),
        ([0, 1], [view]),
        ([-1], [view]),
    ):
        with pytest.raises(ValueError, match=r"slot|slab"):
            load_slabs(pool, slots, views)
    assert not pool.latent.any()


def test_digest_covers_every_byte():
    data = bytearray(range(256)) * 20
    first = digest(bytes(data))
    assert len(first) == 16
    for at in (0, 1, 2500, len(data) - 1):
        data[at] ^= 1
        assert digest(memoryview(data)) != first
        data[at] ^= 1
    assert digest(memoryview(data)) == first


@pytest.mark.gpu
def test_a_client_on_a_gpu_pins_the_arena_and_lets_go_of_it(tmp_path):
    from headrace.kvstore.client import NodeClient
    from headrace.kvstore.copiers import map_watcher_for
    from headrace.kvstore.copiers.pinning import Pinning
    from headrace.kvstore.testing import LAYOUT, DaemonFixture

    node, watcher = DaemonFixture(tmp_path), map_watcher_for("cuda")
    assert isinstance(watcher, Pinning)
    for _ in range(2):
        client = NodeClient(f"unix:{node.socket}", node.hello("decode-0.0", "decode"), LAYOUT, watcher)
        assert watcher.pinned_bytes == 8 * LAYOUT.slot_bytes
        assert torch.frombuffer(client.slot_view(0), dtype=torch.uint8).is_pinned()
        pool = random_pool(LAYOUT, 2, "cuda")
        (slot,) = client.begin_put([(b"n" * 32, None, 0)])
        store_slab(pool, 1, client.slot_view(slot))
        load_slab(pool, 0, client.slot_view(slot))
        assert torch.equal(pool.latent[:, 0], pool.latent[:, 1])
        client.close()
        assert watcher.pinned_bytes == 0
    node.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("groups", [1, 2, 3, 50])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda v: f"{v.row_format}-{int(v.has_mtp)}")
def test_a_load_in_groups_of_layers_gives_each_plane_when_it_is_asked_for(layout, groups, device):
    source, target = random_pool(layout, 3, device, 3), random_pool(layout, 4, device, 4)
    views = [slab(layout), slab(layout)]
    store_slabs(source, [0, 2], views)
    untouched = target.latent[:, 0].clone()
    loading = begin_load(target, [3, 1], views, groups)
    for plane in range(layout.latent_planes):
        assert torch.equal(loading.latent[plane][3], source.latent[plane, 0])
    for plane in range(layout.index_planes):
        assert torch.equal(loading.index[plane][1], source.index[plane, 2])
    assert loading.finish() >= 0.0
    assert torch.equal(target.latent[:, [3, 1]], source.latent[:, [0, 2]])
    assert torch.equal(target.index[:, [3, 1]], source.index[:, [0, 2]])
    assert torch.equal(target.latent[:, 0], untouched)


def test_a_load_of_nothing_is_finished():
    pool = DevicePool(LAYOUTS[0], 2, "cpu")
    assert begin_load(pool, [], [], 4).finish() == 0.0


@pytest.mark.gpu
def test_a_side_stream_waits_for_its_fence_and_for_nothing_later():
    layout = LAYOUTS[0]
    pool, view = DevicePool(layout, 2, "cuda"), slab(layout)
    side = side_stream_for(pool)
    big = torch.randn((8192, 8192), device="cuda")
    torch.cuda.synchronize()
    big @ big
    pool.latent[:, 0] = 9
    pool.index[:, 0] = 9
    fence = side.fence()
    for _ in range(40):
        big @ big
    busy = torch.cuda.current_stream().record_event()
    with side.after(fence):
        store_slab(pool, 0, view)
        load_slab(pool, 1, view)
    assert not busy.query(), "the copies waited for what was queued after their fence"
    assert bytes(view[: layout.payload_bytes]) == bytes([9]) * layout.payload_bytes
    assert int(pool.latent[:, 1].min()) == 9
