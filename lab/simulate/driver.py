"""Drives a trace through a simulated service, open or closed loop, and sums up what the requests met."""

import asyncio
import dataclasses
import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.errors import InputError
from headrace.ids import BlockName
from headrace.kernels.formats import BLOCK_TOKENS
from headrace.lab.simulate.clock import run_virtual, sleep_until
from headrace.lab.simulate.pool import block_names
from headrace.lab.simulate.service import Outcome, Service
from headrace.lab.simulate.service_settings import ServiceSettings
from headrace.lab.traces.form import Request, Session, Trace

Row = dict[str, Any]


class Names:
    """Block names of 64 tokens for a trace of any multiple of that."""

    def __init__(self, trace: Trace) -> None:
        if trace.block_tokens % BLOCK_TOKENS:
            raise InputError(f"blocks of {trace.block_tokens} tokens are not a multiple of {BLOCK_TOKENS}")
        self._ratio = trace.block_tokens // BLOCK_TOKENS
        self._names = block_names(dataclasses.replace(trace, num_blocks=trace.num_blocks * self._ratio))

    def prompt(self, request: Request) -> list[BlockName]:
        """Names of the full blocks of the prompt, as far as the trace knows them."""
        chain: list[BlockName] = []
        for first, count in request.runs:
            chain += self._names[first * self._ratio : (first + count) * self._ratio]
        return chain[: request.input_tokens // BLOCK_TOKENS]

    def answered(self, request: Request, following: Request | None) -> list[BlockName]:
        """Full blocks of prompt and answer as the session's next prompt names them; empty when it goes another way."""
        if following is None:
            return []
        chain, coming = self.prompt(request), self.prompt(following)
        if coming[: len(chain)] != chain:
            return []
        return coming[: (request.input_tokens + request.output_tokens - 1) // BLOCK_TOKENS]


class _Run:
    def __init__(self, trace: Trace, settings: ServiceSettings, names: Names) -> None:
        self.trace = trace
        self.settings = settings
        self.names = names
        self.service = Service(settings)
        self.outcomes: list[Outcome] = []
        self._slots = asyncio.Semaphore(settings.concurrency or len(trace.sessions) + 1)
        self._children: dict[tuple[int, int], list[int]] = {}
        for index, session in enumerate(trace.sessions):
            if session.parent is not None:
                self._children.setdefault((session.parent, session.after_request), []).append(index)

    async def all_sessions(self) -> None:
        draw = random.Random(self.settings.seed)
        start = 0.0
        async with asyncio.TaskGroup() as tasks:
            for index, session in sorted(enumerate(self.trace.sessions), key=lambda item: item[1].start_s):
                if session.parent is not None:
                    continue
                if self.settings.starts == "poisson":
                    start += draw.expovariate(self.settings.sessions_per_s)
                else:
                    start = session.start_s / self.settings.time_scale
                tasks.create_task(self._root(index, start))

    async def _root(self, index: int, start_s: float) -> None:
        await sleep_until(start_s)
        async with self._slots:
            await self._session(index)

    async def _session(self, index: int) -> None:
        """One session and the sub-agents it starts. Recorded times count from when it really started."""
        session = self.trace.sessions[index]
        began = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as tasks:
            self._spawn(tasks, index, -1)
            for turn, request in enumerate(session.requests):
                if self.settings.loop == "closed" and turn and request.think_s is not None:
                    await asyncio.sleep(request.think_s / self.settings.time_scale)
                else:
                    await sleep_until(began + request.offset_s / self.settings.time_scale)
                task = tasks.create_task(self._request(session, turn))
                if self.settings.loop == "closed":
                    await task
                self._spawn(tasks, index, turn)

    def _spawn(self, tasks: asyncio.TaskGroup, parent: int, turn: int) -> None:
        for child in self._children.get((parent, turn), ()):
            tasks.create_task(self._session(child))

    async def _request(self, session: Session, turn: int) -> None:
        request = session.requests[turn]
        following = session.requests[turn + 1] if turn + 1 < len(session.requests) else None
        answered = self.names.answered(request, following) if self.settings.publish_answers else []
        self.outcomes.append(
            await self.service.serve(self.names.prompt(request), request.input_tokens, request.output_tokens, answered)
        )


async def _drive(trace: Trace, settings: ServiceSettings, names: Names) -> tuple[_Run, float]:
    run = _Run(trace, settings, names)
    await run.all_sessions()
    return run, asyncio.get_running_loop().time()


def simulate_service(trace: Trace, settings: ServiceSettings) -> tuple[list[Outcome], Row]:
    """Outcomes in order of completion, and the figures of the whole run."""
    run, ended_s = run_virtual(_drive(trace, settings, Names(trace)))
    return run.outcomes, _figures(run, ended_s)


def service_case(trace: Trace, settings: ServiceSettings) -> Row:
    started = time.perf_counter()
    _, figures = simulate_service(trace, settings)
    return {**dataclasses.asdict(settings), **figures, "seconds": round(time.perf_counter() - started, 3)}


def _figures(run: _Run, ended_s: float) -> Row:
    settings, service = run.settings, run.service
    served = [o for o in run.outcomes if not o.refused]
    prompt = sum(o.prompt_tokens for o in served) or 1
    moved = {f"{leg}_gb": n * settings.slab_bytes / 1e9 for leg, n in dataclasses.asdict(service.node.moved).items()}
    gpus = settings.groups * settings.group_gpus + settings.decode_ranks
    return {
        "requests": len(run.outcomes),
        "refused": sum(o.refused for o in run.outcomes),
        "unserved": sum(o.refused for o in run.outcomes),
        "hit": sum(o.hit_tokens for o in served) / prompt,
        "hit_device": sum(o.device_tokens for o in served) / prompt,
        "hit_host": sum(o.host_tokens for o in served) / prompt,
        "hit_disk": sum(o.disk_tokens for o in served) / prompt,
        **_percentiles("ttft", [o.ttft_s for o in served]),
        **_percentiles("total", [o.total_s for o in served]),
        **{f"{wait}_s": _mean([getattr(o, f"{wait}_s") for o in served])
           for wait in ("queue", "restore", "compute", "handover", "decode")},
        **moved,
        "span_s": ended_s,
        "prefill_busy": sum(service.busy_s.values()) / (ended_s * settings.groups) if ended_s else 0.0,
        "gpu_s": gpus * ended_s,
        "dram_gb": len(service.node.host) * settings.slab_bytes / 1e9,
        "prediction_error": service.prediction_error,
    }  # fmt: skip


def _percentiles(name: str, values: Sequence[float]) -> Row:
    points = np.percentile(values, (50, 90, 99)) if values else (0.0, 0.0, 0.0)
    return {f"{name}_p{q}_s": float(p) for q, p in zip((50, 90, 99), points)}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
