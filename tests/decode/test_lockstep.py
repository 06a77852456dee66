"""What ranks agree on, and the bell, with ranks as threads."""

import threading
import time
from typing import Any

from headrace.decode.lockstep import DatagramBell, LocalBell, LocalControl, Lockstep


class ThreadControl:
    """Ranks as threads of one process: an all-gather over a barrier."""

    def __init__(self, rank: int, rows: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self.exchanges = rank, len(rows), 0
        self._rows, self._barrier = rows, barrier

    def gather(self, row):
        self._rows[self.rank] = list(row)
        self._barrier.wait(10)
        gathered = [list(r) for r in self._rows]
        self._barrier.wait(10)
        self.exchanges += 1
        return gathered


def in_ranks(size: int, body) -> list[Any]:
    rows, barrier, out = [None] * size, threading.Barrier(size), [None] * size

    def run(rank: int) -> None:
        out[rank] = body(rank, ThreadControl(rank, rows, barrier))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return out


def test_all_ranks_get_the_same_plan():
    def body(rank, control):
        lockstep = Lockstep(control)
        plan = lockstep.agree(
            verify=[5, 0, 3][rank],
            sequences=[2, 0, 1][rank],
            draft_tokens=[2, 0, 4][rank],
            leaving=rank == 1,
            stop_now=False,
        )
        tail = lockstep.agree_tail([4, 0, 1][rank], [[1, 1], [], [1, 0, 0]][rank])
        return plan, tail

    plans = in_ranks(3, body)
    assert all(one == plans[0] for one in plans)
    plan, tail = plans[0]
    assert (plan.verify, plan.draft_tokens, plan.sequences) == ([5, 0, 3], 2, 3), "the busiest rank says how many"
    assert (plan.stop, plan.idle) == (False, False)
    assert (tail.extend, tail.drafts) == ([4, 0, 1], [[1, 0, 1], [1, 0, 0]])


def test_the_group_ends_when_all_leave_or_one_must():
    def body(rank, control):
        lockstep = Lockstep(control)
        some = lockstep.agree(verify=0, sequences=0, draft_tokens=0, leaving=rank == 0, stop_now=False)
        every = lockstep.agree(verify=0, sequences=0, draft_tokens=0, leaving=True, stop_now=False)
        now = lockstep.agree(verify=2, sequences=1, draft_tokens=0, leaving=False, stop_now=rank == 1)
        return some.stop, every.stop, now.stop

    assert in_ranks(2, body) == [(False, True, True)] * 2


def test_a_ring_wakes_the_others_at_once_and_a_stale_one_wakes_nobody():
    def body(rank, control):
        bell = DatagramBell(control)
        bell.ring(0)
        control.gather([0])  # everybody's ring for exchange 0 has arrived and is stale for exchange 5
        started = time.monotonic()
        bell.sleep(5, 0.2)
        stale = time.monotonic() - started
        control.gather([0])
        if rank == 0:
            time.sleep(0.1)
            bell.ring(5)
        started = time.monotonic()
        bell.sleep(5, 5.0)
        fresh = time.monotonic() - started
        control.gather([0])
        bell.close()
        return stale, fresh

    for stale, fresh in in_ranks(3, body):
        assert stale > 0.15
        assert fresh < 2.0


def test_a_bell_for_one_rank():
    bell, control = LocalBell(), LocalControl()
    bell.ring(control.exchanges)
    bell.sleep(control.exchanges, 10)
    control.gather([1])
    threading.Timer(0.05, bell.ring, [control.exchanges]).start()
    bell.sleep(control.exchanges, 10)
    assert control.exchanges == 1
