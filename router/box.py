"""The router as a box of the service: an event loop in a thread of its own, an HTTP port, and an orderly end.

A thin shell around `assemble`; what it starts it stops. Deploy's `BoxContext` is taken by its shape, because nothing
imports deploy.
"""

import asyncio
import concurrent.futures
import json
import logging
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Protocol, TypeVar

from headrace.config import Config
from headrace.errors import EngineError
from headrace.ids import new_incarnation
from headrace.router.assemble import Backends, Router, assemble
from headrace.router.http.server import HttpServer
from headrace.router.nodes import open_directory, open_nodes
from headrace.router.served import load_served_model

ENDPOINTS_FILE = "endpoints.json"
"""In the run directory, written by whoever restarts boxes: name -> address now. The router follows it."""
SLACK_S = 10.0
"""Time for closing sockets and confirming aborts, beside the grace period."""

log = logging.getLogger(__name__)
T = TypeVar("T")


class BoxContext(Protocol):
    """The part of deploy's context that the router reads."""

    @property
    def config(self) -> Config: ...
    @property
    def run_dir(self) -> str: ...
    @property
    def token(self) -> str: ...
    @property
    def fingerprint(self) -> bytes: ...
    @property
    def endpoints(self) -> dict[str, str]: ...


class RouterBox:
    """Implements deploy's Box."""

    def __init__(self, context: BoxContext) -> None:
        self._context = context
        self.incarnation = new_incarnation()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="router", daemon=True)
        self._router: Router | None = None
        self._server: HttpServer | None = None

    def start(self) -> dict[str, str]:
        self._thread.start()
        timeout_s = self._context.config.deploy.start_timeout_s
        try:
            url = self._call(self._start(), timeout_s + SLACK_S)
        except BaseException:
            self.stop(0.0)
            raise
        return {"router": url}

    def status(self) -> dict[str, Any]:
        router = self._router
        if router is None:
            return {"ready": False, "incarnation": self.incarnation}
        return {
            "ready": not router.service.draining,
            "incarnation": self.incarnation,
            "inflight": router.service.inflight,
            "sequences": router.engine.running,
            "queued": router.placer.admission.queued,
        }

    def stop(self, grace_s: float) -> None:
        """New requests get 503, running ones have `grace_s`, then everything is aborted and closed. Idempotent."""
        if not self._thread.is_alive():
            return
        try:
            self._call(self._stop(grace_s), grace_s + SLACK_S)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(SLACK_S)

    async def _start(self) -> str:
        context = self._context
        config = context.config
        boxes = context.endpoints
        nodes = {name: address for name, address in boxes.items() if name.startswith("node-")}
        backends = Backends(
            prefill={name: address for name, address in boxes.items() if name.startswith("prefill-")},
            decode={name: address for name, address in boxes.items() if name.startswith("decode-")},
            nodes=open_nodes(nodes, context.token),
            token=context.token,
            incarnation=self.incarnation,
            fingerprint=context.fingerprint,
        )
        model = await asyncio.to_thread(load_served_model, config)
        directory = open_directory(config.directory, nodes, context.token)
        self._router = await assemble(config, model, directory, backends)
        self._router.fleet.follow(_AddressFile(Path(context.run_dir) / ENDPOINTS_FILE).changed)
        self._server = HttpServer(self._router.app, config.router)
        return await self._server.start()

    async def _stop(self, grace_s: float) -> None:
        if self._router is not None:
            await self._router.drain(grace_s)
        if self._server is not None:
            await self._server.stop()
        if self._router is not None:
            await self._router.close()

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            leftover = asyncio.all_tasks(self._loop)
            for task in leftover:
                task.cancel()
            if leftover:
                self._loop.run_until_complete(asyncio.gather(*leftover, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    def _call(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError as error:
            future.cancel()
            raise EngineError(f"the router's loop did not finish within {timeout_s} s") from error


class _AddressFile:
    """Reads a JSON file of addresses again whenever it was replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = 0

    def changed(self) -> dict[str, str]:
        """The addresses if the file is new since the last call, else {}."""
        try:
            version = self._path.stat().st_mtime_ns
            if version == self._seen:
                return {}
            found = json.loads(self._path.read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            log.warning("%s: %s", self._path, error)
            return {}
        self._seen = version
        return {str(name): str(address) for name, address in found.items()}
