"""Reads from another process's device pool: generations (pure), and real IPC on a GPU."""

import json
import mmap
import multiprocessing
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import IncompatiblePeer, LeaseExpired
from headrace.kvstore.generations import Generations
from headrace.kvstore.layout import SlabLayout
from headrace.kvstore.pool import DevicePool

LAYOUT = SlabLayout(3, (0, 2), True, "tile656")
OWNER = Path(__file__).parent / "workers" / "pool_owner.py"
WORDS = 512
ROUNDS = 3000


def test_counts_are_seen_across_processes_and_end_with_their_owner():
    owner = Generations.create(4)
    reader = Generations.attach(owner.path, 4)
    promised = reader.of([1, 3])
    owner.advance([3])
    assert reader.changed([1, 3], promised) == [3]
    assert reader.changed([1], promised[:1]) == []
    with pytest.raises(LeaseExpired, match="does not hold the counters of 5 slots"):
        Generations.attach(owner.path, 5)
    path = owner.path
    owner.close()
    owner.close()
    with pytest.raises(LeaseExpired, match="is gone"):
        Generations.attach(path, 4)
    reader.close()


def rewrite(counts, words):
    """Fill the slot with n, again and again: count up, write word by word, count what is finished (slot 1)."""
    for n in range(1, ROUNDS):
        counts.advance([0])
        for at in range(0, WORDS, 8):
            words[at : at + 8] = n
        counts.advance([1])


def test_a_copy_that_met_a_writer_never_counts():
    counts = Generations.create(2)
    words = np.frombuffer(mmap.mmap(-1, WORDS * 8), dtype=np.int64)
    writer = multiprocessing.get_context("fork").Process(target=rewrite, args=(counts, words))
    writer.start()
    good = 0
    while writer.is_alive():
        (finished,) = counts.of([1])
        promised = counts.of([0])
        if promised != [finished]:
            continue  # a write is under way: nothing would be promised
        copy = words.copy()
        if not counts.changed([0], promised):
            assert set(copy.tolist()) == {finished}, "a copy was accepted that a writer had met"
            good += 1
    writer.join()
    assert writer.exitcode == 0
    assert good > 0
    counts.close()


@pytest.mark.gpu
def test_blocks_are_read_from_another_process_and_never_after_their_time():
    from headrace.kvstore.copiers.ipc import ForeignPool
    from headrace.messages import decode

    owner = subprocess.Popen(
        [sys.executable, str(OWNER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    said = json.loads(owner.stdout.readline())
    export, promised = decode(bytes.fromhex(said["export"])), said["promised"]
    pool = DevicePool(LAYOUT, 4, "cuda")
    foreign = ForeignPool(export, pool)
    foreign.read([5, 0], [promised[5], promised[0]], [1, 3])
    assert int(pool.latent[:, 1].min()) == int(pool.latent[:, 1].max()) == 6
    assert int(pool.index[:, 1].min()) == int(pool.index[:, 1].max()) == 106
    assert int(pool.latent[:, 3].min()) == int(pool.latent[:, 3].max()) == 1
    assert not pool.latent[:, [0, 2]].any()
    owner.stdin.write("5\n")
    assert owner.stdout.readline() == "done\n"
    with pytest.raises(LeaseExpired, match=r"slots \[5\] .* no longer hold"):
        foreign.read([0, 5], [promised[0], promised[5]], [0, 1])
    with pytest.raises(IncompatiblePeer, match="another slab layout"):
        ForeignPool(export, DevicePool(SlabLayout(2, (0,), True, "tile656"), 2, "cuda"))
    owner.kill()
    owner.wait()
    with pytest.raises(LeaseExpired, match="has ended"):
        foreign.read([0], promised[:1], [0])
    foreign.close()
    with pytest.raises(LeaseExpired):
        ForeignPool(export, pool)
