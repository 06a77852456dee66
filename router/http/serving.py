"""One generating request from start to end, for any API: refuse, wait for the first delta, then stream or collect.

An API gives a `Shape`: how its deltas, its end and its whole body look. Nothing is sent before the first token, so
every failure until then is a plain HTTP error; a later one is an error event in the stream.
"""

import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Iterable
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from headrace.errors import Cancelled, EngineError, HeadraceError
from headrace.router.answers.text import TextDelta
from headrace.router.generation import Generation
from headrace.router.http.errors import json_response
from headrace.router.http.service import Service, unless_gone
from headrace.router.http.sse import EventStream

log = logging.getLogger(__name__)


class Shape(Protocol):
    """One API's form of one request's answer. Fed each delta once, in order, also when nothing is streamed."""

    def start(self) -> Iterable[bytes]:
        """Frames before the first delta."""
        ...

    def feed(self, index: int, delta: TextDelta) -> Iterable[bytes]:
        """Frames of one delta of choice `index`."""
        ...

    def end(self) -> Iterable[bytes]:
        """Frames after the last delta: usage, terminator."""
        ...

    def over(self) -> None:
        """The request has ended, by itself or not; called at least once, never blocks."""
        ...

    def failure(self, error: HeadraceError) -> Iterable[bytes]:
        """The stream's error event."""
        ...

    def body(self) -> dict[str, Any]:
        """The whole answer, for a client that does not stream; called after `end`."""
        ...


async def serve(
    service: Service,
    request: Request,
    generation: Generation,
    shape: Shape,
    *,
    stream: bool,
    place: contextlib.ExitStack,
) -> Response:
    """Run it. `place` is what the request holds in the house; it is closed at the end of the response."""
    deltas = generation.deltas()
    finish = _Finish(service, generation, shape, place)
    headers = {"x-request-id": generation.spec.request_id}
    try:
        if stream:
            first = await unless_gone(request, anext(deltas))
            return EventStream(_frames(first, deltas, shape, finish), finish.closed, headers)
        await unless_gone(request, _collect(deltas, shape))
    except BaseException as error:
        finish.failed(error)
        raise
    finish.done()
    return json_response(shape.body(), headers=headers)


async def _collect(deltas: AsyncIterator[tuple[int, TextDelta]], shape: Shape) -> None:
    # Frames are the only output of a shape that streams; here they are thrown away and `body` is taken.
    list(shape.start())
    async for index, delta in deltas:
        list(shape.feed(index, delta))
    list(shape.end())


async def _frames(
    first: tuple[int, TextDelta], deltas: AsyncIterator[tuple[int, TextDelta]], shape: Shape, finish: "_Finish"
) -> AsyncIterator[bytes]:
    try:
        for frame in shape.start():
            yield frame
        for frame in shape.feed(*first):
            yield frame
        async for index, delta in deltas:
            for frame in shape.feed(index, delta):
                yield frame
        for frame in shape.end():
            yield frame
        finish.done()
    except HeadraceError as error:
        finish.failed(error)
        for frame in shape.failure(error):
            yield frame
    except Exception as error:
        log.exception("streaming failed")
        finish.failed(error)
        for frame in shape.failure(EngineError(f"internal error: {type(error).__name__}")):
            yield frame


class _Finish:
    """Ends a request once: abort what runs, give its place back, count its outcome."""

    def __init__(self, service: Service, generation: Generation, shape: Shape, place: contextlib.ExitStack) -> None:
        self._service = service
        self._generation = generation
        self._shape = shape
        self._place = place
        self._over = False

    def done(self) -> None:
        self._end("ok")

    def failed(self, error: BaseException) -> None:
        gone = isinstance(error, Cancelled) or not isinstance(error, Exception)
        self._end("cancelled" if gone else error.kind if isinstance(error, HeadraceError) else "internal")

    def closed(self, finished: bool) -> None:
        self._end("ok" if finished else "cancelled")

    def _end(self, outcome: str) -> None:
        if not self._over:
            self._over = True
            self._generation.cancel()
            self._place.close()
            self._shape.over()
            self._service.metrics.request_ended(outcome, self._generation.elapsed_s)
            usage = dataclasses.asdict(self._generation.usage)
            self._service.journal.end(self._generation.spec.request_id, outcome, usage)
