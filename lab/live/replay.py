"""A trace against a running service: open or closed loop, time scaled, everything measured at the client.

Sessions run as in `simulate/driver.py`: a closed loop waits for each answer and then for the recorded pause, an open
one keeps recorded times. The service's own answers do not become part of the next prompt; the trace says what does.
"""

import asyncio
import dataclasses
import time
from typing import Any

from headrace.errors import CapacityError, HeadraceError
from headrace.kernels.formats import BLOCK_TOKENS
from headrace.lab.live.http import Client, refusal
from headrace.lab.live.prompts import Prompts
from headrace.lab.traces.form import Session, Trace


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    model: str = ""
    """Empty: the first model of /v1/models."""
    loop: str = "closed"
    time_scale: float = 1.0
    concurrency: int = 0
    """Most sessions at once; 0: no limit."""
    in_flight: int = 0
    """Most requests at once, waiting at the client uncounted; 0: no limit. 1 measures costs without any queue."""
    max_output: int = 0
    """Answers are cut to so many tokens; 0: as recorded."""
    timeout_s: float = 600.0
    seed: int = 0


@dataclasses.dataclass(slots=True)
class Measured:
    """One request as its client saw it."""

    prompt_tokens: int
    cached_tokens: int = 0
    by_tier: dict[str, int] = dataclasses.field(default_factory=dict)
    answer_tokens: int = 0
    started_s: float = 0.0
    """Seconds from the start of the run."""
    ttft_s: float = 0.0
    total_s: float = 0.0
    error: str = ""
    refused: bool = False
    """429: counted apart from failures."""


class Replay:
    def __init__(self, client: Client, trace: Trace, settings: ReplaySettings) -> None:
        if trace.block_tokens != BLOCK_TOKENS:
            raise HeadraceError(f"live prompts need blocks of {BLOCK_TOKENS} tokens: shrink the trace first")
        self._client = client
        self._trace = trace
        self._settings = settings
        self._prompts = Prompts(settings.seed)
        self._model = settings.model
        self._zero = 0.0
        self._children: dict[tuple[int, int], list[int]] = {}
        for index, session in enumerate(trace.sessions):
            if session.parent is not None:
                self._children.setdefault((session.parent, session.after_request), []).append(index)
        self._flight = asyncio.Semaphore(settings.in_flight or 1 << 30)
        self._slots = asyncio.Semaphore(settings.concurrency or len(trace.sessions) + 1)
        self.results: list[Measured] = []

    async def run(self) -> list[Measured]:
        """Every session to its end; results in order of completion."""
        if not self._model:
            self._model = (await self._client.call("GET", "/v1/models"))["data"][0]["id"]
        self._zero = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for index, session in sorted(enumerate(self._trace.sessions), key=lambda item: item[1].start_s):
                if session.parent is None:
                    tasks.create_task(self._root(index, session.start_s / self._settings.time_scale))
        return self.results

    async def _root(self, index: int, start_s: float) -> None:
        await self._until(start_s)
        async with self._slots:
            await self._session(index)

    async def _session(self, index: int) -> None:
        """One session and the sub-agents it starts."""
        session, began = self._trace.sessions[index], self._now()
        async with asyncio.TaskGroup() as tasks:
            self._spawn(tasks, index, -1)
            for turn, request in enumerate(session.requests):
                if self._settings.loop == "closed" and turn and request.think_s is not None:
                    await asyncio.sleep(request.think_s / self._settings.time_scale)
                else:
                    await self._until(began + request.offset_s / self._settings.time_scale)
                task = tasks.create_task(self._request(index, session, turn))
                if self._settings.loop == "closed":
                    await task
                self._spawn(tasks, index, turn)

    def _spawn(self, tasks: asyncio.TaskGroup, parent: int, turn: int) -> None:
        for child in self._children.get((parent, turn), ()):
            tasks.create_task(self._session(child))

    async def _request(self, index: int, session: Session, turn: int) -> None:
        request = session.requests[turn]
        wanted = max(request.output_tokens, 1)
        if self._settings.max_output:
            wanted = min(wanted, self._settings.max_output)
        body = {
            "model": self._model, "prompt": self._prompts.tokens(request, index), "max_tokens": wanted,
            "ignore_eos": True, "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        result = Measured(request.input_tokens)
        try:
            async with self._flight, asyncio.timeout(self._settings.timeout_s):
                result.started_s = self._now()
                await self._stream(body, result)
        except CapacityError as error:
            result.refused, result.error = True, str(error)
        except TimeoutError:
            result.error = f"no end within {self._settings.timeout_s} s"
        except HeadraceError as error:
            result.error = str(error)
        self.results.append(result)

    async def _stream(self, body: dict[str, Any], result: Measured) -> None:
        started = time.perf_counter()
        async with self._client.request("POST", "/v1/completions", body) as answer:
            if answer.status >= 400:
                raise refusal(answer.status, await answer.json())
            async for event in answer.events():
                if "error" in event:
                    raise refusal(500, event)
                if event.get("choices") and not result.ttft_s:
                    result.ttft_s = time.perf_counter() - started
                if event.get("usage"):
                    _read_usage(event["usage"], result)
        result.total_s = time.perf_counter() - started

    def _now(self) -> float:
        return time.perf_counter() - self._zero

    async def _until(self, when_s: float) -> None:
        wait = when_s - self._now()
        if wait > 0:
            await asyncio.sleep(wait)


def _read_usage(usage: dict[str, Any], result: Measured) -> None:
    details = usage.get("prompt_tokens_details") or {}
    result.prompt_tokens = int(usage["prompt_tokens"])
    result.cached_tokens = int(details.get("cached_tokens") or 0)
    result.by_tier = {str(k): int(v) for k, v in (details.get("cached_tokens_by_tier") or {}).items()}
    result.answer_tokens = int(usage["completion_tokens"])
