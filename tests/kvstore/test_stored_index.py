"""A node's host and disk tier as one place in a router's index, against sets."""

import random

from headrace.kvstore.base import Placement
from headrace.kvstore.daemon.events import DISK_PLACE, HOST_PLACE
from headrace.kvstore.directory.index import PlaceIndex
from headrace.kvstore.wire import Events, PlaceChange, pack_names


def run(held, names):
    return next((i for i, name in enumerate(names) if name not in held), len(names))


def test_a_run_goes_on_from_host_to_disk_and_back(names):
    index = PlaceIndex()
    index.change(("n", HOST_PLACE), [*names[:2], names[4]], [])
    index.change(("n", DISK_PLACE), [names[1], names[2], names[3]], [])
    assert index.lookup(names[:8]) == Placement({"n": 2}, {}, {"n": 5})
    index.change(("n", HOST_PLACE), [], [names[1]])
    assert index.lookup(names[:8]) == Placement({"n": 1}, {}, {"n": 5}), "the disk still has the second"
    index.change(("n", DISK_PLACE), [], [names[2]])
    assert index.lookup(names[:8]) == Placement({"n": 1}, {}, {"n": 2})


def test_a_disk_that_is_switched_off_is_forgotten_and_comes_back_whole(names):
    index = PlaceIndex()
    index.change(("n", HOST_PLACE), names[:2], [])
    index.change(("n", DISK_PLACE), names[:5], [])
    gone = PlaceChange(place=DISK_PLACE, added=b"", removed=b"", gone=True)
    index.apply("n", Events(incarnation="i", last=2, snapshot=False, changes=(gone,)))
    assert index.lookup(names[:8]) == Placement({"n": 2}, {}, {})
    assert len(index) == 2
    back = PlaceChange(place=DISK_PLACE, added=pack_names(names[:5]), removed=b"")
    index.apply("n", Events(incarnation="i", last=3, snapshot=False, changes=(back,)))
    assert index.lookup(names[:8]) == Placement({"n": 2}, {}, {"n": 5})
    index.forget("n")
    assert len(index) == 0


def test_random_changes_agree_with_sets(names):
    dice, names = random.Random(5), names[:12]
    index = PlaceIndex()
    truth = {(node, place): set() for node in "ab" for place in (HOST_PLACE, DISK_PLACE, f"rank-{node}")}
    for _ in range(3000):
        place = dice.choice(list(truth))
        if dice.random() < 0.02:
            index.apply(place[0], Events(incarnation="i", last=1, snapshot=False, changes=(
                PlaceChange(place=place[1], added=b"", removed=b"", gone=True),)))  # fmt: skip
            truth[place] = set()
        else:
            added = dice.sample(names, dice.randrange(6))
            removed = [name for name in dice.sample(names, dice.randrange(6)) if name not in added]
            index.change(place, added, removed)
            truth[place] = (truth[place] | set(added)) - set(removed)
        found = index.lookup(names)
        for node in "ab":
            host, disk = truth[node, HOST_PLACE], truth[node, DISK_PLACE]
            assert found.host_blocks.get(node, 0) == run(host, names)
            stored = run(host | disk, names)
            assert found.stored_blocks.get(node, found.host_blocks.get(node, 0)) == stored
            assert found.device_blocks.get(f"rank-{node}", 0) == run(truth[node, f"rank-{node}"], names)
    assert len(index) == len(set().union(*truth.values()))
