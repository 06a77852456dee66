"""Executing a plan on all ranks: the leader's `StepRunner`, and the loop of a follower."""

import logging
import traceback

from headrace.errors import IncompatiblePeer, RankLost
from headrace.prefill.executor import Executor
from headrace.prefill.link import LeaderLink, Stream
from headrace.prefill.plan import StepAck, StepOutcome, StepPlan, StoppedPlan

log = logging.getLogger(__name__)
STEP_TIMEOUT_S = 120.0
"""A rank that has not finished a step this long after the leader has is lost."""


class GroupRunner:
    """The leader executes its own share between sending the plan and collecting the acknowledgements. `link` None: the
    leader is the whole group."""

    def __init__(self, executor: Executor, link: LeaderLink | None, ranks: int) -> None:
        self.ranks = ranks
        self._executor = executor
        self._link = link

    def run(self, plan: StepPlan) -> StepOutcome:
        if self._link is None:
            return self._executor.run(plan)
        self._link.send(plan)
        try:
            outcome = self._executor.run(plan)
        except RuntimeError as error:
            # A collective that fails here fails because a peer is gone; its own report says more.
            raise self._link.lost or RankLost(f"step {plan.step} failed on the leader: {error}") from error
        for ack in self._link.collect(plan.step, STEP_TIMEOUT_S):
            outcome.digests |= ack.digests
            outcome.bad |= set(ack.bad)
        return outcome

    def check(self) -> None:
        if self._link is not None and self._link.lost is not None:
            raise self._link.lost

    def close(self) -> None:
        if self._link is not None:
            self._link.close("the leader stopped")


def follow(stream: Stream, executor: Executor, rank: int) -> str:
    """Execute plans until the leader says stop or its stream ends; returns why. An exception is reported to the leader
    with its traceback and raised: this rank is no longer in step."""
    while True:
        plan = stream.receive()
        if plan is None:
            return "the leader's stream ended"
        if isinstance(plan, StoppedPlan):
            return plan.reason
        if not isinstance(plan, StepPlan):
            raise IncompatiblePeer(f"expected a plan, got {type(plan).__name__}")
        try:
            outcome = executor.run(plan)
        except Exception:
            log.exception("rank %d failed in step %d", rank, plan.step)
            _report(stream, StepAck(step=plan.step, rank=rank, digests={}, error=traceback.format_exc()))
            raise
        _report(stream, StepAck(step=plan.step, rank=rank, digests=outcome.digests, bad=tuple(outcome.bad)))


def _report(stream: Stream, ack: StepAck) -> None:
    try:
        stream.send(ack)
    except OSError:
        log.warning("step %d: the leader is gone, nobody to report to", ack.step)
