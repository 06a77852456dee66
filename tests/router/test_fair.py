"""The queue: shares between tenants by cost, priorities inside, and nobody is forgotten."""

import random

from headrace.router.fair import QUANTUM, FairQueue, Waiter


def add(queue: FairQueue, tenant: str, cost: float = 1.0, priority: int = 0) -> Waiter:
    waiter = Waiter(lambda: True, None, tenant, priority, cost)
    queue.add(waiter)
    return waiter


def served(queue: FairQueue, cost: float) -> list[Waiter]:
    """Whoever goes until `cost` is spent."""
    gone: list[Waiter] = []
    while sum(w.cost for w in gone) < cost and (waiter := queue.next()) is not None:
        assert queue.next() is waiter
        queue.take(waiter)
        gone.append(waiter)
    return gone


def spent(gone: list[Waiter], tenant: str) -> float:
    return sum(w.cost for w in gone if w.tenant == tenant)


def test_a_tenant_with_many_or_large_requests_gets_its_share() -> None:
    queue = FairQueue()
    for _ in range(5000):
        add(queue, "greedy", 10)
    for _ in range(50):
        add(queue, "large", 1000)
    for _ in range(2000):
        add(queue, "small", 25)
    gone = served(queue, 60_000)
    shares = {tenant: spent(gone, tenant) for tenant in ("greedy", "large", "small")}
    assert max(shares.values()) - min(shares.values()) <= 2 * QUANTUM + 1000


def test_weights() -> None:
    queue = FairQueue({"a": 3.0, "b": 1.0}.__getitem__)
    for tenant in ("a", "b"):
        for _ in range(3000):
            add(queue, tenant, 16)
    gone = served(queue, 20_000)
    assert 2.7 < spent(gone, "a") / spent(gone, "b") < 3.3


def test_priorities_and_arrival_inside_a_tenant() -> None:
    queue = FairQueue()
    low, high, later, other = add(queue, "a"), add(queue, "a", priority=5), add(queue, "a"), add(queue, "b", priority=9)
    order = served(queue, 4)
    assert [w for w in order if w.tenant == "a"] == [high, low, later]
    assert other in order


def test_nobody_starves_and_nothing_is_lost() -> None:
    draw = random.Random(1)
    queue, waiting = FairQueue(), set()
    gone = 0
    for _ in range(3000):
        if waiting and draw.random() < 0.5:
            if draw.random() < 0.1:
                waiter = draw.choice(sorted(waiting, key=id))
                queue.remove(waiter)
            else:
                waiter = queue.next()
                queue.take(waiter)
                gone += 1
            waiting.remove(waiter)
        else:
            waiting.add(add(queue, draw.choice("abc"), draw.choice([1, 50, 4000]), draw.randrange(3)))
        assert len(queue) == len(waiting) == len(list(queue))
    while (waiter := queue.next()) is not None:
        queue.take(waiter)
        waiting.remove(waiter)
    assert not waiting
    assert gone


def test_who_leaves_a_full_queue() -> None:
    queue = FairQueue()
    first, last = add(queue, "a"), add(queue, "a")
    assert queue.to_displace("b") is last
    assert queue.to_displace("a") is None
    queue.remove(last)
    assert queue.to_displace("b") is None
    assert first in queue
